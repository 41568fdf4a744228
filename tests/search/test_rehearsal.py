"""A rehearsal on a device."""

import random

import numpy as np
import pytest
import torch

from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.search.meter import TrialMeter, other_bytes_at_start
from lightning_batchmem.search.readings import num_full_steps
from lightning_batchmem.search.rehearsal import rehearse
from tests.helpers.fake_program import FakeProgram


@pytest.mark.parametrize(("differs", "full_steps"), [(False, 7), (True, 72)])
def test_all_ranks_run_more_steps_if_the_peaks_of_one_differ(differs, full_steps, device):
    """The peaks of this rank are equal."""
    program = FakeProgram(device, lambda size: size)
    program.restart(8)
    meter = TrialMeter(program, device, other_bytes_at_start(program, device))
    values = []

    def on_any_rank(value):
        values.append(value)
        return differs

    program.phases.watch(program.optimizers)
    rehearse(meter, SearchPolicy(), 8, on_any_rank)
    # The first is whether the training is long, and the last whether something grows. Between them
    # are the repeats of more steps: whether there is one, and whether something is random.
    assert values == [True, *[False] * (2 * 4 if differs else 1), False]
    assert num_full_steps(meter.readings) == full_steps


class Drawing(FakeProgram):
    """Draws a number at the beginning of some steps, of which each uses ``bytes_of(number)``."""

    def __init__(self, device, draw, every=1, bytes_of=lambda number: 0):
        super().__init__(device, lambda size: size)
        self.numbers = []
        self.steps = 0
        plain = self.training.run

        def run():
            if self.steps % every == 0:
                self.numbers.append(float(draw()))
            self.steps += 1
            device.use(int(bytes_of(self.numbers[-1])))
            device.free()
            plain()

        self.training.run = run


def steps_of_rehearsal(program, device):
    program.restart(8)
    meter = TrialMeter(program, device, other_bytes_at_start(program, device))
    program.phases.watch(program.optimizers)
    rehearse(meter, SearchPolicy(), 8)
    return num_full_steps(meter.readings)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(())])
def test_more_steps_are_run_where_a_step_draws_random_numbers(draw, device):
    # After five steps, 15 more are enough.
    assert steps_of_rehearsal(Drawing(device, draw), device) == 7 + 15
    # One that draws in every tenth step has not drawn often, and no more than this is run.
    assert steps_of_rehearsal(Drawing(device, draw, every=10), device) == 7 + 60


@pytest.mark.parametrize(
    ("batches", "full_steps"), [(90, 7 + 60), (50, 7 + 30), (23, 7 + 15), (22, 7)]
)
def test_random_steps_of_a_short_training_are_no_more_than_it_has(
    device, monkeypatch, batches, full_steps
):
    monkeypatch.setattr(FakeProgram, "batches_in_training", lambda program, size: batches)
    assert steps_of_rehearsal(FakeProgram(device, lambda size: size), device) == 7
    assert steps_of_rehearsal(Drawing(device, random.random, every=10), device) == full_steps


def test_steps_are_no_more_where_nothing_on_the_cpu_draws_in_them(device):
    own = random.Random(0)
    assert steps_of_rehearsal(Drawing(device, own.random), device) == 7
    program = Drawing(device, own.random)
    plain = program.training.make_batch

    def make_batch(*arguments, **keywords):
        random.random()
        plain(*arguments, **keywords)

    # A data set that crops at random is no reason.
    program.training.make_batch = make_batch
    assert steps_of_rehearsal(program, device) == 7


def test_more_steps_are_run_until_they_show_no_higher_peak(device):
    # No generator is seen, and peaks rise in the first steps, and in the second 15 more.
    peaks = iter([100, 100, 100, 150, 100, *[100] * 15, *[200] * 15, *[210] * 40])
    program = Drawing(device, lambda: next(peaks), bytes_of=lambda number: 1000 * number)
    assert steps_of_rehearsal(program, device) == 7 + 15
    peaks = iter([100, 100, 100, 150, 100, *[200] * 15, *[210] * 40])
    assert steps_of_rehearsal(program, device) == 7 + 30
