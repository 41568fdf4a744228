"""Which size is the fastest that was measured, and when the project's size is taken instead."""

import pytest

from lightning_batchmem.plan.objectives import fastest, num_flat_sizes, objective_of
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Speed, Trial, TrialMemory
from lightning_batchmem.plan.trials_so_far import measured_speeds

POLICY = SearchPolicy()


def speeds(**by_size):
    return [Speed(int(name[1:]), float(value)) for name, value in by_size.items()]


def test_the_better_of_two_measurements_of_a_size_counts():
    trials = [
        Trial(8, "ok", TrialMemory(), samples_per_s=80.0),
        Trial(2, "ok", TrialMemory(), samples_per_s=30.0),
        Trial(8, "ok", TrialMemory(), "rehearsal", samples_per_s=90.0),
        Trial(32, "over_limit", TrialMemory(), samples_per_s=900.0),
        Trial(64, "ok", TrialMemory()),
    ]
    assert measured_speeds(trials) == [Speed(2, 30.0), Speed(8, 90.0)]


def test_the_smallest_size_near_the_best_is_the_fastest():
    assert fastest(speeds(b2=94, b8=95, b32=100), POLICY) == Speed(8, 95.0)
    assert fastest([], POLICY) is None


@pytest.mark.parametrize(
    ("measured", "flat_sizes"),
    [
        (speeds(), 0),
        (speeds(b2=100), 0),
        (speeds(b2=100, b8=80), 1),
        # It fell twice.
        (speeds(b2=100, b8=80, b32=70), 2),
        # It rose by less than 5 % twice.
        (speeds(b2=100, b8=104, b32=106), 2),
        (speeds(b2=100, b8=104, b32=110), 0),
        # A recovery after a fall is no rise above the best.
        (speeds(b2=100, b8=50, b32=90), 2),
    ],
)
def test_sizes_without_a_rise_are_counted_from_the_largest(measured, flat_sizes):
    assert num_flat_sizes(measured, POLICY) == flat_sizes


@pytest.mark.parametrize(
    ("objective", "speed", "takes_own"),
    [
        ("auto", 84, True),
        ("auto", 86, False),
        ("recipe", 84, False),
        ("memory", 10, False),
        ("throughput", 115, True),
        ("throughput", 116, False),
    ],
)
def test_the_own_size_is_taken_where_the_other_is_slower(objective, speed, takes_own):
    own = Speed(16, 100.0)
    sought = objective_of(SearchOptions(objective=objective))
    assert sought.takes_project_size(own, Speed(64, float(speed))) is takes_own
    assert sought.needs_times is (objective == "throughput")
