"""A loop after a search is, bit by bit, the loop without a search."""

import copy

import pytest

from lightning_batchmem import find_batch_size_of_loop
from tests.helpers.loops import LOOPS, seeded
from tests.helpers.outcomes import assert_same

MOST = 8
# torch 2.13 warns so of a compiled model on Python 3.13.0.
SLOW_GUARDS = "Guards may run slower on Python 3.13.0"


def addresses(optimizers):
    """Which tensors an optimizer has as its state."""
    return [
        [id(value) for entry in optimizer.state.values() for value in entry.values()]
        for optimizer in (optimizers if isinstance(optimizers, list) else [optimizers])
    ]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_after_a_search_is_the_loop_without(name, recwarn):
    searched = seeded(LOOPS[name])
    before = copy.deepcopy(searched.left())
    state_before = addresses(searched.optimizer)
    plan = find_batch_size_of_loop(
        searched.step,
        searched.make_batch,
        model=searched.model,
        optimizer=searched.optimizer,
        state=searched.state,
        max_batch_size=MOST,
    )
    assert (plan.batch_size, plan.verified) == (MOST, True)
    assert_same(searched.left(), before, "after the search")
    assert addresses(searched.optimizer) == state_before
    warnings = [str(warning.message) for warning in recwarn]
    assert [text for text in warnings if not text.startswith(SLOW_GUARDS)] == []
    outcome = searched.train()
    expected = seeded(LOOPS[name]).train()
    assert_same(outcome, expected, name)
    # There were other steps before.
    assert sum(trial.full_steps for trial in plan.trials) > 10
