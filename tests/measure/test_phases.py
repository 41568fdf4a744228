from __future__ import annotations

import pytest
import torch

from lightning_batchmem.measure.peaks import PhasePeaks, StepPeaks


@pytest.fixture
def device_memory(fake_device):
    return fake_device(budget_bytes=10_000, base_bytes=100)


def use_and_free(device_memory, size_bytes):
    device_memory.use(size_bytes)
    device_memory.free()


def test_what_happens_between_two_steps_belongs_to_none(device_memory):
    phase_peaks = PhasePeaks(device_memory)
    phase_peaks.start()
    first = phase_peaks.stop()
    use_and_free(device_memory, 5000)
    phase_peaks.enter("backward")  # a backward that is no training step's
    use_and_free(device_memory, 5000)
    assert first == StepPeaks({"forward": 100}, None)
    phase_peaks.start()
    use_and_free(device_memory, 10)
    assert phase_peaks.stop() == StepPeaks({"forward": 110}, None)


def test_after_an_optimizers_step_forward_runs_again_until_the_handles_are_removed(device_memory):
    optimizers = [torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1) for _ in range(2)]
    phase_peaks = PhasePeaks(device_memory)
    handles = phase_peaks.watch(optimizers)
    for optimizer in optimizers:
        phase_peaks.start()
        phase_peaks.enter("optimizer_step")
        optimizer.step()
        use_and_free(device_memory, 300)
        assert phase_peaks.stop().phase_peak_bytes == {"forward": 400, "optimizer_step": 100}
    for handle in handles:
        handle.remove()
    phase_peaks.start("optimizer_step")
    optimizers[0].step()
    use_and_free(device_memory, 300)
    assert phase_peaks.stop().phase_peak_bytes == {"optimizer_step": 400}
