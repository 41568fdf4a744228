import pickle

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_batchmem import MemoryProfiler
from lightning_batchmem.devices import device_memory_for
from tests.helpers.lawful import MIB, quiet_trainer
from tests.helpers.profiled import OWN_LOGS, At


@pytest.fixture(autouse=True)
def _limit_of_a_gibibyte(device, native):
    # The cache may hold blocks that an earlier error kept alive.
    device_memory_for(device).release_cached()
    fraction = 1024 * MIB / torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    yield
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    device_memory_for(device).release_cached()


class Hungry(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            held = []
            while True:
                held.append(torch.empty(100 * MIB, dtype=torch.uint8, device=self.device))
        return super().training_step(batch, batch_idx)


# The utilization cannot be read under MIG or in a sandbox without NVML.
@pytest.mark.filterwarnings("ignore:GPU utilization cannot be read")
def test_the_profiler_writes_it_and_names_the_file_in_the_error(tmp_path):
    options = {"accelerator": "gpu", "devices": 1, "max_steps": 5, "limit_val_batches": 0}
    trainer = quiet_trainer(
        MemoryProfiler(snapshot="on_oom", csv=False), default_root_dir=tmp_path, **options
    )
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        trainer.fit(Hungry())
    path = tmp_path / OWN_LOGS / "oom_snapshot_rank0.pickle"
    assert any(str(path) in note for note in caught.value.__notes__)
    events = pickle.loads(path.read_bytes())["device_traces"][trainer.strategy.root_device.index]
    assert any(
        frame["name"] == "training_step" for event in events for frame in event.get("frames", ())
    )
    assert not torch._C._cuda_isHistoryEnabled()


@pytest.mark.filterwarnings("ignore:GPU utilization cannot be read")
@pytest.mark.parametrize("number", [3, 9])
def test_the_profiler_writes_that_of_one_step(tmp_path, number):
    """The training has 5 steps, and only the events of one are recorded."""
    enabled = []
    note = At(on_train_batch_end=lambda *_: enabled.append(torch._C._cuda_isHistoryEnabled()))
    options = {"accelerator": "gpu", "devices": 1, "max_steps": 5, "limit_val_batches": 0}
    profiler = MemoryProfiler(snapshot=number, csv=False)
    # It is called before the profiler ends the step.
    trainer = quiet_trainer(note, profiler, default_root_dir=tmp_path, **options)
    trainer.fit(Marks())
    assert enabled == [step == number for step in range(5)]
    assert not torch._C._cuda_isHistoryEnabled()
    paths = list(tmp_path.rglob("*.pickle"))
    if number == 9:
        assert paths == []
        return
    (path,) = paths
    assert path == tmp_path / OWN_LOGS / "step_3_snapshot_rank0.pickle"
    events = pickle.loads(path.read_bytes())["device_traces"][trainer.strategy.root_device.index]
    sizes = {event["size"] // MIB for event in events if event["action"] == "alloc"}
    assert 13 in sizes
    assert not sizes & {10, 11, 12, 14}


@pytest.mark.filterwarnings("ignore:GPU utilization cannot be read")
@pytest.mark.parametrize("skipped", [1, None])
def test_the_record_ends_after_a_step_that_lightning_skips(tmp_path, skipped):
    """Lightning ends an epoch there, and the next step that ends has the same number."""
    module = Marks()
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == skipped else None
    options = {"accelerator": "gpu", "devices": 1, "max_epochs": 3, "limit_val_batches": 0}
    profiler = MemoryProfiler(snapshot=1, csv=False)
    quiet_trainer(profiler, default_root_dir=tmp_path, limit_train_batches=2, **options).fit(module)
    assert not torch._C._cuda_isHistoryEnabled()
    (path,) = tmp_path.rglob("*.pickle")
    assert path.name == "step_1_snapshot_rank0.pickle"


class Marks(BoringModel):
    """Takes 10 MiB in step 0, 11 MiB in step 1 and so on."""

    def training_step(self, batch, batch_idx):
        torch.empty((10 + batch_idx) * MIB, dtype=torch.uint8, device=self.device)
        return super().training_step(batch, batch_idx)
