"""A training loop as the program of a search."""

import pytest
import torch

from lightning_batchmem.loop.search import LoopProgram
from lightning_batchmem.loop.training_loop import training_loop
from tests.helpers.loops import seeded, sgd


@pytest.fixture
def loop():
    return seeded(sgd)


@pytest.fixture
def make_program(loop, device):
    """Make a program of the loop on the fake device."""

    def make(multiple_of=1):
        parts = training_loop(loop.step, loop.make_batch, loop.model, loop.optimizer, [], None)
        return LoopProgram(parts, device, multiple_of)

    return make


@pytest.mark.parametrize("leave", ["restart", "end"])
def test_steps_leave_nothing(leave, loop, make_program):
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    program = make_program()
    with program.entered():
        assert program.training.begin(4) == 1
        program.training.make_batch(4, 0)
        program.training.run()
        assert loop.optimizer.state
        program.training.end()
        if leave == "restart":
            program.restart(8)
            assert not loop.optimizer.state
    assert not loop.optimizer.state
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    for name, value in loop.model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("multiple_of", "sizes"), [(1, {1: 1, 2: 2, 3: 2, 9: 4, 100: 50}), (8, {8: 8, 24: 8, 48: 24})]
)
def test_a_smaller_batch_is_about_a_half(multiple_of, sizes, make_program):
    program = make_program(multiple_of)
    assert {size: program.training.last_batch_size(size) for size in sizes} == sizes
