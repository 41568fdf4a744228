"""What the profiler shows of memory on CUDA."""

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_batchmem import MemoryProfiler
from tests.helpers.cuda_stub import gpu_trainer
from tests.helpers.lawful import MIB
from tests.helpers.profiled import At

# The utilization cannot be read under MIG or in a sandbox without NVML.
pytestmark = pytest.mark.filterwarnings("ignore:GPU utilization cannot be read")


def block(size_mib, device):
    return torch.empty(size_mib * MIB, dtype=torch.uint8, device=device)


def profiled(module, *callbacks, **options):
    profiler = MemoryProfiler(csv=False)
    options = {"max_epochs": 2, "limit_train_batches": 8, "limit_val_batches": 0, **options}
    gpu_trainer(profiler, *callbacks, **options).fit(module)
    return profiler


@pytest.mark.parametrize("size_mib", [512, 0])
def test_memory_that_a_hook_takes_at_the_end_of_an_epoch_is_not_cached(device, size_mib, capsys):
    held = []
    hook = At(on_train_epoch_end=lambda *_: held.append(block(size_mib, device)) or held.clear())
    profiler = profiled(BoringModel(), hook)
    memory = profiler.summary.memory
    assert (memory.between_bytes > 512 * MIB) == bool(size_mib)
    assert memory.cached_bytes < 64 * MIB
    row = "| after step 7 "
    assert (row in capsys.readouterr().out) == bool(size_mib)
    if size_mib:
        assert profiler.run_peak_bytes == memory.between_steps.peak_bytes


class Keeps(BoringModel):
    """Keeps some MiB in each step."""

    def __init__(self, size_mib):
        super().__init__()
        self.size_mib = size_mib
        self.kept = []

    def training_step(self, batch, batch_idx):
        self.kept.append(block(self.size_mib, self.device))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("size_mib", [8, 0])
def test_what_steps_keep_has_a_row(device, native, size_mib, capsys):
    breakdown = profiled(Keeps(size_mib)).summary.memory.breakdown
    # The last of 16 steps keeps its own part at its peak.
    assert breakdown.kept_bytes == 14 * size_mib * MIB
    assert breakdown.activations_bytes < (size_mib + 2) * MIB
    assert ("kept since step 1" in capsys.readouterr().out) == bool(size_mib)


class Accumulates(Keeps):
    """Steps with every fourth batch, and frees its gradients then."""

    def __init__(self, size_mib):
        super().__init__(size_mib)
        self.automatic_optimization = False
        self.wide = torch.nn.Linear(32, 2**17, bias=False)

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.manual_backward(self.wide(batch).square().mean())
        if batch_idx % 4 == 3:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("size_mib", [8, 0])
def test_gradients_that_are_accumulated_are_not_kept(device, native, size_mib):
    """The parts are measured where there are no gradients, and the peak is where there are."""
    breakdown = profiled(Accumulates(size_mib)).summary.memory.breakdown
    assert breakdown.step == 4
    assert 16 * MIB <= breakdown.gradients_bytes < 17 * MIB
    # The peak is in the last of 16 steps.
    assert breakdown.kept_bytes == 11 * size_mib * MIB


class Wide(BoringModel):
    """Its gradients take 64 MiB, which a validation frees. The second epoch runs out of memory."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(32, 2**19, bias=False)

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1:
            block(2**20, self.device)
        return {"loss": self.wide(batch).square().mean()}


@pytest.mark.parametrize("size_mib", [64, 0])
def test_what_a_callback_keeps_after_a_validation_has_grown(device, native, size_mib):
    held = []
    hook = At(on_train_epoch_end=lambda *_: held.append(block(size_mib, device)))
    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        profiled(Wide(), hook, limit_val_batches=1)
    (note,) = [one for one in error.value.__notes__ if "memory ran out" in one]
    assert ("has grown by 64.0 MiB after step 7." in note) == bool(size_mib)
    assert ("has grown" in note) == bool(size_mib)


def test_a_larger_batch_has_not_grown(device, native):
    class Larger(Wide):
        def __init__(self):
            super().__init__()
            # A part of its block stays unsplit.
            self.sizes = [1] * 8 + [110_000]

        def train_dataloader(self):
            return torch.utils.data.DataLoader(
                [torch.zeros(size, 32) for size in self.sizes], batch_size=None
            )

        def training_step(self, batch, batch_idx):
            if batch_idx == 8:
                block(2**20, self.device)
            return super().training_step(batch, batch_idx)

    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        profiled(Larger(), limit_train_batches=9)
    (note,) = [one for one in error.value.__notes__ if "memory ran out" in one]
    assert "in train step 8 with a batch of 110,000 samples" in note
    assert "has grown" not in note


@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_a_list_that_grows_has_grown(device, native, stage):
    class Grows(Keeps):
        def training_step(self, batch, batch_idx):
            if batch_idx == 7:
                block(2**20, self.device)
            return super().training_step(batch, batch_idx)

        def predict_step(self, batch, batch_idx):
            return self.training_step(batch, batch_idx)

    trainer = gpu_trainer(MemoryProfiler(csv=False), max_epochs=1, limit_val_batches=0)
    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        getattr(trainer, stage)(Grows(8))
    # The parts are measured at the start of step 1, which has what step 0 keeps.
    assert "has grown by 48.0 MiB after step 0." in " ".join(error.value.__notes__)
