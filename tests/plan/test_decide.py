"""The search on the host, where an overrun kills the process."""

import math
from dataclasses import replace as with_changes
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_batchmem.plan.decide import decide
from lightning_batchmem.plan.fit import fit_memory
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Chosen, NextSize, SearchFailed
from tests.helpers import simulated_search
from tests.helpers.simulated_search import (
    LAWS,
    LIMIT,
    STRAIGHT,
    device,
    launching,
    limits,
    peaks,
    saturating,
)

POLICY = SearchPolicy()


def on_host(*arguments, **changes):
    return limits(*arguments, overrun_kills=True, **changes)


def host(law, limit=LIMIT, **changes):
    return device(law, limit, kills=True, **changes)


def drive(run, bounds):
    """Search, and check the number of sizes besides the probes that fit."""
    driven = simulated_search.drive(run, bounds)
    probed = simulated_search.sizes_of(driven.trials, "probe")
    most = POLICY.max_sizes_compiled if bounds.is_compiled else POLICY.max_sizes
    assert len({trial.batch_size for trial in driven.trials} - probed) <= most
    return driven


def passing(largest):
    """A host with the straight law; no rehearsal of more than ``largest`` samples passes."""
    return host(STRAIGHT, largest_passed=largest)


def shrinking(run):
    """Reserve a third of the held bytes in the first rehearsal, and a twentieth in the others."""

    def run_with_reserve(step):
        trial = run(step)
        parts = 20
        if step.kind == "probe":
            parts = 10**9
        elif step.batch_size < 160:
            parts = 3
        return with_changes(trial, reserve_bytes=trial.held_bytes // parts)

    return run_with_reserve


def in_an_old_process(run, held):
    """``held`` bytes are free blocks of earlier work."""

    def run_with_free_blocks(step):
        trial = run(step)
        fixed_bytes = max(peaks(STRAIGHT, 0))
        return with_changes(trial, peak_held_bytes=trial.peak_bytes + held, fixed_bytes=fixed_bytes)

    return run_with_free_blocks


# The sizes are computed by hand.
CASES = [
    (host(STRAIGHT), {}, "2p 8p 32p 128p 150r 240r 300r", 300),
    (host(STRAIGHT), {"cap": 2}, "2p 2r", 2),
    (host(STRAIGHT), {"cap": 50}, "2p 8p 32p 50r", 50),
    (host(STRAIGHT), {"cap": 155}, "2p 8p 32p 128p 155r", 155),
    (host(STRAIGHT), {"cap": 250}, "2p 8p 32p 128p 150r 250r", 250),
    (host(STRAIGHT), {"steps_are_collective": True}, "2p 8p 32p 128p 150r 240r 291r", 291),
    # The law bends at 73 samples.
    (host([[(1000, 5), (-3000, 60)]]), {}, "2p 8p 32p 128p 136r 172r 216r", 216),
    # No larger size is certain to fit.
    (host([[(9000, 300)]]), {}, "2p 2r", 2),
    (host([[(9000, 600)]]), {}, "2p! 1p 1r", 1),
    # With compiled modules, the ladder has two sizes, and at most two more are tried.
    (host(STRAIGHT), {"is_compiled": True}, "2p 8p 240r 300r", 300),
    (passing(100), {"is_compiled": True}, "2p 8p 240r! 227r! 8r", 8),
    (host(STRAIGHT, held_share=0.5), {}, "2p 8p 32p 100r 160r 200r", 200),
    (passing(230), {}, "2p 8p 32p 128p 150r 240r! 227r", 227),
    (passing(160), {}, "2p 8p 32p 128p 150r 240r! 227r! 199r!", 150),
    # Five sizes are the most, and 128 was probed before.
    (passing(70), {}, "2p 8p 32p 128p 150r! 142r! 128r! 96r! 48r", 48),
    (in_an_old_process(host(STRAIGHT), 6000), {}, "2p 8p 32p 50r 80r 100r", 100),
    (shrinking(host(STRAIGHT)), {}, "2p 8p 32p 128p 150r 169r 283r", 283),
    (
        host(STRAIGHT),
        {"target_batch_size": 512, "multiple_of": None},
        "2p 8p 32p 128p 128r 256r",
        256,
    ),
    (host(STRAIGHT), {"target_batch_size": 480, "multiple_of": 10}, "10p 40p 120r 160r 240r", 240),
    (host(STRAIGHT), {"multiple_of": 24}, "24p 96p 144r 240r 288r", 288),
]


@pytest.mark.parametrize(("run", "changes", "expected", "size"), CASES)
def test_sizes_in_order(run, changes, expected, size):
    driven = drive(run, on_host(**changes))
    assert (driven.text, driven.plan.batch_size) == (expected, size)


@pytest.mark.parametrize(
    ("run", "bounds", "start", "end"),
    [
        (
            passing(0),
            {"is_compiled": True},
            "Nothing fits: 1 samples, the smallest size allowed, fit only if the allocator",
            "",
        ),
        (
            host([[(9000, 600)]]),
            {"low": 2},
            "Nothing fits: 2 samples, the smallest size allowed, need 0.010 MiB under a limit",
            "min_batch_size=1 tries a single sample.",
        ),
        (
            host(STRAIGHT),
            {"low": 20, "cap": 10},
            "No multiple of 1 lies between min_batch_size=20 and the largest size:",
            "",
        ),
    ],
)
def test_no_plan(run, bounds, start, end):
    step = simulated_search.drive(run, on_host(**bounds)).step
    assert isinstance(step, SearchFailed)
    assert step.reason.startswith(start)
    assert step.reason.endswith(end)


def test_a_data_set_of_one_sample_needs_no_step():
    step = decide([], on_host(cap=1))
    assert isinstance(step, Chosen)
    assert (step.batch_size, step.limited_by) == (1, "dataset")
    assert not step.is_verified


# Samples per second of an LSTM on the host at some sizes. Above 64 the C library maps blocks in
# every step.
LSTM = {2: 251, 8: 629, 18: 907, 32: 1040, 64: 1334, 128: 825, 256: 871, 536: 866, 10**7: 866}


def of_lstm(size):
    """The throughput of the LSTM, interpolated between two sizes."""
    for (smaller, slow), (larger, fast) in pairwise(LSTM.items()):
        if smaller <= size <= larger:
            share = math.log(size / smaller) / math.log(larger / smaller)
            return slow ** (1 - share) * fast**share
    return LSTM[2]


SPEED_CASES = [
    # 64 is measured between the sizes of the ladder.
    (of_lstm, {}, "2p 8p 32p 128p 512p 64p 64r", 64, "throughput"),
    (of_lstm, {"multiple_of": 24}, "24p 96p 384p 48p 48r", 48, "throughput"),
    # The last size on the ladder is 0.8 of the candidate.
    (launching, {}, "2p 8p 32p 128p 512p 1306p 512t 1306r", 1306, "throughput"),
    (saturating, {}, "2p 8p 32p 128p 512p 1306p 256p 256t 512r", 512, "throughput"),
    (lambda size: 1000.0, {}, "2p 8p 32p 4p 2r", 2, "throughput"),
    (lambda size: 1.0 * size, {}, "2p 8p 32p 128p 512p 1306p 1306r 1633r", 1633, "memory"),
    (lambda size: 1.0 * size, {"cap": 100}, "2p 8p 32p 80p 100r", 100, "dataset"),
    # Compiled modules have no sizes between those of the ladder.
    (of_lstm, {"is_compiled": True}, "2p 8p 32p 128p 512p 32r", 32, "throughput"),
    # Nothing is timed, so the largest size is chosen.
    (lambda size: None, {}, "2p 8p 32p 128p 512p 1306p 1306r 1633r", 1633, "memory"),
]


@pytest.mark.parametrize(("speed_at", "changes", "expected", "size", "limited_by"), SPEED_CASES)
def test_the_fastest_size_is_measured(speed_at, changes, expected, size, limited_by):
    bounds = on_host(50_000, objective="throughput", **changes)
    driven = drive(host(STRAIGHT, 50_000, speed_at=speed_at), bounds)
    assert (driven.text, driven.plan.batch_size) == (expected, size)
    assert driven.plan.limited_by == limited_by


def test_no_rehearsal_is_much_larger_than_any_size_that_ran():
    # The optimizer step has the highest peak up to 400 samples, so no small size shows the line.
    law = [[(5000, 10)], [(9000, 0)]]
    driven = drive(host(law, 18_000), on_host(18_000))
    assert (driven.text, driven.plan.batch_size) == ("2p 3p 12r 48r 192r 768r 1300r", 1300)


def test_no_probe_goes_beyond_the_first_rehearsal():
    # 512 samples are sure to fit, and are more than half of what is predicted to fit.
    driven = drive(host(STRAIGHT, 25_000), on_host(25_000))
    assert driven.text == "2p 8p 32p 128p 400r 640r 800r"


def test_both_objectives_state_the_fastest_and_the_largest_size():
    run = host(STRAIGHT, 50_000, speed_at=of_lstm)
    fast = drive(run, on_host(50_000, objective="throughput")).plan
    assert (fast.fastest_batch_size, fast.largest_batch_size) == (64, 1633)
    large = drive(run, on_host(50_000)).plan
    assert (large.fastest_batch_size, large.largest_batch_size) == (32, 1633)
    assert large.notes == (
        "1633 samples train 17% slower than 32 (866 and 1,040 samples/s)."
        ' objective="throughput" chooses the fastest size.',
    )


def test_the_search_for_the_fastest_size_goes_on_after_a_failure():
    run = host(STRAIGHT, 50_000, speed_at=of_lstm, largest_passed=50)
    driven = drive(run, on_host(50_000, objective="throughput"))
    # Below 64 throughput still rises, so the largest size that passes is searched.
    assert driven.text == "2p 8p 32p 128p 512p 64p 64r! 60r! 52r! 39r"
    assert driven.plan.batch_size == 39


BOUNDS = {
    "low": st.integers(1, 40),
    "cap": st.integers(1, 10**6),
    "multiple_of": st.none() | st.integers(1, 64),
    "target_batch_size": st.none() | st.integers(1, 4096),
    "objective": st.sampled_from(["memory", "throughput"]),
    "is_compiled": st.booleans(),
    "steps_are_collective": st.booleans(),
}


@settings(deadline=None, max_examples=150)
@given(
    law=LAWS,
    share=st.floats(0.05, 1),
    data=st.data(),
    held=st.floats(0, 0.3),
    passed=st.floats(0.3, 1.1),
)
def test_a_search_ends_within_its_limits(law, share, data, held, passed):
    """``drive`` checks the properties of every search."""
    limit = 8 * 10**9
    drawn = {name: data.draw(strategy) for name, strategy in BOUNDS.items()}
    largest = passed * limit / max(b for lines in law for _, b in lines)
    run = host(law, limit, held_share=held, largest_passed=largest, speed_at=launching)
    drive(run, on_host(int(share * limit), **drawn))


@settings(deadline=None, max_examples=150)
@given(law=LAWS, held=st.floats(0, 0.8), cap=st.integers(2, 10**6))
def test_no_size_is_predicted_above_the_limit(law, held, cap):
    limit = 8 * 10**9
    bounds = on_host(limit, cap=cap)
    trials = []
    run = host(law, limit, held_share=held)
    while isinstance(step := decide(trials, bounds), NextSize):
        model = fit_memory(trials)
        if model is not None:
            largest = max(trials, key=lambda trial: trial.batch_size)
            grown = model.predict_bytes(step.batch_size) - largest.peak_bytes
            needed_bytes = largest.needed_bytes + max(0.0, grown)
            assert needed_bytes <= limit * 1.001 or step.batch_size <= largest.batch_size
        trials.append(run(step))
    # A law of one straight line is predicted exactly, so only the first size may fail.
    if len(law) == 1 and len(law[0]) == 1:
        assert all(trial.outcome == "ok" for trial in trials[1:])
