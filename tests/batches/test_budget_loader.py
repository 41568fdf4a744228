import math
from contextlib import nullcontext

import pytest
from torch.utils.data import BatchSampler, DataLoader

from lightning_batchmem.batches.loaders import BudgetLoader, forms_own_batches
from tests.helpers.budgets import MAKERS, within_budget

LENGTHS = [1 + index % 4 for index in range(40)]


class Subclass(BatchSampler):
    """A batch sampler of a project."""


def made_at(budget):
    return nullcontext(within_budget(LENGTHS, budget))


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader([1, 2], batch_size=2), False),
        (DataLoader([1, 2], batch_sampler=BatchSampler([0, 1], 2, False)), False),
        (DataLoader([1, 2], batch_sampler=Subclass([0, 1], 2, False)), True),
        *[(make(LENGTHS, 8), True) for make in MAKERS.values()],
    ],
)
def test_a_loader_forms_its_own_batches(loader, expected):
    assert forms_own_batches(loader) == expected


def test_batches_are_counted_at_some_budgets_and_estimated_at_others():
    info = BudgetLoader(within_budget(LENGTHS, 8), made_at)
    assert info.batches(8) == math.inf
    assert info.has_full_batch(8)
    assert [info.count(8), info.count(8)] == [True, False]
    counted = len(within_budget(LENGTHS, 8).batch_sampler)
    assert info.batches(8) == counted
    assert info.batches(16) == math.ceil(counted / 2)
    # The nearest count is the one at 32, which is a little more than a quarter.
    assert info.count(32)
    assert info.counts[32] > counted / 4
    assert info.batches(64) == math.ceil(info.counts[32] / 2)
    # One batch has all samples, so that a larger budget changes nothing.
    assert [info.has_full_batch(size) for size in (32, 10_000)] == [True, False]
    assert info.batches(10_000) == 1


def test_a_loader_without_a_length_has_no_count():
    info = BudgetLoader(None, lambda budget: nullcontext(MAKERS["stream of batches"]([1], budget)))
    assert not info.count(8)
    assert info.batches(8) == math.inf


def test_batches_that_do_not_follow_stay_as_many():
    info = BudgetLoader(None, made_at, follows=False, counts={8: 12})
    assert [info.batches(size) for size in (8, 800)] == [12, 12]
    assert not info.count(16)


def test_no_size_of_samples_is_avoided():
    info = BudgetLoader(None, made_at)
    assert info.sizes_with_last_of_one() == []
    assert not info.may_end_smaller(8, 100)
    assert info.size_at(8) == 8
