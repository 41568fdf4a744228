"""The rules of the alerts, and their sentences, from numbers."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_batchmem.devices.peaks import StepPeaks
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, Line, MemoryModel, Trial
from lightning_batchmem.profile.alerts import (
    Alerts,
    DataWait,
    LeakDetector,
    Prediction,
)
from lightning_batchmem.profile.recorder import next_start_reading
from lightning_batchmem.profile.step_record import DeviceReading, StepRecord
from lightning_batchmem.profile.totals import Ratio, StepTotals

GIB = 1024 * MIB
GRANULARITY = 2 * MIB
# The line is at 200 MiB for 100 samples.
LINE = Line(100 * MIB, MIB, 10, 100)


def plan(**lines):
    trials = [Trial(size, "ok", {}) for size in (10, 20, 100)]
    trials.append(Trial(400, "out_of_memory", {}))
    memory = MemoryModel(lines or {"backward": LINE})
    return Plan(100, "memory", True, GIB, None, None, tuple(trials), memory)


def alerts(**arguments):
    """Alerts that list the sentences they issue, and the list."""
    sentences = []
    return Alerts(sentences.append, granularity_bytes=GRANULARITY, **arguments), sentences


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
        number = next_start_reading(number)
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


def test_readings_at_step_start_become_rare_but_never_stop():
    numbers = [0]
    while numbers[-1] < 2**14:
        numbers.append(next_start_reading(numbers[-1]))
    assert numbers[:97] == list(range(97))
    assert 30 <= sum(2**12 <= number < 2**13 for number in numbers) <= 36


def test_the_alert_for_a_leak_names_pace_and_end_once():
    rules, sentences = alerts()
    for n in range(300):
        rules.step(step(n, 8, 1500 * MIB, GIB + n * MIB), limit_bytes=2000 * MIB)
    (sentence,) = sentences
    assert rules.issued == {"leak": sentence}
    # The alert comes after step 63. From the peak of 1,500 MiB, 500 steps reach the limit.
    pace = "grows by 1.0 MiB a step"
    end = "and would reach the limit of 2,000.0 MiB at about step 563."
    assert f"{pace} {end}" in sentence
    assert "loss.item()" in sentence


# Tests of steps above the plan.


def prediction(plan, *, held_is_resident_set=False):
    return Prediction(plan, GRANULARITY, held_is_resident_set=held_is_resident_set)


def test_a_resident_set_is_predicted_by_what_the_search_held_at_this_size():
    trials = (Trial(100, "ok", {"backward": 200 * MIB}, peak_held_bytes=300 * MIB),)
    searched = replace(plan(), trials=trials)
    on_host = prediction(searched, held_is_resident_set=True)
    assert (on_host.peak_bytes(100), on_host.peak_bytes(50)) == (300 * MIB, None)
    on_device = prediction(searched)
    assert (on_device.peak_bytes(100), on_device.peak_bytes(50)) == (200 * MIB, 150 * MIB)


@pytest.mark.parametrize(
    ("held_is_resident_set", "size", "allowed_mib"),
    [
        # The line, at 200 MiB, may be exceeded by 5 % of its growth of 100 MiB.
        (False, 100, 205),
        # The granularity of 2 MiB is more than 5 % of the growth.
        (False, 10, 112),
        # Below the measured sizes, the smallest measured size counts.
        (False, 3, 112),
        (False, 150, 257.5),
        # The tolerance for a resident set is at least 64 MiB.
        (True, 100, 264),
    ],
)
def test_a_step_may_be_above_the_plan_by_a_share_of_the_growth(
    held_is_resident_set, size, allowed_mib
):
    rule = prediction(plan(), held_is_resident_set=held_is_resident_set)
    assert rule.allowed_bytes(size) == allowed_mib * MIB


@pytest.mark.parametrize(
    ("held_is_resident_set", "allowed_mib"), [(False, 205), (True, 200 + 200 + 0.3 * 300)]
)
def test_the_resident_set_may_exceed_the_live_bytes_as_in_the_search(
    held_is_resident_set, allowed_mib
):
    held = Trial(100, "ok", {"backward": 200 * MIB}, "rehearsal", peak_held_bytes=400 * MIB)
    rule = prediction(replace(plan(), trials=(held,)), held_is_resident_set=held_is_resident_set)
    assert rule.allowed_bytes(100) == allowed_mib * MIB


def test_the_alert_for_a_step_above_the_plan_is_issued_once():
    rules, sentences = alerts(plan=plan())
    # The first step of a size is not compared.
    rules.step(step(0, 100, 10**15), None)
    rules.step(step(59, 100, 205 * MIB), None)
    assert sentences == []
    rules.step(step(60, 100, 205 * MIB + 1), None)
    rules.step(step(61, 100, 10**15), None)
    (sentence,) = sentences
    assert "step 60 (100 samples), 205.0 MiB, is above 205.0 MiB, the most that Batch" in sentence


@pytest.mark.parametrize("held_is_resident_set", [True, False])
def test_the_heap_of_the_host_keeps_the_memory_of_a_larger_batch_and_of_evaluation(
    held_is_resident_set,
):
    rule = prediction(plan(), held_is_resident_set=held_is_resident_set)
    for size in (100, 10, 100):
        assert rule.exceeded_bytes(size, 200 * MIB) is None
    assert (rule.exceeded_bytes(10, 200 * MIB) is None) is held_is_resident_set
    evaluated = plan(backward=LINE, evaluation=Line(MIB, 4 * MIB, 10, 100))
    rule = prediction(evaluated, held_is_resident_set=held_is_resident_set)
    assert (rule.allowed_bytes(100) > 401 * MIB) is held_is_resident_set


def test_the_prediction_is_the_highest_line_of_training():
    forward = Line(150 * MIB, MIB / 4, 10, 100)
    evaluation = Line(MIB, GIB, 10, 100)
    rules, _ = alerts(plan=plan(backward=LINE, forward=forward, evaluation=evaluation))
    assert [rules.predicted_bytes(size) for size in (100, 20)] == [200 * MIB, 155 * MIB]


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
def test_without_a_prediction_no_step_is_compared(of, size):
    rules, sentences = alerts(plan=of)
    assert rules.predicted_bytes(size) is None
    for number in range(2):
        rules.step(step(number, size, 10**15), None)
    assert sentences == []


# Tests of evaluation, and of the steps between two logs.


# Evaluation may be above training by the granularity of 2 MiB, or by 2 % of a larger peak.
@pytest.mark.parametrize(("allowed_mib", "train_mib"), [(52, 50), (1020, 1000)])
def test_evaluation_above_training(allowed_mib, train_mib):
    rules, sentences = alerts()
    for peak_bytes in (None, allowed_mib * MIB):
        rules.evaluation("validate", peak_bytes, train_mib * MIB)
    assert sentences == []
    for _ in range(2):
        rules.evaluation("validate", allowed_mib * MIB + 1, train_mib * MIB)
    (sentence,) = sentences
    assert sentence.endswith("in the validate DataLoader.")


def test_allocator_retries_after_the_first_reading():
    rules, sentences = alerts()
    # The first steps place their blocks, once in a training.
    for retries in (None, 7, 7, 10, 20):
        rules.interval(StepTotals(), DeviceReading(alloc_retries=retries), None)
    (sentence,) = sentences
    assert "retried 3 times" in sentence
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in sentence


# A plan may fill the memory up to its limit, which is 1 GiB.
@pytest.mark.parametrize(("of", "allowed_mib"), [(None, 950), (plan(), 1024)])
def test_nearly_full(of, allowed_mib):
    rules, sentences = alerts(plan=of)
    for peak_bytes in (None, allowed_mib * MIB):
        rules.interval(StepTotals(peak_bytes=peak_bytes), DeviceReading(), 1000 * MIB)
    assert sentences == []
    for _ in range(2):
        rules.interval(StepTotals(peak_bytes=allowed_mib * MIB + 1), DeviceReading(), 1000 * MIB)
    (sentence,) = sentences
    assert f"The peak, {allowed_mib:,}.0 MiB, is above 95% of the 1,000.0 MiB" in sentence


def waited(steps, seconds, share):
    return StepTotals(steps, seconds, data_wait=Ratio(share * seconds, seconds))


@pytest.mark.parametrize(
    ("steps", "seconds", "share", "busy", "is_wait"),
    [
        (20, 10.0, 0.51, 49.0, True),
        (20, 10.0, 0.5, 49.0, False),
        (20, 10.0, 0.51, 50.0, False),
        (19, 10.0, 0.51, 49.0, False),
        (20, 9.9, 0.51, 49.0, False),
    ],
)
def test_waiting_for_data(steps, seconds, share, busy, is_wait):
    assert (DataWait().add(waited(steps, seconds, share), busy) is not None) is is_wait


def test_the_wait_is_summed_over_intervals_of_known_utilization():
    rules, sentences = alerts()
    # The sum starts again after each check.
    rules.interval(waited(50, 1000.0, 0.1), DeviceReading(utilization=("gpu_pct", 0.0)), None)
    # A device may work while its process waits.
    rules.interval(waited(50, 1000.0, 0.9), DeviceReading(), None)
    for busy in (10.0, 40.0, 10.0, 40.0):
        assert sentences == []
        rules.interval(waited(5, 3.0, 0.8), DeviceReading(utilization=("gpu_pct", busy)), None)
    (sentence,) = sentences
    assert "80% of the last 12 s (20 steps)" in sentence
    assert "and the device was busy for 25% of it" in sentence
    assert "num_workers" in sentence
    rules.interval(waited(100, 100.0, 0.8), DeviceReading(utilization=("gpu_pct", 0.0)), None)
    assert len(sentences) == 1
