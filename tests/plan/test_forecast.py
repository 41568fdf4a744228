"""How many trials a search will take."""

import pytest

from lightning_batchmem.plan.decide import decide
from lightning_batchmem.plan.forecast import expected_trials
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import NextSize, SearchLimits, Trial

POLICY = SearchPolicy()


def searched(limits, speed=None):
    """The trials of a search whose steps take 100 bytes and 10 more for each sample."""
    trials = []
    while isinstance(step := decide(trials, limits), NextSize):
        size = step.batch_size
        peaks = {"forward": 100 + 10 * size}
        trials.append(Trial(size, "ok", peaks, step.kind, samples_per_second=speed))
    return trials


@pytest.mark.parametrize("kills", [False, True])
def test_the_number_of_trials_is_exact_where_memory_follows_its_lines(kills):
    limits = SearchLimits(5000, 1, 10_000, "dataset", overrun_kills=kills)
    trials = searched(limits)
    assert len(trials) > 4
    for number in range(2, len(trials)):
        assert expected_trials(trials[:number], limits, POLICY) == len(trials)


def test_no_number_is_known_before_there_are_lines():
    limits = SearchLimits(5000, 1, 10_000, "dataset")
    trials = searched(limits)
    assert expected_trials([], limits, POLICY) is None
    assert expected_trials(trials[:1], limits, POLICY) is None


def test_a_failure_adds_trials():
    limits = SearchLimits(5000, 1, 10_000, "dataset")
    trials = searched(limits)[:-1]
    expected = expected_trials(trials, limits, POLICY)
    failed = Trial(trials[-1].batch_size, "out_of_memory", {}, "rehearsal")
    assert expected_trials([*trials[:-1], failed], limits, POLICY) > expected


def test_the_number_exceeds_the_trials_that_were_run_for_throughput():
    limits = SearchLimits(5000, 1, 10_000, "dataset", objective="throughput")
    trials = searched(limits, speed=10.0)
    for number in range(2, len(trials)):
        assert expected_trials(trials[:number], limits, POLICY) > number
