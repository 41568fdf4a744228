from __future__ import annotations

import pytest

from lightning_batchmem.measure.phases import StepPeaks
from lightning_batchmem.measure.step_record import StepRecord, StepTimer, StepTotals

MIB = 2**20


@pytest.fixture
def now(monkeypatch):
    """A clock that a test sets."""

    class Now:
        seconds = 100.0

    monkeypatch.setattr("time.perf_counter", lambda: Now.seconds)
    return Now


def test_a_step_lasts_from_the_end_of_the_last_and_waits_until_its_batch_is_there(now):
    clock = StepTimer()
    now.seconds += 3
    clock.start()
    now.seconds += 4
    assert clock.stop() == (7, 3)
    now.seconds += 1  # what the callback itself does: in the step's time, no wait for data
    clock.leave()
    now.seconds += 2
    clock.start()
    now.seconds += 4
    assert clock.stop() == (7, 2)


def test_evaluation_is_left_out(now):
    clock = StepTimer()
    clock.start()
    clock.stop()
    clock.leave()
    now.seconds += 1
    clock.pause()
    now.seconds += 50
    clock.resume()
    now.seconds += 2
    clock.start()
    assert clock.stop() == (3, 3)


def test_between_epochs_nothing_counts(now):
    clock = StepTimer()
    now.seconds += 50
    clock.restart()
    now.seconds += 2
    clock.start()
    assert clock.stop() == (2, 2)


def test_after_a_checkpoint_the_wait_is_missing_once(now):
    clock = StepTimer()
    clock.forget_wait()
    now.seconds += 50
    clock.start()
    now.seconds += 2
    assert clock.stop() == (2, None)
    clock.leave()
    now.seconds += 1
    clock.start()
    assert clock.stop() == (1, 1)


def step(number, peak, *, size=4, seconds=2.0, wait=0.5, reserved=None):
    return StepRecord(number, size, StepPeaks({"forward": peak * MIB, "backward": MIB}, reserved), seconds, wait)


def tally(*steps):
    total = StepTotals()
    for one in steps:
        total.add(one)
    return total


def test_metrics_are_maxima_of_bytes_and_means_of_times():
    total = tally(
        step(0, 5, reserved=8 * MIB), step(1, 9, seconds=4.0, reserved=7 * MIB), step(2, 3, size=1, reserved=6 * MIB)
    )
    assert total.metrics(limit_bytes=64 * MIB, world_size=2) == {
        "memory/peak_allocated_mib": 9.0,
        "memory/peak_reserved_mib": 8.0,
        "memory/limit_mib": 64.0,
        "throughput/samples_per_s": 2 * 9 / 8.0,
        "throughput/step_ms": pytest.approx(8000 / 3),
        "throughput/data_wait_pct": pytest.approx(100 * 1.5 / 8),
        "batch/size": 1.0,
    }
    assert (total.peak_bytes, total.peak_step, total.peak_batch_size) == (9 * MIB, 1, 4)


def test_what_is_not_known_is_left_out():
    names = set(tally(step(0, 5, size=None, wait=None)).metrics(limit_bytes=MIB, world_size=1))
    assert names == {"memory/peak_allocated_mib", "memory/limit_mib", "throughput/step_ms"}
    names = set(tally(step(0, 5, size=None, wait=None)).metrics(limit_bytes=MIB, world_size=1, has_peak=False))
    assert names == {"memory/allocated_mib", "memory/limit_mib", "throughput/step_ms"}


def test_steps_of_unknown_size_do_not_lower_the_throughput():
    total = tally(step(0, 5, size=8, seconds=2.0), step(1, 5, size=None, seconds=100.0))
    assert total.samples_per_second(1) == 4.0


def test_merged_tallies_are_those_of_all_steps():
    steps = [step(0, 5), step(1, 9, size=7, reserved=5), step(2, 3, wait=None), step(3, 8, size=None, reserved=3)]
    steps[1] = steps[1]._replace(items=100)
    for cut in range(5):
        total = tally(*steps[:cut])
        total.merge(tally(*steps[cut:]))
        assert total == tally(*steps)


def test_items_per_second_over_the_steps_that_were_counted():
    total = tally(step(0, 5, seconds=2.0)._replace(items=100), step(1, 5, seconds=100.0))
    assert total.items_per_second(3) == 150.0
    assert total.metrics(limit_bytes=MIB, world_size=3)["throughput/items_per_s"] == 150.0
    assert tally(step(0, 5)).items_per_second(1) is None


def test_the_devices_own_time_is_the_steps_and_not_the_throughputs():
    first, later = tally(step(0, 5, size=8, seconds=1.0)), tally(step(1, 5, size=8, seconds=3.0))
    first.add_device_time(4.0)
    assert first.step_seconds == 4.0
    assert first.metrics(limit_bytes=MIB, world_size=1)["throughput/step_ms"] == 4000.0
    assert first.samples_per_second(1) == 8.0
    first.merge(later)
    assert first.step_seconds == 4.0  # the device has not told of the second
    assert tally(step(0, 5, seconds=2.0)).step_seconds == 2.0
