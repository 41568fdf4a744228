from contextlib import contextmanager

import pytest
import torch

from lightning_batchmem.batches.budget_batches import BudgetBatches
from lightning_batchmem.batches.loaders import BudgetLoader
from lightning_batchmem.plan.policy import ReadingPolicy
from tests.helpers.budgets import MAKERS, within_budget

# 512 texts of 8 tokens, and one of 100.
LENGTHS = [8] * 512 + [100]

pytestmark = pytest.mark.usefixtures("reads_here")


def batches(make=within_budget, share_bytes=10**9, *, at=None, **arguments):
    """Batches of a project with this budget attribute; ``at`` lists the budgets that were read."""

    @contextmanager
    def at_budget(budget):
        if at is not None:
            at.append(budget)
        yield make(LENGTHS, budget, **arguments)

    info = BudgetLoader(make(LENGTHS, 4096, **arguments), at_budget)
    return BudgetBatches(info, ReadingPolicy(), share_bytes)


def smallest(probe, budget, *, needs_two_samples=False):
    return probe.smallest_useful_budget(budget, needs_two_samples=needs_two_samples)


def test_batches_are_read_once_for_each_budget_in_turn():
    at = []
    probe = batches(at=at)
    for budget in (200, 200, 400, 200):
        assert probe.batch(budget).numel() in (budget, budget - budget % 8)
        probe.other_lengths(budget, 3)
    assert at == [200, 400, 200]
    assert probe.num_other_batches >= 1
    assert probe.info.counts == {200: 22, 400: 12}


def test_the_bytes_of_a_batch_are_known_after_a_reading_failed():
    def make(lengths, budget):
        if budget == 300:
            raise ValueError("no such budget")
        return within_budget(lengths, budget)

    probe = batches(make)
    probe.prepare(200)
    read_bytes = probe.batch_bytes(200, 0)
    assert probe.batch_bytes(400, 0) == 2 * read_bytes
    with pytest.raises(ValueError, match="no such budget"):
        probe.prepare(300)
    probe.info.follows = False
    assert probe.batch_bytes(400, 0) == read_bytes


def test_each_batch_is_a_copy():
    probe = batches()
    probe.batch(200).zero_()
    probe.other_lengths(200, 0).fill_(-1)
    assert probe.batch(200).any()
    assert not (probe.other_lengths(200, 0) == -1).any()


def test_other_batches_come_in_turn():
    probe = batches()
    first, *others = [probe.batch(800), *(probe.other_lengths(800, i) for i in range(20))]
    assert first.numel() == max(other.numel() for other in [first, *others])
    # The text of 100 tokens is in a batch of its own size.
    assert {100} <= {other.shape[1] for other in [first, *others]}
    count = probe.num_other_batches
    assert torch.equal(others[0], others[count])
    assert not torch.equal(others[0], others[1])


def test_only_the_worst_batch_is_kept_without_room():
    probe = batches(share_bytes=0)
    probe.prepare(800)
    assert probe.num_other_batches == 0
    assert torch.equal(probe.other_lengths(800, 5), probe.batch(800))


@pytest.mark.parametrize("maker", MAKERS)
def test_the_search_begins_where_a_budget_changes_a_batch(maker):
    probe = batches(MAKERS[maker])
    # At 1024 / 4 the largest batch is a quarter. At 64 it is the text of 100 tokens.
    assert smallest(probe, 1024) == 256
    assert probe.info.follows
    assert smallest(probe, 100) == 100


def test_the_search_begins_with_batches_of_several_samples():
    """One sample is an error to BatchNorm."""

    def make(lengths, budget):
        return within_budget([8] * 512, budget)

    # At 10 each batch is one text, and at 40 each batch has at least two.
    assert smallest(batches(make), 160) == 10
    assert smallest(batches(make), 160, needs_two_samples=True) == 40
    assert smallest(batches(make), 60, needs_two_samples=True) == 60


def test_a_sampler_that_refuses_small_budgets():
    def make(lengths, budget):
        if budget < 200:
            raise ValueError("a text is longer than max_tokens")
        return within_budget(lengths, budget)

    assert smallest(batches(make), 4096) == 256
    with pytest.raises(ValueError, match="a text is longer than max_tokens"):
        smallest(batches(make), 100)


def test_batches_that_stay_the_same_do_not_follow():
    def make(lengths, budget):
        return within_budget(lengths, 512)

    probe = batches(make)
    assert smallest(probe, 512) == 512
    assert not probe.info.follows
    # They are read once, whatever the budget is.
    at = []
    fixed = batches(make, at=at)
    fixed.info.follows = False
    assert fixed.batch(10).numel() == fixed.batch(9_000).numel()
    assert fixed.batch_bytes(9_000, 0) == fixed.batch_bytes(10, 0)
    assert at == [10]


def test_batches_that_differ_by_chance_do_not_follow():
    draws = iter(range(100))

    def make(lengths, budget):
        # The number of batches and the bytes differ a little from reading to reading.
        return within_budget([*lengths, 8, 8][next(draws) % 3 :], 512)

    probe = batches(make)
    smallest(probe, 512)
    assert not probe.info.follows


def test_bytes_are_in_proportion_to_the_nearest_budget():
    probe = batches()
    probe.prepare(256)
    probe.prepare(1024)
    at_both = [probe.batch_bytes(budget, 0) for budget in (256, 1024)]
    assert probe.batch_bytes(2048, 0) == 2 * at_both[1]
    assert probe.batch_bytes(128, 0) == at_both[0] // 2
    assert probe.sample_bytes >= probe.batch(1024).nbytes


def test_items_are_those_of_the_worst_batch():
    assert batches().items(800) == 800
