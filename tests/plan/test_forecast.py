import pytest

from lightning_batchmem.plan.forecast import expected_seconds
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import SearchLimits, Trial


def test_the_expected_time_is_that_of_the_sizes_to_come():
    bounds = SearchLimits(1000, 1, 50, "dataset")
    policy = SearchPolicy(steps_of_a_rehearsal=14, restart_seconds=2.0)
    trials = [
        Trial(size, "ok", {"forward": 100 + 10 * size}, step_seconds=size / 10) for size in (2, 8)
    ]
    assert expected_seconds(trials[:1], bounds, policy) == 0
    # A rehearsal of 50 samples is 14 steps of 5 s, and 2 s for the restart.
    assert expected_seconds(trials, bounds, policy) == pytest.approx(14 * 5 + 2)
