"""The variables that functions of a loop refer to."""

import copy
import functools
import random

import numpy as np
import pytest
import torch
from torch import nn

from lightning_batchmem import find_batch_size
from lightning_batchmem.loop.variables import LoopVariables
from tests.helpers.loops import (
    FEATURES,
    averaged,
    network,
    plain,
    random_batch,
    seeded,
    sgd,
)
from tests.helpers.outcomes import assert_same

CALLS = 0
NAN = float("nan")


def count_globally():
    global CALLS
    CALLS += 1


def variables_of(*functions, recorded=()):
    return LoopVariables(functions, lambda value: any(value is one for one in recorded))


def test_counters_are_bound_again():
    calls = 0

    def helper():
        nonlocal calls
        calls += 1
        count_globally()

    def step():
        helper()

    before = CALLS
    variables = variables_of(step)
    step()
    step()
    assert (calls, CALLS) == (2, before + 2)
    variables.bind_again()
    assert (calls, CALLS) == (0, before)
    assert variables.changed() == []


class Holder:
    def __init__(self):
        self.count = 0

    def step(self):
        self.count += 1


def of_a_tensor():
    value = torch.zeros(3)
    return lambda: value.add_(1)


def of_a_module():
    value = nn.Linear(2, 2)
    return lambda: nn.init.zeros_(value.weight)


def of_a_list():
    # The first entry differs from itself.
    value = [[NAN]]
    return lambda: value[0].append(1)


def of_a_dict():
    value = {"best": 1}
    return lambda: value.update(best=2)


def of_a_torch_generator():
    value = torch.Generator()
    return lambda: torch.rand(1, generator=value)


def of_a_numpy_generator():
    value = np.random.default_rng(0)
    return lambda: value.random()


def of_an_older_numpy_generator():
    value = np.random.RandomState(0)
    return lambda: value.rand()


def of_a_python_generator():
    value = random.Random(0)
    return lambda: value.random()


def of_an_iterator():
    value = iter([1, 2])
    return lambda: next(value)


def of_a_method():
    return Holder().step


def of_an_argument():
    return functools.partial(list.append, [])


def of_a_wrapped_function():
    value = []

    @torch.no_grad()
    def step():
        value.append(1)

    return step


CHANGES = {
    of_a_tensor: "value",
    of_a_module: "value._parameters",
    of_a_list: "value[0]",
    of_a_dict: "value['best']",
    of_a_torch_generator: "value",
    of_a_numpy_generator: "value",
    of_an_older_numpy_generator: "value",
    of_a_python_generator: "value",
    of_an_iterator: "value",
    of_a_method: "Holder.count",
    of_an_argument: "list",
    of_a_wrapped_function: "value",
}


@pytest.mark.parametrize("make", CHANGES)
def test_changes_are_named(make):
    step = make()
    variables = variables_of(step)
    if make is not of_an_iterator:
        assert variables.changed() == []
    step(*([1] if make is of_an_argument else []))
    assert variables.changed() == [CHANGES[make]]


def test_each_attribute_is_named_once():
    holder = Holder()
    holder.losses = [[]]

    def step():
        holder.step()
        holder.losses[0].append(1)
        holder.losses.append(2)

    variables = variables_of(step)
    step()
    assert variables.changed() == ["holder.count", "holder.losses"]


def test_what_is_recorded_elsewhere_is_not_named():
    value = []

    def step():
        value.append(1)

    variables = variables_of(step, recorded=[value])
    step()
    assert variables.changed() == []


def warmed_up():
    """A loop whose learning rate follows a counter, which no list of objects can have."""
    model = network()
    loop = plain(model, torch.optim.SGD(model.parameters(), lr=0.1))
    of_loop = loop.step
    calls = 0

    def step(batch):
        nonlocal calls
        calls += 1
        loop.optimizer.param_groups[0]["lr"] = 0.1 * min(1, calls / 10)
        return of_loop(batch)

    loop.step = step
    return loop


def search(loop):
    given = {"model": loop.model, "optimizer": loop.optimizer, "state": loop.state}
    return find_batch_size(loop.step, loop.make_batch, **given, max_batch_size=8)


def test_a_counter_of_a_loop_is_restored():
    searched = seeded(warmed_up)
    search(searched)
    assert_same(searched.train(), seeded(warmed_up).train(), "a counter")


def test_a_search_names_what_it_changed():
    loop = seeded(sgd)
    average = copy.deepcopy(loop.model)
    of_loop = loop.step
    losses = []

    def step(batch):
        losses.append(of_loop(batch))
        with torch.no_grad():
            average[0].weight.lerp_(loop.model[0].weight, 0.1)

    loop.step = step
    loop.state = [losses]
    with pytest.warns(UserWarning, match=r"left these changed.* given: average\._modules\. Pass"):
        search(loop)
    assert losses == []


def test_a_function_that_was_made_in_another_file_is_followed():
    loop = seeded(averaged)
    of_loop = loop.step
    loop.step = lambda batch: of_loop(batch)
    loop.state = []
    with pytest.warns(
        UserWarning, match=r"left these changed.* given: average\.updates; average\.shadow;"
    ):
        search(loop)


def test_a_list_may_be_the_state_itself():
    loop = seeded(sgd)
    of_loop = loop.step
    loop.state = []

    def step(batch):
        loop.state.append(of_loop(batch).item())

    loop.step = step
    search(loop)
    assert loop.state == []


def test_an_iterator_of_make_batch_is_named():
    loop = seeded(sgd)
    batches = iter(lambda: random_batch(1), None)

    def make_batch(size):
        x = torch.cat([next(batches)[0] for _ in range(size)])
        assert x.shape == (size, FEATURES)
        return x, x.sum(1, keepdim=True)

    loop.make_batch = make_batch
    with pytest.warns(UserWarning, match="left these changed.* given: batches. Pass"):
        search(loop)
