"""Which size is the fastest of those that were measured."""

import pytest

from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Speed, Trial
from lightning_batchmem.plan.throughput import (
    fastest,
    measured_speeds,
    num_flat_sizes,
    num_refinements,
    size_between,
    size_to_time_again,
)

POLICY = SearchPolicy()


def speeds(**by_size):
    return [Speed(int(name[1:]), float(value)) for name, value in by_size.items()]


def test_the_better_of_two_measurements_of_a_size_counts():
    trials = [
        Trial(8, "ok", {}, samples_per_second=80.0),
        Trial(2, "ok", {}, samples_per_second=30.0),
        Trial(8, "ok", {}, "rehearsal", samples_per_second=90.0),
        Trial(32, "over_limit", {}, samples_per_second=900.0),
        Trial(64, "ok", {}),
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
    ("measured", "size"),
    [
        # 8 is the fastest, and its faster neighbour is 32.
        (speeds(b2=10, b8=100, b32=90, b128=80), 16),
        (speeds(b2=80, b8=100, b32=70, b128=70), 4),
        # The wider gap comes first.
        (speeds(b2=10, b8=100, b16=90, b32=80), 4),
        (speeds(b2=100, b6=80), 3),
        (speeds(b2=100, b5=80), None),
        (speeds(b4=100), None),
        (speeds(), None),
    ],
)
def test_a_size_between_the_fastest_and_its_neighbour(measured, size):
    assert size_between(measured, POLICY) == size


def test_smaller_rivals_of_the_fastest_size_are_timed_once_more():
    trials = [
        Trial(size, "ok", {}, samples_per_second=speed)
        for size, speed in [(2, 10.0), (8, 86.0), (32, 100.0), (128, 84.0)]
    ]
    assert size_to_time_again(measured_speeds(trials), trials, POLICY) == 8
    trials.append(Trial(8, "ok", {}, "timing", samples_per_second=70.0))
    # 2 samples are not near the best, and a second time of 32 would change nothing.
    assert size_to_time_again(measured_speeds(trials), trials, POLICY) is None


def test_the_best_size_is_timed_once_more_if_a_smaller_one_is_near():
    trials = [
        Trial(size, "ok", {}, samples_per_second=speed)
        for size, speed in [(8, 50.0), (32, 98.0), (64, 99.0), (128, 100.0)]
    ]
    assert size_to_time_again(measured_speeds(trials), trials, POLICY) == 128
    trials.append(Trial(128, "ok", {}, "timing", samples_per_second=104.0))
    # 32 is no longer near enough, and 64 is.
    assert size_to_time_again(measured_speeds(trials), trials, POLICY) == 32
    trials.append(Trial(32, "ok", {}, "timing", samples_per_second=97.0))
    assert size_to_time_again(measured_speeds(trials), trials, POLICY) is None


def test_a_single_fast_size_is_not_timed_again():
    trials = [Trial(2, "ok", {}, samples_per_second=10.0)]
    assert size_to_time_again(measured_speeds(trials), trials, POLICY) is None
    trials.append(Trial(8, "ok", {}, samples_per_second=100.0))
    assert size_to_time_again(measured_speeds(trials), trials, POLICY) is None
    assert size_to_time_again([], [], POLICY) is None


def test_probes_below_the_largest_size_are_refinements():
    sizes = [2, 8, 32, 16, 24]
    trials = [Trial(size, "ok", {}) for size in sizes]
    assert num_refinements(trials) == 2
    assert num_refinements([*trials, Trial(16, "ok", {}, "rehearsal")]) == 2
