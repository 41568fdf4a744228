import random

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_batchmem.batches.budget_batches import BatchReader, padded_items, read_worst_batches
from lightning_batchmem.plan.policy import BudgetPolicy, ReadingPolicy
from tests.helpers.budgets import MAKERS, Tokens, within_budget
from tests.helpers.samples import pad

# The tokens of a text are eight bytes each.
LENGTHS = [1, 1, 1, 1, 2, 2, 3, 12]


NONE_KEPT = BudgetPolicy(first_batches_kept=0)


def reader(*, room_bytes=10**9, budget=None, **numbers):
    return BatchReader(ReadingPolicy(budget=budget or BudgetPolicy(), **numbers), room_bytes)


def shapes(worst):
    return [tuple(batch.shape) for batch in worst.batches]


def given_batches(*shapes_of_batches):
    """A loader of these batches of whole numbers."""
    batches = [torch.zeros(shape, dtype=torch.long) for shape in shapes_of_batches]
    return DataLoader(batches, batch_size=None)


def test_the_worst_batches_come_first_and_each_once():
    # The largest batch, the longest sample, the smallest one, and one of the first two.
    loader = given_batches((2, 5), (3, 3), (9, 4), (1, 20), (1, 2))
    worst = reader().read(loader)
    assert shapes(worst) == [(9, 4), (1, 20), (1, 2), (2, 5), (3, 3)]
    assert (worst.reading.num_read, worst.reading.num_batches, worst.reading.items) == (5, 5, 36)
    # The bytes include a few of the pickled containers.
    assert 36 * 8 <= worst.reading.largest_bytes < 36 * 8 + 100
    assert worst.total_bytes >= 8 * (36 + 20 + 2 + 10 + 9)


@pytest.mark.parametrize(("shape", "expected"), [((1, 3), True), ((2, 3), False), ((), False)])
def test_a_batch_of_a_single_sample_is_noticed(shape, expected):
    reading = reader().read(given_batches((2, 3), shape)).reading
    assert reading.has_single_samples == expected


def test_of_equally_long_samples_the_batch_with_most_bytes_is_kept():
    loader = given_batches((9, 4), (1, 20), (3, 20), (2, 20), (65, 1))
    assert shapes(reader(budget=NONE_KEPT).read(loader))[1] == (3, 20)


def test_bytes_and_items_may_be_of_other_batches():
    images = torch.zeros(1, 100)
    labels = torch.zeros(7, dtype=torch.long)
    loader = DataLoader([[images, labels[:1]], [images[:, :10], labels]], batch_size=None)
    worst = reader(budget=NONE_KEPT).read(loader)
    assert [len(batch[1]) for batch in worst.batches] == [1, 7]
    assert worst.reading.items == 1


def test_padded_items():
    tokens = torch.zeros(3, 7, dtype=torch.long)
    assert padded_items([torch.zeros(100), tokens, tokens > 0]) == 21
    assert padded_items(torch.zeros(100)) == 100
    assert padded_items("text") == 0


def test_batches_that_exceed_the_room_are_left_out_but_not_the_first():
    loader = given_batches((9, 9), (1, 3), (2, 2))
    assert shapes(reader(room_bytes=0).read(loader)) == [(9, 9)]
    # The longest sample is in the first batch, and the smallest batch has 24 bytes and its shape.
    room_bytes = reader().read(given_batches((9, 9), (1, 3))).total_bytes
    assert shapes(reader(room_bytes=room_bytes).read(loader)) == [(9, 9), (1, 3)]


def test_reading_ends_after_enough_batches_or_seconds():
    loader = within_budget(LENGTHS, 4, shuffles=False)
    assert reader().read(loader).reading[:2] == (4, 4)
    assert reader(budget=BudgetPolicy(max_batches_read=2)).read(loader).reading[:2] == (2, None)
    with pytest.raises(ValueError, match="must make at least one batch, got none"):
        reader(scan_seconds=-1.0).read(loader)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("in_worker", [True, False])
def test_reading_changes_nothing_in_this_process(maker, in_worker, request):
    if not in_worker:
        request.getfixturevalue("reads_here")
    loader = MAKERS[maker](LENGTHS, 12)
    sampler = loader.batch_sampler
    state = (random.getstate(), torch.get_rng_state())
    worst = read_worst_batches(loader, reader())
    assert max(batch.numel() for batch in worst.batches) == 12
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    if sampler is not None:
        assert sampler.epochs == loader.dataset.reads == 0
        assert torch.equal(
            sampler.generator.get_state(), torch.Generator().manual_seed(3).get_state()
        )


def test_a_loader_with_workers_is_read():
    sampler = within_budget(LENGTHS, 12).batch_sampler
    loader = DataLoader(
        Tokens(LENGTHS),
        batch_sampler=sampler,
        collate_fn=pad,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=4,
        timeout=50,
    )
    assert read_worst_batches(loader, reader()).reading.num_batches == 3
    assert loader._iterator is None


class Failing:
    """A batch sampler that raises ``error`` in a worker, or everywhere."""

    def __init__(self, error, *, only_in_worker):
        self.error = error
        self.only_in_worker = only_in_worker

    def __iter__(self):
        if torch.utils.data.get_worker_info() or not self.only_in_worker:
            raise self.error
        yield [0, 1]


def failing(error, *, only_in_worker):
    sampler = Failing(error, only_in_worker=only_in_worker)
    return DataLoader(Tokens(LENGTHS), batch_sampler=sampler, collate_fn=pad)


def test_where_no_worker_can_read_a_copy_is_read():
    loader = failing(KeyError("a thread"), only_in_worker=True)
    assert read_worst_batches(loader, reader()).reading.num_batches == 1
    assert loader.dataset.reads == 0


def test_an_error_of_the_sampler_is_raised():
    with pytest.raises(KeyError, match="too long"):
        read_worst_batches(failing(KeyError("too long"), only_in_worker=False), reader())


def test_a_worker_without_memory_is_no_reason_to_read_here():
    loader = failing(MemoryError("all of it"), only_in_worker=True)
    with pytest.raises(MemoryError, match="all of it"):
        read_worst_batches(loader, reader())


class Waiting:
    """A batch sampler that never has a batch."""

    def __iter__(self):
        torch.utils.data.get_worker_info()
        while True:
            pass
        yield


def test_a_batch_that_never_comes_ends_in_an_error(monkeypatch):
    # The DataLoader waits this long for a worker before it terminates it.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    loader = DataLoader(Tokens(LENGTHS), batch_sampler=Waiting(), collate_fn=pad)
    impatient = reader(scan_seconds=0.2, sample_seconds=0.3)
    with pytest.raises(RuntimeError, match="DataLoader timed out"):
        read_worst_batches(loader, impatient)
