"""Times of the steps of a trial."""

import pytest

from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.search.meter import TrialMeter, read_start_bytes
from tests.helpers.fake_session import FakeSession


@pytest.fixture
def meter(device):
    session = FakeSession(device, lambda size: size)
    return TrialMeter(session, device, SearchPolicy(), read_start_bytes(session, device))


def test_the_time_of_an_optimizer_step_has_its_micro_batches_and_one_update(meter):
    assert meter.optimizer_step_seconds(4) is None
    meter.other_seconds += [1.1, 1.0]
    # The update takes half a second.
    meter.stepping_seconds += [1.5, 1.7]
    assert meter.optimizer_step_seconds(1) == 1.5
    assert meter.optimizer_step_seconds(4) == 4.5
    assert meter.seconds == [1.5, 1.7, 1.1, 1.0]


def test_without_accumulation_each_call_has_an_update(meter):
    meter.stepping_seconds += [1.5, 1.4]
    assert meter.optimizer_step_seconds(1) == 1.4
