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


def test_each_phase_has_its_own_peak(device_memory):
    phase_peaks = PhasePeaks(device_memory)
    phase_peaks.start()
    use_and_free(device_memory, 700)
    phase_peaks.enter("backward")
    use_and_free(device_memory, 300)
    phase_peaks.enter("optimizer_step")
    peaks = phase_peaks.stop()
    assert peaks.phase_peak_bytes == {"forward": 800, "backward": 400, "optimizer_step": 100}
    assert peaks.peak_bytes == 800
    assert peaks.peak_reserved_bytes is None


def test_a_phase_entered_twice_keeps_its_higher_peak(device_memory):
    phase_peaks = PhasePeaks(device_memory)
    phase_peaks.start()
    use_and_free(device_memory, 500)
    phase_peaks.enter("backward")
    phase_peaks.enter("forward")
    use_and_free(device_memory, 200)
    assert phase_peaks.stop().phase_peak_bytes == {"forward": 600, "backward": 100}


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


def test_the_highest_reserved_bytes_of_all_phases(device_memory):
    device_memory.reserved_ratio = 2.0
    phase_peaks = PhasePeaks(device_memory)
    phase_peaks.start()
    use_and_free(device_memory, 900)
    phase_peaks.enter("backward")
    assert phase_peaks.stop().peak_reserved_bytes == 2000


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


def test_a_step_without_marks_has_no_peak():
    assert StepPeaks({}).peak_bytes == 0
