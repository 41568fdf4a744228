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
