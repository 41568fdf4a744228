"""The peak of a training step by a plan."""

import pytest

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, Line, MemoryModel, Trial
from lightning_batchmem.profile.plan_prediction import PlanPrediction

GIB = 1024 * MIB
# The line is at 200 MiB for 100 samples.
LINE = Line(100 * MIB, MIB, 10, 100)


def plan(**lines):
    trials = [
        Trial(size, "ok", {"backward": size * MIB}, peak_held_bytes=300 * MIB)
        for size in (10, 20, 100)
    ]
    trials.append(Trial(400, "out_of_memory", {}))
    memory = MemoryModel(lines or {"backward": LINE})
    return Plan(100, "memory", True, GIB, None, None, tuple(trials), memory)


def test_a_resident_set_is_predicted_by_what_the_search_held_at_this_size():
    on_host = PlanPrediction(plan(), is_host=True)
    assert (on_host.bytes_at(100), on_host.bytes_at(50)) == (300 * MIB, None)
    on_device = PlanPrediction(plan(), is_host=False)
    assert (on_device.bytes_at(100), on_device.bytes_at(50)) == (200 * MIB, 150 * MIB)


def test_the_prediction_is_the_highest_line_of_training():
    forward = Line(150 * MIB, MIB / 4, 10, 100)
    evaluation = Line(MIB, GIB, 10, 100)
    lines = plan(backward=LINE, forward=forward, evaluation=evaluation)
    prediction = PlanPrediction(lines, is_host=False)
    assert [prediction.bytes_at(size) for size in (100, 20)] == [200 * MIB, 155 * MIB]


NO_LINES = Plan(2, "memory", True, GIB, None, None, (), None)


@pytest.mark.parametrize(
    ("of", "size"),
    [
        (plan(), None),
        # Sizes above 1.5 times the largest measured size, 100, have no prediction.
        (plan(), 151),
        (plan(evaluation=LINE), 20),
        (NO_LINES, 2),
        (None, 2),
    ],
)
def test_without_a_prediction(of, size):
    assert PlanPrediction(of, is_host=False).bytes_at(size) is None
