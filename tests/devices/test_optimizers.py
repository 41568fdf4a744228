from types import SimpleNamespace

import pytest
import torch
from torch.optim import Optimizer

from lightning_batchmem.devices.optimizers import StepHooks, state_tensors, with_wrapped
from tests.helpers.wrapped_optimizers import WRAPPED, ByHand, Delegating, Lookahead, adam


@pytest.fixture
def weights():
    return [torch.nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize("name", WRAPPED)
def test_the_hooks_are_those_that_torch_calls_and_no_class_changes(weights, name):
    optimizer = WRAPPED[name](weights)
    step = type(optimizer).step
    calls = []
    hooks = StepHooks()
    is_called = hooks.add(
        optimizer, lambda *_: calls.append("after"), lambda *_: calls.append("before")
    )
    assert type(optimizer).step is step
    assert is_called == (name != "no hook")
    weights[0].grad = torch.ones(3)
    optimizer.step()
    hooks.remove()
    optimizer.step()
    assert calls == (["before", "after"] if is_called else [])


def test_a_wrapper_whose_own_hooks_are_called_is_hooked_itself(weights):
    class Wrapper(Optimizer):
        def __init__(self, optimizer):
            super().__init__(weights, {})
            self.base = optimizer

        def step(self, closure=None):
            return self.base.step(closure)

    wrapper = Wrapper(adam(weights))
    # A scheduler replaces the method of the object, which calls the hooks nevertheless.
    torch.optim.lr_scheduler.StepLR(wrapper.base, 1)
    hooked = []
    for optimizer in (wrapper, wrapper.base):
        assert StepHooks().add(optimizer, lambda one, *_: hooked.append(one))
    wrapper.step()
    assert hooked == [wrapper.base, wrapper]


def test_optimizers_that_hold_each_other_are_there_once(weights):
    first = ByHand(weights)
    second = Lookahead(first)
    first.others = [second]
    assert with_wrapped(first) == [first, second]
    assert not StepHooks().add(first, print)
    # What is not an optimizer of torch may be anything.
    assert with_wrapped(7) == [7]
    with pytest.warns(UserWarning, match="step of an optimizer cannot be read"):
        assert not StepHooks().add(7, print)
    assert not StepHooks().add(SimpleNamespace(step=print), print)


class Unbound:
    """As werkzeug's proxies outside of their context."""

    @property
    def __class__(self):
        raise RuntimeError("outside of context")


def test_attributes_of_an_optimizer_may_be_anything(weights):
    optimizer = adam(weights)
    optimizer.context = Unbound()
    assert with_wrapped(optimizer) == [optimizer]


def test_states_are_those_of_all_optimizers_inside(weights):
    optimizer = Lookahead(Delegating(adam(weights)))
    weights[0].grad = torch.ones(3)
    optimizer.step()
    # Adam has its two moments and the number of its steps.
    found = {id(tensor) for tensor in state_tensors([optimizer])}
    inner = optimizer.optimizer.state[weights[0]].values()
    assert found == {id(one) for one in (*inner, optimizer.state[weights[0]]["slow"])}
