"""A training loop as the session of a search."""

import pytest
import torch

from lightning_batchmem.loop.session import LoopSession
from lightning_batchmem.loop.training_loop import training_loop
from tests.helpers.loops import seeded, sgd


@pytest.fixture
def loop():
    return seeded(sgd)


@pytest.fixture
def make_session(loop, device):
    """Make a session of the loop on the fake device."""

    def make(multiple_of=1):
        parts = training_loop(loop.step, loop.make_batch, loop.model, loop.optimizer, [], None)
        return LoopSession(parts, device, multiple_of)

    return make


@pytest.mark.parametrize("leave", ["restart", "end"])
def test_steps_leave_nothing(leave, loop, make_session):
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    session = make_session()
    with session.entered():
        assert session.training.begin(4) == 1
        session.training.make_batch(4, 0)
        session.training.run()
        assert loop.optimizer.state
        session.training.end()
        if leave == "restart":
            session.restart(8)
            assert not loop.optimizer.state
    assert not loop.optimizer.state
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    for name, value in loop.model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("multiple_of", "sizes"), [(1, {1: 1, 2: 2, 3: 2, 9: 4, 100: 50}), (8, {8: 8, 24: 8, 48: 24})]
)
def test_a_smaller_batch_is_about_a_half(multiple_of, sizes, make_session):
    session = make_session(multiple_of)
    assert {size: session.training.last_batch_size(size) for size in sizes} == sizes
