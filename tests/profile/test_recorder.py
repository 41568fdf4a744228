from types import SimpleNamespace

import pytest

from lightning_batchmem.profile.recorder import StepClock


@pytest.fixture
def timed():
    """A clock, and what sets its time."""
    clock = StepClock("train")
    time = SimpleNamespace(now=0.0)
    clock.now = lambda: time.now

    def at(now):
        time.now = now
        return clock

    return at


def run_step(at, requested, arrived, ended):
    if requested is not None:
        at(requested).request()
    at(arrived).start(arrived)
    at(ended).stop()


def test_a_step_lasts_until_the_next_request(timed):
    run_step(timed, 1.0, 3.0, 5.0)
    # Lightning waits for the device before it requests a batch.
    timed(9.0).request()
    assert timed(20.0).seconds() == (8.0, 2.0)


def test_an_evaluation_ends_the_time_of_a_step(timed):
    run_step(timed, 1.0, 3.0, 5.0)
    timed(6.0).end()
    timed(50.0).request()
    assert timed(60.0).seconds() == (5.0, 2.0)


def test_a_step_that_asks_for_batches_itself_begins_when_it_is_called(timed):
    timed(3.0).start(3.0)
    timed(4.0).request()
    timed(5.0).stop()
    assert timed(7.0).seconds() == (4.0, None)


def test_a_step_without_an_end_is_no_step(timed):
    timed(1.0).request()
    timed(2.0).start(2.0)
    timed(3.0).forget()
    assert timed(3.0).steps == 0
    run_step(timed, 4.0, 5.0, 6.0)
    assert timed(7.0).seconds() == (3.0, 1.0)
