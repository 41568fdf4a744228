"""The rules of the alerts, and their sentences, from numbers."""

import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.alerts import Alerts, LeakDetector, conclusion
from lightning_batchmem.profile.step import DeviceReading, Step, Totals
from lightning_batchmem.profile.step_memory import next_reading
from lightning_batchmem.profile.summary import RunMemory, RunSpeed
from tests.helpers.steps import interval

GIB = 1024 * MIB
GRANULARITY = 2 * MIB


def alerts(**arguments):
    """Alerts that list the sentences they issue, and the list."""
    sentences = []
    return Alerts(sentences.append, granularity_bytes=GRANULARITY, **arguments), sentences


def step(number, size, peak_bytes, start_bytes=None):
    return Step(number, "train", size, 0.1, 0.0, peak_bytes, start_bytes=start_bytes)


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


def leak(use, steps, granularity_bytes=GRANULARITY, limit_bytes=0):
    detector = LeakDetector(granularity_bytes)
    number = 0
    while number < steps:
        if (pace := detector.add(number, int(use(number)), limit_bytes)) is not None:
            return pace
        number = next_reading(number)
    return None


@pytest.mark.parametrize("name", [*QUIET, *LEAKS])
def test_steady_growth_alone_is_a_leak(name):
    if name in QUIET:
        assert leak(QUIET[name], 20_000) is None
    else:
        assert leak(LEAKS[name], 16_384) is not None


@pytest.mark.parametrize(
    ("rise_bytes", "limit_bytes", "granularity_bytes", "is_leak"),
    [
        (0.02 * 10 * GIB + 48, 10 * GIB, 0, True),
        (0.02 * 10 * GIB - 48, 10 * GIB, 0, False),
        # The memory grows by 32 MiB from window to window.
        (96 * MIB, 4 * GIB, 32 * MIB - 1, True),
        (96 * MIB, 4 * GIB, 32 * MIB, False),
    ],
)
def test_a_leak_is_two_per_cent_of_the_limit_and_above_the_granularity(
    rise_bytes, limit_bytes, granularity_bytes, is_leak
):
    # 48 steps lie between the first step of the first window and the first step of the last one.
    pace = leak(lambda n: GIB + rise_bytes * n / 48, 64, granularity_bytes, limit_bytes)
    assert (pace is not None) is is_leak


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 100 * GIB), st.integers(0, 100 * GIB), st.integers(0, 2**32))
def test_noise_around_a_constant_is_no_leak(base_bytes, noise_bytes, seed):
    rng = random.Random(seed)
    assert leak(lambda n: base_bytes + rng.randint(0, noise_bytes), 5000) is None


def test_readings_of_the_memory_in_use_become_rare_but_never_stop():
    numbers = [0]
    while numbers[-1] < 2**14:
        numbers.append(next_reading(numbers[-1]))
    assert numbers[:97] == list(range(97))
    assert 30 <= sum(2**12 <= number < 2**13 for number in numbers) <= 36


def test_the_alert_for_a_leak_names_pace_and_end_once():
    rules, sentences = alerts()
    for n in range(300):
        limit = DeviceReading(limit_bytes=2000 * MIB)
        rules.take(interval(step(n, 8, 1500 * MIB, GIB + n * MIB), reading=limit))
    (sentence,) = sentences
    assert rules.issued == {"leak": sentence}
    # The alert comes after step 63. From the peak of 1,500 MiB, 500 steps reach the limit.
    pace = "grows by 1,000.0 MiB in 1,000 steps."
    end = "If this goes on, it reaches the limit of 2,000.0 MiB at about step 563."
    assert f"{pace} {end}" in sentence
    assert "loss.item()" in sentence


def alert_of_epochs(use, steps_in_epoch, limit_bytes, steps=20_000):
    """The step of an alert for memory that follows a function of the step; None for none."""
    rules, sentences = alerts(steps_in_epoch=steps_in_epoch)
    limit = DeviceReading(limit_bytes=limit_bytes)
    number = 0
    while number < steps:
        start_bytes = int(use(number))
        rules.take(interval(step(number, 8, start_bytes, start_bytes), reading=limit))
        if sentences:
            return number
        number = next_reading(number)
    return None


# The list is emptied before the first step of an epoch, or in it.
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("steps_in_epoch", [10, 64, 65, 97, 100, 150, 333, 1000, 2500, 7000])
def test_a_list_that_each_epoch_empties_is_no_leak(steps_in_epoch, late):
    def use(n):
        return GIB + (n - late) % steps_in_epoch * MIB

    assert alert_of_epochs(use, steps_in_epoch, 10 * GIB) is None


@pytest.mark.parametrize("steps_in_epoch", [10, 100, 333, 1000, 2500])
def test_a_leak_over_epochs_is_found(steps_in_epoch):
    def use(n):
        return GIB + n * MIB + n % steps_in_epoch * MIB / 4

    found = alert_of_epochs(use, steps_in_epoch, 2 * GIB)
    assert found is not None
    assert found <= 6 * max(20, steps_in_epoch)


def test_growth_that_fills_the_memory_in_its_epoch_is_found_early():
    def use(n):
        return GIB + n % 1000 * MIB

    assert alert_of_epochs(use, 1000, 1.9 * GIB) == 63
    # An epoch of unknown length has no end.
    assert alert_of_epochs(use, math.inf, 2 * GIB) == 63


def test_growth_that_would_fill_the_memory_in_fifty_times_its_steps_is_no_alert_yet():
    # It may be a heap that settles: it grows by 100 MiB and stops.
    def settling(n):
        return GIB + min(n, 100) * MIB

    assert alert_of_epochs(settling, math.inf, 2 * GIB) == 63
    assert alert_of_epochs(settling, math.inf, 10 * GIB) is None
    # One that goes on is found in the first tenth of the 9,216 steps that fill 10 GiB.
    assert alert_of_epochs(lambda n: GIB + n * MIB, math.inf, 10 * GIB) < 922


# Tests of the steps between two logs.


# A plan may fill the memory up to its limit, which is 1 GiB.
@pytest.mark.parametrize(("planned_bytes", "allowed_mib"), [(0, 950), (GIB, 1024)])
def test_nearly_full(planned_bytes, allowed_mib):
    rules, sentences = alerts(planned_bytes=planned_bytes)
    limit = DeviceReading(limit_bytes=1000 * MIB)
    for peak_bytes in (None, allowed_mib * MIB):
        rules.take(interval(step(0, 8, peak_bytes), reading=limit))
    assert sentences == []
    for _ in range(2):
        rules.take(interval(step(0, 8, allowed_mib * MIB + 1), reading=limit))
    (sentence,) = sentences
    assert f"The peak, {allowed_mib:,}.0 MiB, is above 95% of the limit of 1,000.0 MiB" in sentence


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
    rules, sentences = alerts()
    each = step(0, 8, 0)._replace(seconds=seconds / steps, wait_seconds=share * seconds / steps)
    reading = DeviceReading(gpu_percent=busy)
    rules.take(interval(*[each] * steps, reading=reading))
    assert bool(sentences) is is_wait


def test_the_wait_is_summed_over_intervals_of_known_utilization():
    rules, sentences = alerts()

    def take(steps, seconds, share, busy):
        each = step(0, 8, 0)._replace(seconds=seconds / steps, wait_seconds=share * seconds / steps)
        rules.take(interval(*[each] * steps, reading=DeviceReading(gpu_percent=busy)))

    # The sum starts again after each check.
    take(50, 1000.0, 0.1, 0.0)
    # A device may work while its process waits.
    take(50, 1000.0, 0.9, None)
    for busy in (10.0, 40.0, 10.0, 40.0):
        assert sentences == []
        take(5, 3.0, 0.8, busy)
    (sentence,) = sentences
    assert "80% of the last 12 s (20 steps)" in sentence
    assert "and the device was busy for 25% of it" in sentence
    assert "num_workers" in sentence
    take(100, 100.0, 0.8, 0.0)
    assert len(sentences) == 1


def test_a_smaller_batch_is_no_advice_where_memory_grows():
    rules, _ = alerts()
    for number in range(200):
        use_bytes = GIB + 16 * number * MIB
        rules.take(Totals([step(number, 4, use_bytes, use_bytes)], DeviceReading(4 * GIB)))
    assert use_bytes > 0.95 * 4 * GIB
    assert list(rules.issued) == ["leak"]


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        (
            "predict",
            "at the start of a prediction step .* predict keeps none with return_predictions=False",
        ),
        ("test", "at the start of a test step .* Keep loss"),
    ],
)
def test_an_evaluation_has_the_alerts_of_its_own_stage(stage, sentence):
    rules, sentences = alerts(stage=stage)
    for number in range(100):
        leaking = step(number, 4, GIB, GIB + number * MIB)._replace(stage=stage)
        rules.take(Totals([leaking], DeviceReading(2 * GIB)))
    (found,) = sentences
    assert re.search(sentence, found)


def test_a_validation_in_a_training_is_checked_for_its_peak():
    rules, _ = alerts()
    full = step(0, 4, GIB)._replace(stage="validate")
    rules.take(Totals([full], DeviceReading(GIB)))
    assert list(rules.issued) == ["nearly full"]


@pytest.mark.parametrize(
    ("steps", "seconds", "is_enough"),
    [(1, 100.0, False), (19, 1.0, False), (999, 0.01, False), (1000, 0.01, True), (20, 0.5, True)],
)
@pytest.mark.parametrize(
    ("wait_pct", "busy_pct", "peak_bytes"), [(90.0, 5.0, 0), (10.0, 95.0, 0), (10.0, 5.0, 99)]
)
def test_few_steps_or_seconds_decide_nothing(
    steps, seconds, is_enough, wait_pct, busy_pct, peak_bytes
):
    # The same minimum as that of the alert: 20 steps, and 10 s.
    speed = RunSpeed(
        1e3 * seconds, None, data_wait_pct=wait_pct, cpu_utilization_pct=busy_pct, cores=1
    )
    memory = RunMemory(0, peak_process_bytes=peak_bytes, limit_bytes=100)
    assert bool(conclusion(speed, memory, steps)) is is_enough
