import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_batchmem.devices.peaks import StepPeaks
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, Line, MemoryModel, Trial
from lightning_batchmem.profile.alerts import Alerts, LeakDetector
from lightning_batchmem.profile.step_record import DeviceReading, StepRecord
from lightning_batchmem.profile.totals import StepTotals

GIB = 1024 * MIB
GRANULARITY = 2 * MIB
# The line is at 200 MiB for 100 samples.
LINE = Line(100 * MIB, MIB, 10, 100)


def plan(*, device="cuda", **lines):
    trials = [Trial(size, "ok", {}) for size in (10, 20, 100)]
    trials.append(Trial(400, "out_of_memory", {}))
    memory = MemoryModel(lines or {"backward": LINE})
    return Plan(100, "memory", True, GIB, None, None, tuple(trials), memory, None, device=device)


def alerts(granularity_bytes=GRANULARITY, **arguments):
    return Alerts(granularity_bytes=granularity_bytes, **arguments)


def step(number, size, peak_bytes, start_bytes=None):
    return StepRecord(
        number, size, StepPeaks({"forward": int(peak_bytes)}), 0.1, 0.0, start_bytes=start_bytes
    )


# Tests of leaks.

QUIET = {
    "constant": lambda n: GIB,
    "one jump": lambda n: GIB + (n > 40) * GIB,
    "a jump in every epoch": lambda n: GIB + (n % 100 > 50) * GIB,
    "noise": lambda n: GIB + random.Random(n).uniform(0, GIB),
    "fills up": lambda n: GIB + GIB * (1 - math.exp(-n / 15)),
    "slows down as a root": lambda n: GIB + 100 * MIB * math.sqrt(n),
    "slows down as a logarithm": lambda n: GIB + GIB * math.log1p(n),
    "accumulation": lambda n: GIB + (n % 8 != 0) * GIB,
}
LEAKS = {
    "from the start": lambda n: GIB + n * MIB,
    "after a warm-up": lambda n: GIB + min(n, 12) * GIB + n * MIB,
    "from a later step": lambda n: GIB + max(0, n - 3000) * MIB,
    "under noise": lambda n: GIB + n * MIB + random.Random(n).uniform(0, 100 * MIB),
    "under epochs": lambda n: GIB + n * MIB + 3 * MIB * (n % 40),
    "in a long epoch": lambda n: GIB + n % 15_000 * MIB,
}


def leak(use, steps, granularity_bytes=GRANULARITY):
    detector = LeakDetector(granularity_bytes)
    number = 0
    while number < steps:
        if (pace := detector.add(number, int(use(number)))) is not None:
            return pace
        # As in the recorder, the gap between two readings grows with the number of steps.
        number += max(1, number // 48)
    return None


@pytest.mark.parametrize("name", [*QUIET, *LEAKS])
def test_steady_growth_alone_is_a_leak(name):
    if name in QUIET:
        assert leak(QUIET[name], 20_000) is None
    else:
        assert leak(LEAKS[name], 16_384) is not None


@pytest.mark.parametrize(
    ("rise_bytes", "base_bytes", "granularity_bytes", "is_leak"),
    [
        (16 * MIB, 0, 0, True),
        (16 * MIB - 48, 0, 0, False),
        (0.02 * 10 * GIB + 48, 10 * GIB, 0, True),
        (0.02 * 10 * GIB - 48, 10 * GIB, 0, False),
        # The memory grows by 32 MiB from window to window.
        (96 * MIB, 0, 32 * MIB - 1, True),
        (96 * MIB, 0, 32 * MIB, False),
    ],
)
def test_a_leak_is_16_mib_and_two_per_cent_and_above_the_granularity(
    rise_bytes, base_bytes, granularity_bytes, is_leak
):
    # 48 steps lie between the first step of the first window and the first step of the last one.
    pace = leak(lambda n: base_bytes + rise_bytes * n / 48, 64, granularity_bytes)
    assert (pace is not None) is is_leak


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 100 * GIB), st.integers(0, 100 * GIB), st.integers(0, 2**32))
def test_noise_around_a_constant_is_no_leak(base_bytes, noise_bytes, seed):
    rng = random.Random(seed)
    assert leak(lambda n: base_bytes + rng.randint(0, noise_bytes), 5000) is None


def test_the_alert_for_a_leak_names_pace_and_end_once():
    one = alerts()
    issued = []
    for n in range(300):
        issued += one.step(step(n, 8, 1500 * MIB, GIB + n * MIB), limit_bytes=2000 * MIB)
    assert issued == [one.issued["leak"]]
    # The alert comes after step 63. From the peak of 1,500 MiB, 500 steps reach the limit.
    pace = "grows by 1.0 MiB a step"
    end = "and would reach the limit of 2,000.0 MiB at about step 563."
    assert f"{pace} {end}" in issued[0]
    assert "loss.item()" in issued[0]


# Tests of steps above the plan.


def is_above(one, size, peak_bytes):
    """Whether the second step at a size is above the plan; the first is not compared."""
    assert one.step(step(0, size, 10**15), None) == []
    return bool(one.step(step(60, size, peak_bytes), None))


@pytest.mark.parametrize(
    ("granularity_bytes", "device", "size", "allowed_mib"),
    [
        # The line, at 200 MiB, may be exceeded by 5 % of its growth of 100 MiB.
        (GRANULARITY, "cuda", 100, 205),
        # The granularity of 2 MiB is more than 5 % of the growth.
        (GRANULARITY, "cuda", 10, 112),
        # Below the measured sizes, the smallest measured size counts.
        (GRANULARITY, "cuda", 3, 112),
        (GRANULARITY, "cuda", 150, 257.5),
        # On the host the tolerance is at least 64 MiB.
        (GRANULARITY, "host", 100, 264),
    ],
)
def test_a_step_may_be_above_the_plan_by_a_share_of_the_growth(
    granularity_bytes, device, size, allowed_mib
):
    below = alerts(granularity_bytes, plan=plan(device=device))
    assert not is_above(below, size, allowed_mib * MIB)
    one = alerts(granularity_bytes, plan=plan(device=device))
    assert is_above(one, size, allowed_mib * MIB + 1)
    allowed = f"{allowed_mib:.1f} MiB"
    text = f"step 60 ({size} samples), {allowed}, is above {allowed}, the most that BatchFinder"
    assert text in one.issued["prediction"]
    # The alert is issued only once.
    assert one.step(step(61, 100, 10**15), None) == []


@pytest.mark.parametrize(
    ("device", "allowed_mib"), [("cuda", 205), ("host", 200 + 200 + 0.3 * 300)]
)
def test_the_resident_set_may_exceed_the_live_bytes_as_in_the_search(device, allowed_mib):
    held = Trial(100, "ok", {"backward": 200 * MIB}, "rehearsal", peak_held_bytes=400 * MIB)
    one = replace(plan(device=device), trials=(held,))
    assert not is_above(alerts(plan=one), 100, allowed_mib * MIB)
    assert is_above(alerts(plan=one), 100, allowed_mib * MIB + 1)


@pytest.mark.parametrize(("device", "above"), [("cuda", True), ("host", False)])
def test_the_heap_of_the_host_keeps_the_memory_of_a_larger_batch_and_of_evaluation(device, above):
    one = alerts(plan=plan(device=device))
    for number, size in enumerate((100, 10, 100)):
        assert one.step(step(number, size, 200 * MIB), None) == []
    assert bool(one.step(step(4, 10, 200 * MIB), None)) is above
    evaluation = Line(MIB, 4 * MIB, 10, 100)
    evaluated = alerts(plan=plan(device=device, backward=LINE, evaluation=evaluation))
    assert is_above(evaluated, 100, 401 * MIB) is above


def test_the_prediction_is_the_highest_line_of_training():
    forward = Line(150 * MIB, MIB / 4, 10, 100)
    evaluation = Line(MIB, GIB, 10, 100)
    one = alerts(plan=plan(backward=LINE, forward=forward, evaluation=evaluation))
    assert [one.predicted_bytes(size) for size in (100, 20)] == [200 * MIB, 155 * MIB]


NO_LINES = Plan(2, "memory", True, GIB, None, None, (), None, None)


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
def test_without_a_prediction_no_step_is_compared(of, size):
    one = alerts(plan=of)
    assert one.predicted_bytes(size) is None
    assert not is_above(one, size, 10**15)


# Tests of evaluation, and of the steps between two logs.


# Evaluation may be above training by the granularity of 2 MiB, or by 2 % of a larger peak.
@pytest.mark.parametrize(("allowed_mib", "train_mib"), [(52, 50), (1020, 1000)])
def test_evaluation_above_training(allowed_mib, train_mib):
    one = alerts()
    assert one.evaluation("validate", allowed_mib * MIB, train_mib * MIB) == []
    (text,) = one.evaluation("validate", allowed_mib * MIB + 1, train_mib * MIB)
    assert text.endswith("in the validate DataLoader.")
    assert one.evaluation("validate", allowed_mib * MIB + 1, train_mib * MIB) == []


NOTHING = {
    "steps": 50,
    "seconds": 5.0,
    "wait_share": 0.0,
    "peak_bytes": 100 * MIB,
    "busy": None,
    "is_host": True,
}


def interval(one, *, retries=None, **changes):
    seen = {**NOTHING, **changes}
    totals = StepTotals(steps=seen["steps"], seconds=seen["seconds"], peak_bytes=seen["peak_bytes"])
    if seen["wait_share"] is not None:
        totals.wait_seconds = seen["wait_share"] * seen["seconds"]
        totals.waited_seconds = seen["seconds"]
    utilization = None if seen["busy"] is None else ("gpu_pct", seen["busy"])
    return one.interval(
        totals, DeviceReading(1000 * MIB, utilization, retries), is_host=seen["is_host"]
    )


def test_allocator_retries_after_the_first_interval():
    one = alerts()
    # Retries before the first reading do not count, since a search may cause some.
    assert [interval(one, retries=retries) for retries in (None, 7, 7)] == [[]] * 3
    (text,) = interval(one, retries=10)
    assert "retried 3 times" in text
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text
    assert interval(one, retries=20) == []


def test_nearly_full():
    one = alerts()
    assert interval(one, peak_bytes=950 * MIB) == []
    (text,) = interval(one, peak_bytes=950 * MIB + 1)
    assert text.startswith("The peak, 950.0 MiB, is above 95% of the 1,000.0 MiB")
    assert interval(one, peak_bytes=999 * MIB) == []
    # A plan may fill the memory up to its limit.
    planned = alerts(plan=plan())
    assert interval(planned, peak_bytes=GIB) == []
    assert len(interval(planned, peak_bytes=GIB + 1)) == 1


@pytest.mark.parametrize(
    ("changes", "issued"),
    [
        ({"wait_share": 0.51}, True),
        ({"wait_share": 0.5}, False),
        ({"wait_share": None}, False),
        ({"wait_share": 0.9, "busy": 49.0}, True),
        ({"wait_share": 0.9, "busy": 49.0, "is_host": False}, True),
        # A GPU may work while its process waits.
        ({"wait_share": 0.9, "is_host": False}, False),
        ({"wait_share": 0.9, "busy": 50.0}, False),
        ({"wait_share": 0.9, "steps": 19}, False),
        ({"wait_share": 0.9, "steps": 20}, True),
        ({"wait_share": 0.9, "seconds": 9.9}, False),
    ],
)
def test_waiting_for_data(changes, issued):
    assert bool(interval(alerts(), **{"seconds": 10.0, **changes})) is issued


def test_the_wait_is_summed_over_intervals():
    one = alerts()
    slow = {"steps": 5, "seconds": 3.0, "wait_share": 0.8}
    # The sum starts again after each check.
    assert interval(one, seconds=1000.0, wait_share=0.1) == []
    assert [interval(one, **slow, busy=busy) for busy in (10.0, 40.0, None)] == [[]] * 3
    (text,) = interval(one, **slow)
    assert "80% of the last 12 s (20 steps)" in text
    assert "and the device was busy for 25% of it" in text
    assert "num_workers" in text
    assert interval(one, steps=100, seconds=100.0, wait_share=0.8) == []
