from __future__ import annotations

import pytest
import torch

from lightning_batchmem.measure.phases import PhaseMarks, StepPeaks


@pytest.fixture
def meter(fake_meter):
    return fake_meter(budget_bytes=10_000, base_bytes=100)


def use_and_free(meter, size_bytes):
    meter.use(size_bytes)
    meter.free()


def test_each_phase_has_its_own_peak(meter):
    marks = PhaseMarks(meter)
    marks.start()
    use_and_free(meter, 700)
    marks.enter("backward")
    use_and_free(meter, 300)
    marks.enter("optimizer_step")
    peaks = marks.stop()
    assert peaks.phase_peak_bytes == {"forward": 800, "backward": 400, "optimizer_step": 100}
    assert peaks.peak_bytes == 800
    assert peaks.peak_reserved_bytes is None


def test_a_phase_entered_twice_keeps_its_higher_peak(meter):
    marks = PhaseMarks(meter)
    marks.start()
    use_and_free(meter, 500)
    marks.enter("backward")
    marks.enter("forward")
    use_and_free(meter, 200)
    assert marks.stop().phase_peak_bytes == {"forward": 600, "backward": 100}


def test_what_happens_between_two_steps_belongs_to_none(meter):
    marks = PhaseMarks(meter)
    marks.start()
    first = marks.stop()
    use_and_free(meter, 5000)
    marks.enter("backward")  # a backward that is no training step's
    use_and_free(meter, 5000)
    assert first == StepPeaks({"forward": 100}, None)
    marks.start()
    use_and_free(meter, 10)
    assert marks.stop() == StepPeaks({"forward": 110}, None)


def test_the_highest_reserved_bytes_of_all_phases(meter):
    meter.reserved_ratio = 2.0
    marks = PhaseMarks(meter)
    marks.start()
    use_and_free(meter, 900)
    marks.enter("backward")
    assert marks.stop().peak_reserved_bytes == 2000


def test_after_an_optimizers_step_forward_runs_again_until_the_handles_are_removed(meter):
    optimizers = [torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1) for _ in range(2)]
    marks = PhaseMarks(meter)
    handles = marks.watch(optimizers)
    for optimizer in optimizers:
        marks.start()
        marks.enter("optimizer_step")
        optimizer.step()
        use_and_free(meter, 300)
        assert marks.stop().phase_peak_bytes == {"forward": 400, "optimizer_step": 100}
    for handle in handles:
        handle.remove()
    marks.start("optimizer_step")
    optimizers[0].step()
    use_and_free(meter, 300)
    assert marks.stop().phase_peak_bytes == {"optimizer_step": 400}


def test_a_step_without_marks_has_no_peak():
    assert StepPeaks({}).peak_bytes == 0
