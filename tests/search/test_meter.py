"""What the meter of a trial reads in its steps."""

import pytest
import torch

from lightning_batchmem.search import steps as steps_module
from lightning_batchmem.search.meter import TrialMeter, other_bytes_at_start
from lightning_batchmem.search.steps import ConsecutiveSteps
from tests.helpers.fake_program import FakeProgram


@pytest.fixture
def meter(device):
    program = FakeProgram(device, lambda size: size)
    return TrialMeter(program, device, other_bytes_at_start(program, device))


def test_the_time_of_a_step_begins_when_the_device_has_made_the_batch(meter, device, monkeypatch):
    calls = []
    steps = meter.program.primary
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


@pytest.mark.parametrize(("is_host", "seconds"), [(True, 3.0), (False, 5.0)])
def test_the_time_of_a_step_on_the_host_is_without_the_turns_of_other_processes(
    is_host, seconds, meter, device, monkeypatch
):
    # A step takes 5 s. In 2 of them another process has the core, and 4 more pass while the clock
    # is read.
    clocks = {"wall": 0.0, "waited": 0.0}

    def passes(wall, waited):
        clocks["wall"] += wall
        clocks["waited"] += waited

    readings = iter([lambda: passes(4.0, 4.0)])

    def wall_seconds():
        next(readings, lambda: None)()
        return clocks["wall"]

    monkeypatch.setattr(device, "is_host", is_host)
    monkeypatch.setattr(steps_module, "waited_seconds", lambda: clocks["waited"])
    steps = meter.program.primary
    with ConsecutiveSteps(meter, steps, 2) as consecutive:
        monkeypatch.setattr(steps, "run", lambda: passes(5.0, 2.0))
        monkeypatch.setattr(steps_module.time, "perf_counter", wall_seconds)
        consecutive.run(1)
    assert meter.readings[-1].calls[0].seconds == seconds


def test_the_calls_before_an_error_are_kept(meter, device):
    def law(size):
        if len(meter.program.sizes) == 3:
            raise torch.OutOfMemoryError
        return 10 * size

    meter.program.law = law
    steps = meter.program.primary
    steps.begin = lambda batch_size: 4
    with (
        pytest.raises(torch.OutOfMemoryError),
        ConsecutiveSteps(meter, steps, 2) as consecutive,
    ):
        consecutive.run(1)
    reading = meter.readings[-1]
    assert len(reading.calls) == 2
    assert not reading.is_complete


def test_steps_repeat_once_the_warm_up_has_ended(meter):
    meter.program.phases.watch(meter.program.optimizers)
    with ConsecutiveSteps(meter, meter.program.primary, 2) as consecutive:
        consecutive.warm_up(2)
        consecutive.run(1)
    with ConsecutiveSteps(meter, meter.program.primary, 1) as consecutive:
        consecutive.run(2)
    assert [one.is_repeated for one in meter.readings] == [False, False, True, False, True]


def test_a_memory_bank_that_no_step_reads_is_live(device):
    device.as_host()
    program = FakeProgram(device, lambda size: size)
    start_bytes = TrialMeter(program, device, 0).start_bytes
    program.module.bank = {"rows": [torch.ones(100)], "names": ["row"]}
    assert TrialMeter(program, device, 0).start_bytes == start_bytes + 400
