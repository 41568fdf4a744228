from __future__ import annotations

import pytest

from lightning_batchmem.measure.step_record import StepTimer


@pytest.fixture
def now(monkeypatch):
    """A time that the test sets."""

    class Now:
        seconds = 100.0

    monkeypatch.setattr("time.perf_counter", lambda: Now.seconds)
    return Now


def test_a_step_lasts_from_the_end_of_the_last_and_waits_for_its_batch(now):
    timer = StepTimer()
    now.seconds += 3
    timer.start()
    now.seconds += 4
    assert timer.stop() == (7, 3)
    now.seconds += 1  # the callback's own work: part of the step, no wait for data
    timer.leave()
    now.seconds += 2
    timer.start()
    now.seconds += 4
    assert timer.stop() == (7, 2)


def test_a_pause_is_left_out(now):
    timer = StepTimer()
    timer.start()
    timer.stop()
    timer.leave()
    now.seconds += 1
    timer.pause()
    now.seconds += 50
    timer.resume()
    now.seconds += 2
    timer.start()
    assert timer.stop() == (3, 3)


def test_a_restart_leaves_out_the_time_before(now):
    timer = StepTimer()
    now.seconds += 50
    timer.restart()
    now.seconds += 2
    timer.start()
    assert timer.stop() == (2, 2)


def test_a_forgotten_wait_is_missing_once(now):
    timer = StepTimer()
    timer.forget_wait()
    now.seconds += 50
    timer.start()
    now.seconds += 2
    assert timer.stop() == (2, None)
    timer.leave()
    now.seconds += 1
    timer.start()
    assert timer.stop() == (1, 1)
