"""The search on a device, where a step that does not fit is an error that can be caught."""

from dataclasses import replace as with_changes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_batchmem.plan.limits import ProjectStep
from lightning_batchmem.plan.records import Chosen, NextSize, SearchFailed, Trial, TrialMemory, mib
from lightning_batchmem.plan.rules import decide, runs_left
from tests.helpers.plans import search_notes, trial_with
from tests.helpers.simulated_search import (
    LAWS,
    LIMIT,
    POLICY,
    STRAIGHT,
    device,
    drive,
    failing,
    launching,
    limits,
    passing,
    saturating,
    sizes_of,
)

# The law bends at 73 samples.
BENT = device([[(1000, 5), (-3000, 60)]])
COLLECTIVE = {"steps_are_collective": True}
BOTH = ("probe", "rehearsal")

# The sizes are computed by hand. The straight law fills the limit at 300 samples. The third probe
# is at 0.45 of it, the first rehearsal at 0.9, and none above 0.97. The next one is at 0.6 of the
# way between a size that ran and one that failed.
CASES = [
    (device(STRAIGHT), {}, "2p 8p 135p 270r 282r", 282),
    (device(STRAIGHT, 10_010), {"limit": 10_010, "multiple_of": None}, "2p 8p 134p 268r 280r", 280),
    # The allocator needs 1.3 times the live bytes.
    (device(STRAIGHT, held_share=0.3), {}, "2p 8p 135p 270r! 216r 248r! 235r!", 216),
    # The first rehearsal fails, or the one after it.
    (passing(270), {}, "2p 8p 135p 270r 282r!", 270),
    (passing(250), {}, "2p 8p 135p 270r! 216r 248r 261r!", 248),
    (passing(200), {}, "2p 8p 135p 270r! 216r! 183r 202r! 194r", 194),
    # Three out-of-memory errors are enough once a size passed.
    (failing(150, "rehearsal"), {}, "2p 8p 135p 270r! 216r! 183r! 163r! 151r! 144r", 144),
    # A size that was probed fails its rehearsal, so one that is not much smaller is searched.
    (
        passing(130),
        {},
        "2p 8p 135p 270r! 216r! 183r! 163r! 151r! 144r! 140r! 135r! 84r 114r 126r 131r!",
        126,
    ),
    (
        failing(130, "rehearsal"),
        {},
        "2p 8p 135p 270r! 216r! 183r! 163r! 151r! 144r! 140r! 135r! 84r",
        84,
    ),
    # The jump fails, and sizes between follow.
    (BENT, {}, "2p 8p 810p! 80p 385p! 175p 195r 204r", 204),
    (failing(130, *BOTH), {}, "2p 8p 135p! 32p 65p 107r 123r 130r", 130),
    (failing(20, *BOTH), {}, "2p 8p 135p! 32p! 22r! 16r 19r 20r 21r!", 20),
    (failing(5, *BOTH), {}, "2p 8p! 5r 6r!", 5),
    # The first size fails.
    (device([[(9000, 600)]]), {}, "2p! 1p 1r", 1),
    (failing(1, *BOTH), {}, "2p! 1p 1r", 1),
    # The second size is the next one, or one below four times the first that is certain to fit.
    (device([[(9000, 300)]]), {}, "2p 3p 3r", 3),
    (device([[(9000, 450)]]), {}, "2p 3p! 2r", 2),
    (device([[(1000, 1000)]]), {}, "2p 6p 8r", 8),
    (device([[(0, 100), (-8000, 4000)]]), {}, "2p 8p! 5r! 3r 4r", 4),
    # The fixed part takes nine tenths of the limit, and the shares are those of the size.
    (device([[(9000, 1)]]), {}, "2p 3p 450p 900r 942r", 942),
    # The data set allows no larger size.
    (device(STRAIGHT), {"cap": 2}, "2p 2r", 2),
    (device(STRAIGHT), {"cap": 3}, "2p 3r", 3),
    (device(STRAIGHT), {"cap": 50}, "2p 8p 50r", 50),
    (device(STRAIGHT), {"cap": 275}, "2p 8p 135p 270r", 270),
    (device(STRAIGHT), {"low": 40, "cap": 40}, "40p 40r", 40),
    # A large smallest size, as that of a budget.
    (device(STRAIGHT), {"low": 100}, "100p 250p 270r 282r", 282),
    (
        device([[(1000, 1)]], 10**6),
        {"limit": 10**6, "low": 4096},
        "4096p 16384p 449550p 899100r 941058r",
        941_058,
    ),
    # Other sizes are not allowed.
    (device(STRAIGHT), {"target_batch_size": 512, "multiple_of": None}, "2p 8p 128p 256r", 256),
    (device(STRAIGHT), {"target_batch_size": 480, "multiple_of": 10}, "10p 40p 120p 240r", 240),
    (device(STRAIGHT), {"multiple_of": 24}, "24p 96p 264r 288r", 288),
    (
        device(STRAIGHT),
        {"avoided_sizes": frozenset({2, 8, 12, 135, 270, 282})},
        "3p 11p 134p 269r 281r",
        281,
    ),
    # Ranks take steps together: one rehearsal at 0.85.
    (device(STRAIGHT), COLLECTIVE, "2p 8p 32p 127p 255r", 255),
    (passing(200), COLLECTIVE, "2p 8p 32p 127p 255r! 203r! 172r", 172),
]


@pytest.mark.parametrize(("run", "changes", "expected", "size"), CASES)
def test_sizes_in_order(run, changes, expected, size):
    driven = drive(run, limits(**changes))
    assert (driven.text, driven.plan.batch_size) == (expected, size)


def test_the_plan_states_what_it_was_computed_from():
    plan = drive(device(STRAIGHT), limits()).plan
    assert (plan.limited_by, plan.limit_bytes) == ("memory", LIMIT)
    peak_bytes = 1000 + 30 * 282
    assert plan.predicted_peak_bytes == plan.measured_peak_bytes == peak_bytes
    assert plan.held_peak_bytes == peak_bytes
    assert plan.memory.lines["forward"].slope == pytest.approx(30)
    assert plan.reason == (
        "282 samples: it passed a rehearsal, and the limit leaves little room above it."
    )
    collective = drive(device(STRAIGHT), limits(**COLLECTIVE)).plan
    assert collective.reason == (
        "255 samples: no larger size was rehearsed, because an error on one rank ends all ranks."
    )
    # A larger probe may have passed.
    steep = drive(device([[(1000, 4300)]]), limits(**COLLECTIVE))
    assert steep.text == "2p 1r"
    assert steep.plan.reason == (
        "1 sample: no larger size was rehearsed, because an error on one rank ends all ranks."
    )
    lower = drive(passing(250), limits()).plan
    reason = "248 samples: 261 samples fit only if the allocator releases its cache in every step."
    assert lower.reason == reason
    assert drive(device(STRAIGHT), limits(cap=50)).plan.limited_by == "dataset"
    accumulated = drive(device(STRAIGHT), limits(target_batch_size=512, multiple_of=None)).plan
    assert accumulated.limited_by == "memory"


def test_a_fragmented_size_is_noted():
    fragmented = with_changes(limits(), fragmented_bytes=LIMIT // 4)
    # The lines of the probes, at nine tenths of the size that fills all of the memory.
    most = drive(device(STRAIGHT), limits()).plan.trials
    size = next(trial.batch_size for trial in most if trial.kind == "rehearsal")

    def retrying(step):
        is_larger = step.kind == "rehearsal" and step.batch_size > size // 2
        return with_changes(device(STRAIGHT)(step), outcome="out_of_memory" if is_larger else "ok")

    (note,) = search_notes(drive(retrying, fragmented).plan)
    assert note.endswith(f"expandable_segments:True about {size} samples fit.")
    assert search_notes(drive(retrying, limits()).plan) == ()
    # No size failed, so nothing was left free.
    assert search_notes(drive(device(STRAIGHT), fragmented).plan) == ()
    # Where no error can be caught, it is left free before anything fails.
    together = with_changes(fragmented, steps_are_collective=True)
    plan = drive(device(STRAIGHT), together).plan
    assert len(search_notes(plan)) == 1
    less = with_changes(limits(LIMIT - LIMIT // 4), steps_are_collective=True)
    assert plan.batch_size == drive(device(STRAIGHT), less).plan.batch_size
    # Something else limits the size.
    bounded = with_changes(limits(cap=50), fragmented_bytes=LIMIT // 4)
    assert search_notes(drive(device(STRAIGHT), bounded).plan) == ()


def holding(least_bytes, rehearsed_bytes_of_a_sample=20):
    """A host whose process holds this much, and more for each sample, whose tensors take 10."""

    def run(step):
        trial = device([[(9000, 10)]], fixed_bytes=9000)(step)
        of_sample = rehearsed_bytes_of_a_sample if step.kind == "rehearsal" else 20
        held_bytes = least_bytes + of_sample * step.batch_size
        outcome = "over_limit" if held_bytes > LIMIT else trial.outcome
        needed_bytes = trial.memory.peak_bytes
        trial = trial_with(trial, held_peak_bytes=held_bytes, needed_bytes=needed_bytes)
        return with_changes(trial, outcome=outcome)

    return run


def test_a_process_of_the_host_that_holds_more_than_the_limit_gets_a_smaller_size():
    # 100 samples fill the limit, of which 0.25 are 25.
    assert drive(holding(9000), limits(is_host=True)).text == "2p 8p 12p 25r"
    driven = drive(holding(9000, 60), limits(is_host=True))
    assert driven.text == "2p 8p 12p 25r! 19r! 16r"
    assert driven.plan.verified
    assert driven.plan.reason.startswith(f"16 samples: 19 samples need {mib(9000 + 19 * 60)}")


@pytest.mark.parametrize(
    ("besides_bytes", "set_aside_bytes", "expected"),
    [
        # 460 bytes are free at 2 samples. All of the 540 bytes that the process took may grow, and
        # 0.9 of the free ones hold a sample more. At 11 samples it has taken 720 bytes and 280 are
        # free, of which 0.9 hold 3 samples more.
        (500, 0, "2p 3p 5p 8p 11p 14r"),
        # A checkpoint of 200 bytes leaves 100 of 300 bytes at 10 samples.
        (500, 200, "2p 3p 5p 8p 10p 11r"),
        # It has no room beside the smallest size, so no larger one is tried.
        (500, 500, "2p 2r"),
        # 0.9 of 160 bytes hold less than a sample, of which 840 bytes may be two.
        (800, 0, "2p 2r"),
    ],
)
def test_what_the_process_of_the_host_holds_besides_tensors_bounds_each_size(
    besides_bytes, set_aside_bytes, expected
):
    run = holding(9000 + besides_bytes)

    def with_checkpoint(step):
        return trial_with(run(step), set_aside_bytes=set_aside_bytes)

    assert drive(with_checkpoint, limits(low=2, is_host=True)).text == expected


def test_a_process_of_the_host_that_holds_too_much_at_every_size_fits_at_none():
    driven = drive(holding(LIMIT), limits(is_host=True))
    assert driven.text == "2p! 1p!"
    reason = f"Nothing fits: 1 sample, the smallest size allowed, need {mib(LIMIT + 20)}"
    assert driven.step.reason.startswith(reason)


def test_a_device_that_does_not_limit_the_size_gets_no_advice():
    def of_two_devices(step):
        """Half of the network is on another device, which is full at 50 samples."""
        trial = device(STRAIGHT, held_share=0.3)(step)
        outcome = "out_of_memory" if step.batch_size > 50 else "ok"
        return with_changes(trial, outcome=outcome)

    plan = drive(of_two_devices, limits()).plan
    assert plan.batch_size <= 50
    assert search_notes(plan) == ()


@pytest.mark.parametrize(
    ("run", "bounds", "start", "end"),
    [
        (
            passing(0),
            {},
            "Nothing fits: 1 sample, the smallest size allowed, fit only if the allocator",
            "",
        ),
        (
            device([[(9000, 600)]]),
            {"low": 2},
            "Nothing fits: 2 samples, the smallest size allowed, ran out of memory under a limit",
            "min_batch_size=1 tries a single sample.",
        ),
        (
            device(STRAIGHT),
            {"low": 20, "cap": 10},
            "No multiple of 1 lies between min_batch_size=20 and the largest size: the data set",
            "",
        ),
        (
            device(STRAIGHT),
            {"low": 9, "cap": 15, "multiple_of": 8},
            "No multiple of 8 lies between",
            "",
        ),
        (
            device(STRAIGHT),
            {"low": 9, "multiple_of": None, "target_batch_size": 8},
            "No size lies between",
            "",
        ),
    ],
)
def test_no_plan(run, bounds, start, end):
    step = drive(run, limits(**bounds)).step
    assert isinstance(step, SearchFailed)
    assert step.reason.startswith(start)
    assert step.reason.endswith(end)


def test_a_data_set_of_one_sample_needs_no_step():
    step = decide([], limits(cap=1))
    assert isinstance(step, Chosen)
    assert (step.batch_size, step.limited_by) == (1, "dataset")
    assert not step.is_verified


def rising(size):
    return 1.0 * size


def falling(size):
    return 1000.0 - size / 100


DOUBLED = "2p 4p 8p 16p 32p 64p 128p 256p 512p 1024p"

# The limit fills at 1633 samples.
SPEED_CASES = [
    # Sizes double until two in a row gain less than 5 %.
    (lambda size: 1000.0, {}, {}, "2p 4p 8p 2r", 2, "throughput"),
    (falling, {}, {}, "2p 4p 8p 2r", 2, "throughput"),
    (lambda size: 10.0 * min(size, 60), {}, {}, "2p 4p 8p 16p 32p 64p 128p 256p 64r", 64, None),
    # 512 samples are as fast as 1024.
    (saturating, {}, {}, f"{DOUBLED} 512r", 512, "throughput"),
    # Throughput rises up to the largest size that may be rehearsed.
    (launching, {}, {}, f"{DOUBLED} 1024r", 1024, "memory"),
    (rising, {}, {"cap": 100}, "2p 4p 8p 16p 32p 64p 100p 100r", 100, "dataset"),
    (rising, {}, {"multiple_of": 24}, "24p 48p 96p 192p 384p 768p 1464p 1464r", 1464, "memory"),
    # Nothing is timed.
    (lambda size: None, {}, {}, f"{DOUBLED} 1024r", 1024, "memory"),
    (lambda size: None, {"largest_passed": 300}, {}, f"{DOUBLED} 1024r! 512r! 256r", 256, "memory"),
    # A failure leads to a smaller size that was timed.
    (saturating, {"largest_passed": 200}, {}, f"{DOUBLED} 512r! 256r! 128r", 128, "memory"),
    (falling, {"largest_passed": 1}, {}, "2p 4p 8p 2r! 1p 1r", 1, "memory"),
]


@pytest.mark.parametrize(
    ("speed_at", "law", "changes", "expected", "size", "limited_by"), SPEED_CASES
)
def test_the_fastest_size_is_measured(speed_at, law, changes, expected, size, limited_by):
    bounds = limits(50_000, objective="throughput", **changes)
    driven = drive(device(STRAIGHT, 50_000, speed_at=speed_at, **law), bounds)
    assert (driven.text, driven.plan.batch_size) == (expected, size)
    assert driven.plan.limited_by == (limited_by or "throughput")


def probes_failing_from(smallest, speed_at):
    """A device with room for 1633 samples, on which probes of this size run out of memory."""
    measure = device(STRAIGHT, 50_000, speed_at=speed_at)

    def run(step):
        if step.kind == "probe" and step.batch_size >= smallest:
            return Trial(step.batch_size, "out_of_memory", TrialMemory(), step.kind)
        return measure(step)

    return run


def test_the_largest_of_the_sizes_before_a_failed_probe_is_rehearsed_if_it_is_the_fastest():
    driven = drive(probes_failing_from(128, rising), limits(50_000, objective="throughput"))
    assert driven.text == "2p 4p 8p 16p 32p 64p 128p! 64r"
    assert driven.plan.limited_by == "memory"


# Samples per second of an LSTM at some sizes.
LSTM = {2: 251, 4: 450, 8: 629, 16: 880, 32: 1040, 64: 1334, 128: 825}


def of_lstm(size):
    return float(LSTM.get(size, 866))


def test_the_largest_size_is_stated_and_for_throughput_the_fastest():
    run = device(STRAIGHT, 50_000, speed_at=of_lstm)
    fast = drive(run, limits(50_000, objective="throughput")).plan
    assert (fast.batch_size, fast.fastest_batch_size, fast.largest_batch_size) == (64, 64, 1470)
    large = drive(device(STRAIGHT, 50_000, speed_at=falling), limits(50_000)).plan
    assert (large.batch_size, large.largest_batch_size) == (1538, 1538)
    # Single steps were timed, which is too few to compare sizes.
    assert (large.fastest_batch_size, large.notes) == (None, ())


BOUNDS = {
    "low": st.integers(1, 40),
    "cap": st.integers(1, 40) | st.integers(1, 10**6),
    "multiple_of": st.none() | st.integers(1, 64),
    "target_batch_size": st.none() | st.integers(1, 4096),
    "objective": st.sampled_from(["memory", "throughput"]),
    "steps_are_collective": st.booleans(),
    "avoided_sizes": st.frozensets(st.integers(1, 30)),
}
SPEEDS = st.sampled_from([launching, saturating, rising, falling, lambda size: None])


@settings(deadline=None, max_examples=300)
@given(
    law=LAWS,
    share=st.floats(0.05, 1),
    data=st.data(),
    held=st.floats(0, 0.3),
    passed=st.floats(0.3, 1.1),
    speed_at=SPEEDS,
)
def test_a_search_ends_within_its_limits(law, share, data, held, passed, speed_at):
    """``drive`` checks the properties of every search."""
    limit = 8 * 10**9
    drawn = {name: data.draw(strategy) for name, strategy in BOUNDS.items()}
    bounds = limits(int(share * limit), **drawn)
    largest = passed * limit / max(b for lines in law for _, b in lines)
    run = device(law, limit, held_share=held, largest_passed=largest, speed_at=speed_at)
    driven = drive(run, bounds)
    rehearsed = sizes_of(driven.trials, "rehearsal")
    if bounds.steps_are_collective:
        assert len(rehearsed) <= 1
    if isinstance(driven.step, Chosen) and rehearsed:
        assert driven.step.batch_size == max(rehearsed)
        assert driven.step.largest_batch_size >= driven.step.batch_size
        # No plan names a size that is faster than its own, so none needs a note about it.
        assert driven.step.fastest_batch_size in (None, driven.step.batch_size)


@settings(deadline=None, max_examples=300)
@given(law=LAWS, cap=st.integers(2, 10**6), share=st.floats(0.05, 1))
def test_few_trials_are_needed_where_only_live_bytes_count(law, cap, share):
    limit = int(share * 8 * 10**9)
    driven = drive(device(law, limit), limits(limit, cap=cap))
    assert len(driven.trials) <= 16
    if len(law) == 1 and len(law[0]) == 1 and isinstance(driven.step, Chosen):
        # A straight line is predicted exactly, so a size near the limit passes at once.
        assert len(driven.trials) <= 7
        intercept, slope = law[0][0]
        most = min(cap, POLICY.rehearsal.most_share * (limit - intercept) / slope)
        assert driven.step.batch_size >= most / (1 + POLICY.rehearsal.gap_share) - 2


# Corner cases.


@pytest.mark.parametrize("objective", ["memory", "throughput"])
def test_a_size_may_be_unlimited(objective):
    """Memory that does not grow fills no limit."""
    driven = drive(device([[(1000, 0)]]), limits(cap=500, objective=objective))
    assert driven.plan.batch_size == 500
    assert driven.plan.limited_by == "dataset"


def test_ranks_rehearse_no_size_above_the_prediction():
    """An error there ends all ranks."""
    # The limit fills at 9 samples, of which 0.85 are 7.
    run = device([[(1000, 1000)]], fixed_bytes=1000)
    assert drive(run, limits(**COLLECTIVE)).text == "2p 7p 7r"
    # The limit fills at 112 samples, so 128 are not even probed.
    run = device([[(1000, 80)]], fixed_bytes=1000)
    assert drive(run, limits(multiple_of=64, **COLLECTIVE)).text == "64p 64r"
    # It fills at 160 samples, of which 0.85 are 136.
    run = device([[(1000, 56)]], fixed_bytes=1000)
    assert drive(run, limits(multiple_of=64, **COLLECTIVE)).text == "64p 128p 128r"


# On the host the straight law is rehearsed at 0.25 of 300 samples, and the last probe is at half of
# that. No probe is more than four times as large as the one before.
HOST_CASES = [
    (device(STRAIGHT), {}, "2p 4p 16p 37p 75r", 75),
    (device(STRAIGHT), {"cap": 50}, "2p 4p 16p 37p 50r", 50),
    (device(STRAIGHT), {"cap": 500, "low": 64}, "64p 65p 75r", 75),
    # The second size is certain to take at most this share, or is the next one.
    (device([[(1000, 300)]]), {}, "2p 3p 7r", 7),
    # A size above the share is probed, and not chosen.
    (device([[(1000, 1000)]]), {}, "2p 3p 2r", 2),
    # The smallest size takes more, but it fits.
    (device([[(1000, 3500)]]), {"low": 2}, "2p 2r", 2),
    (device([[(1000, 3500)]]), {"low": 1}, "2p 1r", 1),
    # The fixed part takes nine tenths of the limit.
    (device([[(9000, 1)]], fixed_bytes=9000), {}, "2p 8p 32p 125p 250r", 250),
    # A part that does not grow hides the samples of small sizes.
    (device([[(1000, 30), (4000, 0)]], fixed_bytes=1000), {}, "2p 3p 8p 22p 61p 170p 93r", 93),
]


@pytest.mark.parametrize(("run", "changes", "expected", "size"), HOST_CASES)
def test_one_size_is_rehearsed_on_the_host(run, changes, expected, size):
    driven = drive(run, limits(is_host=True, **changes))
    assert (driven.text, driven.plan.batch_size) == (expected, size)


def test_the_plan_states_why_the_size_stays_far_from_the_limit_of_the_host():
    chosen = drive(device(STRAIGHT), limits(is_host=True)).step
    assert chosen.why == (
        "on a CPU tensors get 25% of the room below the limit, because the system"
        " ends a process that runs out of memory. A higher memory_limit raises the size."
    )


def test_a_checkpoint_and_waiting_batches_take_room_on_the_host():
    def run(step):
        trial = device(STRAIGHT)(step)
        return trial_with(trial, set_aside_bytes=3000 + 10 * step.batch_size)

    # 1000 + 3000 + (30 + 10) * 150 bytes fill the limit.
    assert drive(run, limits(is_host=True)).text == "2p 3p 12p 18p 37r"


def test_a_fixed_part_above_the_limit_is_refused_before_a_step():
    driven = drive(device(STRAIGHT), limits(is_host=True, missing_bytes=2000))
    assert driven.trials == []
    assert driven.step.reason == (
        "Nothing fits, and no step was run: without any batch, the process and the gradients need"
        " 0.002 MiB more than the limit of 0.010 MiB. Use a smaller model or a higher memory_limit."
    )


@pytest.mark.parametrize("objective", ["memory", "throughput"])
def test_gradients_do_not_keep_a_host_at_the_smallest_size(objective):
    run = device([[(1000, 3)], [(3000, 3)]], fixed_bytes=1000, speed_at=rising)
    driven = drive(run, limits(is_host=True, objective=objective))
    # 2,333 samples fill the limit.
    assert driven.plan.batch_size == 583


def with_gradients(fixed_bytes, gradient_bytes, sample_bytes, *, besides_bytes=0, held_for_live=1):
    """A host whose gradients are alive in the forward pass."""

    def run(step):
        growing_bytes = sample_bytes * step.batch_size
        live_bytes = fixed_bytes + gradient_bytes + growing_bytes
        return Trial(
            step.batch_size,
            "ok",
            TrialMemory(
                {"forward": live_bytes, "backward": live_bytes, "optimizer_step": live_bytes},
                held_peak_bytes=int(
                    live_bytes + besides_bytes + (held_for_live - 1) * growing_bytes
                ),
                fixed_bytes=fixed_bytes,
            ),
            step.kind,
        )

    return run


@pytest.mark.parametrize(
    ("besides_bytes", "expected"),
    [
        # At 2 samples the process has taken 2,020 of 5,200 bytes besides what lasts. If all of them
        # grow, 0.9 of the others hold 2 samples more. The size with lines is 0.25 of 320 at most.
        (0, "2p 3p 7p 16p 36p 74r"),
        # It has taken 3,020 bytes, of which 1,000 are no tensors.
        (1000, "2p 3p 4p 6p 9p 14p 22p 34p 51r"),
        # It has taken 4,020 bytes, and 0.9 of the others hold less than a sample more.
        (2000, "2p 2r"),
        # More is held than the limit, which tensors do not fill.
        (4000, "2p 2r"),
    ],
)
def test_what_the_process_of_the_host_has_taken_may_all_grow(besides_bytes, expected):
    run = with_gradients(4800, 2000, 10, besides_bytes=besides_bytes)
    assert drive(run, limits(low=2, is_host=True)).text == expected


def test_what_the_process_has_taken_bounds_no_size_that_ranks_take_together_on_a_device():
    run = with_gradients(4800, 2000, 10, besides_bytes=1000)
    assert drive(run, limits(low=2, **COLLECTIVE)).text.startswith("2p 4p 16p ")


def test_what_backward_makes_below_the_gradients_counts_on_the_host():
    """As with activation checkpoints: the forward pass keeps 10 bytes of a sample, backward 200."""

    def run(step):
        size = step.batch_size
        forward_bytes = 4800 + 2000 + 10 * size
        backward_bytes = max(4800 + 2000, 4800 + 200 * size)
        return Trial(
            size,
            "ok",
            TrialMemory({"forward": forward_bytes, "backward": backward_bytes}, fixed_bytes=4800),
            step.kind,
        )

    # The limit fills at 26 samples. The lines of 2 and 3 samples fill it at 320.
    assert drive(run, limits(low=2, is_host=True)).text == "2p 3p 7p 16p 7r"


@given(
    gradients=st.floats(5, 100),
    sample_bytes=st.integers(10**4, 10**7),
    room=st.floats(1.0, 10.0),
    besides=st.floats(0, 0.5),
    held_for_live=st.floats(1, 4),
    objective=st.sampled_from(["memory", "throughput"]),
)
@settings(deadline=None)
def test_no_size_on_the_host_holds_more_than_the_limit_or_is_below_a_tenth_of_the_largest(
    gradients, sample_bytes, room, besides, held_for_live, objective
):
    """Gradients of 5 to 100 times what a sample needs, and up to four bytes for each live byte."""
    gradient_bytes = int(gradients * sample_bytes)
    besides_bytes = int(besides * gradient_bytes)
    run = with_gradients(
        10**9,
        gradient_bytes,
        sample_bytes,
        besides_bytes=besides_bytes,
        held_for_live=held_for_live,
    )
    room_bytes = int(room * gradient_bytes + 2 * held_for_live * sample_bytes)
    limit_bytes = 10**9 + gradient_bytes + besides_bytes + room_bytes
    bounds = limits(limit_bytes, low=2, is_host=True, objective=objective, multiple_of=1)
    driven = drive(run, bounds)
    assert all(trial.memory.held_bytes <= limit_bytes for trial in driven.trials)
    largest = room_bytes / (held_for_live * sample_bytes)
    assert driven.trials[-1].batch_size >= 0.1 * largest


def test_a_size_above_the_limit_of_the_host_is_refused():
    def run(step):
        return Trial(
            step.batch_size, "over_limit", TrialMemory({"forward": 11_000}, needed_bytes=11_000)
        )

    driven = drive(run, limits(is_host=True))
    assert driven.text == "2p! 1p!"
    assert driven.step.reason.startswith("Nothing fits: 1 sample, the smallest size allowed, need")


def test_ranks_time_no_size_above_their_share():
    bounds = limits(35_000, objective="throughput", **COLLECTIVE)
    driven = drive(device(STRAIGHT, 35_000, speed_at=rising), bounds)
    # The limit fills at 1133 samples, of which 0.85 are 963.
    assert driven.text == "2p 4p 8p 16p 32p 64p 128p 256p 512p 963p 963r"


def test_the_reason_is_the_throughput_if_larger_sizes_ran_below_a_failed_probe():
    run = probes_failing_from(128, lambda size: 10.0 * min(size, 30))
    plan = drive(run, limits(50_000, objective="throughput")).plan
    assert (plan.batch_size, plan.largest_batch_size) == (32, 64)
    assert plan.limited_by == "throughput"
    assert plan.reason.startswith("32 samples: the smallest size with at least 95% of the best")


def test_the_reason_of_a_fast_size_does_not_name_it_the_largest_that_is_predicted_to_fit():
    run = device(STRAIGHT, 50_000, speed_at=launching)
    plan = drive(run, limits(50_000, objective="throughput")).plan
    assert (plan.batch_size, plan.limited_by) == (1024, "memory")
    largest = f"{plan.largest_batch_size:,} samples"
    assert plan.reason == f"1,024 samples: the limit leaves room for no more than {largest}."


def test_a_peak_above_that_of_a_larger_size_is_left_out():
    """cuDNN may take a larger workspace at a smaller size."""

    def run(step):
        trial = device(STRAIGHT)(step)
        if step.batch_size == 2:
            return trial_with(trial, phase_peak_bytes={"forward": 5000}, held_peak_bytes=5000)
        return trial

    driven = drive(run, limits())
    # After 2 samples 4 are certain to fit, and after 4 samples 35 are.
    assert driven.text == "2p 4p 16p 135p 270r 282r"
    assert driven.plan.memory.predict_bytes(2) < 5000


@settings(deadline=None, max_examples=300)
@given(data=st.data(), speed_at=SPEEDS)
def test_a_search_ends_whatever_happens(data, speed_at):
    """Outcomes and peaks follow no law, and ``drive`` bounds the number of trials."""
    bounds = limits(10**9, **{name: data.draw(strategy) for name, strategy in BOUNDS.items()})
    outcomes = st.sampled_from(["ok", "out_of_memory", "over_limit", "allocator_retry"])
    peak_bytes = st.sampled_from([10**8, 10**9]) | st.integers(1, 2 * 10**9)

    def run(step):
        outcome = data.draw(outcomes)
        phases = {}
        if outcome != "out_of_memory":
            phases = {"forward": data.draw(peak_bytes)}
        speed = speed_at(step.batch_size) if outcome == "ok" else None
        return Trial(step.batch_size, outcome, TrialMemory(phases), step.kind, samples_per_s=speed)

    drive(run, bounds)


def test_about_as_many_runs_are_left_as_most_searches_have():
    probes = [Trial(size, "ok", TrialMemory()) for size in (2, 8, 40, 160, 640)]
    left = [runs_left(NextSize(1000, "probe"), probes[:count]) for count in range(6)]
    assert left == [3, 2, 1, 1, 1, 1]
    assert runs_left(NextSize(1000, "rehearsal"), []) == 0


@pytest.mark.parametrize(("is_host", "about"), [(False, "about"), (True, "at least")])
def test_a_bounded_plan_says_what_memory_alone_allows(is_host, about):
    bounds = limits(cap=50, step=ProjectStep(33), is_host=is_host)
    plan = drive(device(STRAIGHT), with_changes(bounds, max_reason="recipe")).plan
    assert plan.largest_batch_size > plan.batch_size
    assert f"Memory alone allows {about} {plan.largest_batch_size:,} samples." in plan.reason


@pytest.mark.parametrize("differing_bytes", [(), (900, 300)])
def test_lines_predict_no_larger_size_where_equal_steps_differ(differing_bytes):
    def run(step):
        return trial_with(device(STRAIGHT)(step), differing_bytes=differing_bytes)

    bounds = with_changes(limits(cap=50, step=ProjectStep(33)), max_reason="recipe")
    plan = drive(run, bounds).plan
    assert plan.batch_size == 50
    assert (plan.largest_batch_size > 50) is (differing_bytes == ())
