"""Times of the steps of a trial."""

import pytest

from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.search import steps as steps_module
from lightning_batchmem.search.meter import TrialMeter, other_bytes_at_start
from lightning_batchmem.search.steps import ConsecutiveSteps
from tests.helpers.fake_program import FakeProgram


@pytest.fixture
def meter(device):
    program = FakeProgram(device, lambda size: size)
    return TrialMeter(program, device, SearchPolicy(), other_bytes_at_start(program, device))


def test_the_time_of_an_optimizer_step_has_its_micro_batches_and_one_update(meter):
    assert meter.optimizer_step_seconds(4) is None
    meter.other_seconds += [1.1, 1.0]
    # The update takes half a second.
    meter.stepping_seconds += [1.5, 1.7]
    assert meter.optimizer_step_seconds(1) == 1.5
    assert meter.optimizer_step_seconds(4) == 4.5
    assert meter.seconds == [1.5, 1.7, 1.1, 1.0]


def test_the_time_of_a_step_begins_when_the_device_has_made_the_batch(meter, device, monkeypatch):
    calls = []
    steps = meter.primary
    for owner, name in ((steps, "make_batch"), (steps, "run"), (device, "synchronize")):
        call = getattr(owner, name)

        def noted(*arguments, name=name, call=call, **keywords):
            calls.append(name)
            return call(*arguments, **keywords)

        monkeypatch.setattr(owner, name, noted)
    monkeypatch.setattr(steps_module.time, "perf_counter", lambda: calls.append("clock") or 0.0)
    with ConsecutiveSteps(meter, steps, 2) as consecutive:
        consecutive.run(1)
    assert calls == ["make_batch", "synchronize", "clock", "run", "synchronize", "clock"]


def test_without_accumulation_each_call_has_an_update(meter):
    meter.stepping_seconds += [1.5, 1.4]
    assert meter.optimizer_step_seconds(1) == 1.4
