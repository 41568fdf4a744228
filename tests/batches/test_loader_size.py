"""The batch size of a loader: read, set in place, restored, and compared with its batches."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from lightning_batchmem.batches.loader_size import (
    check_count,
    count_samples,
    keep_sizes,
    loader_batch_size,
    set_loader_batch_size,
)
from tests.helpers.own_loaders import Buckets, RepeatingLoader, Wraps

DATASET = TensorDataset(torch.arange(10))


def batch_sampler(size=2):
    return BatchSampler(SequentialSampler(DATASET), size, drop_last=False)


class SizedStream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(100))

    def __len__(self):
        if self.length is None:
            raise TypeError("no length")
        return self.length


def test_count_samples():
    assert count_samples(DataLoader(DATASET, batch_size=3)) == 10
    assert count_samples(DataLoader(DATASET, batch_size=3, sampler=[1, 2, 3, 4])) == 4
    batches = BatchSampler(SequentialSampler(range(7)), batch_size=3, drop_last=False)
    assert count_samples(DataLoader(DATASET, batch_sampler=batches)) == 7
    assert count_samples(DataLoader(SizedStream(6), batch_size=4)) == 6
    assert count_samples(DataLoader(SizedStream(None), batch_size=3)) is None


LOADERS = {
    "batch_size": lambda: DataLoader(DATASET, batch_size=2),
    "batch sampler": lambda: DataLoader(DATASET, batch_sampler=batch_sampler()),
    "batch sampler as sampler": lambda: DataLoader(
        DATASET,
        sampler=batch_sampler(),
        batch_size=None,
        collate_fn=lambda rows: [torch.as_tensor(rows[0])],
    ),
    "wrapped twice": lambda: DataLoader(DATASET, batch_sampler=Wraps(Wraps(batch_sampler()))),
    "buckets": lambda: DataLoader(DATASET, batch_sampler=Buckets(10, 2)),
    "repeated": lambda: RepeatingLoader(DATASET, batch_size=2),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_size_is_set_and_restored(kind):
    loader = LOADERS[kind]()
    batches = [len(batch[0]) for batch in loader]
    restore = keep_sizes([loader])
    for _ in range(2):
        set_loader_batch_size(loader, 4)
        assert loader_batch_size(loader) == 4
        assert next(iter(loader))[0].numel() == 4
        # It can be called again.
        restore()
        assert loader_batch_size(loader) == 2
    assert [len(batch[0]) for batch in loader] == batches


def test_loaders_without_a_size():
    assert loader_batch_size(DataLoader(DATASET, batch_size=None)) is None
    loader = DataLoader(DATASET, batch_sampler=[[0], [1, 2]])
    assert loader_batch_size(loader) is None
    keep_sizes([loader])()


class ReadOnly(BatchSampler):
    @property
    def batch_size(self):
        return 2

    @batch_size.setter
    def batch_size(self, value):
        pass


class Unhashable(list):
    batch_size = 4


def test_a_sampler_that_cannot_be_hashed():
    loader = DataLoader(DATASET, batch_sampler=Unhashable([[0, 1]]))
    set_loader_batch_size(loader, 8)
    assert loader_batch_size(loader) == 8


def test_a_sampler_that_does_not_keep_the_size():
    loader = DataLoader(DATASET, batch_sampler=ReadOnly(SequentialSampler(DATASET), 2, False))
    message = "the sampler ReadOnly must have a batch_size that can be set, got 2 after it was set"
    with pytest.raises(ValueError, match=message):
        set_loader_batch_size(loader, 4)


@pytest.mark.parametrize(
    ("size", "count", "fits"), [(4, 4, True), (4, 3, False), (4, 8, False), (64, 10, True)]
)
def test_a_full_batch_has_the_size_or_all_samples(size, count, fits):
    loader = DataLoader(DATASET, batch_size=size)
    if fits:
        check_count(loader, count)
        return
    message = (
        "the loader DataLoader must make batches of its batch_size, but its batches do not depend"
        f" on batch_size alone: the largest has {count} samples after it was set to 4"
    )
    with pytest.raises(ValueError, match=message):
        check_count(loader, count)


class Regroups(Wraps):
    """Makes batches of its own size from those of another batch sampler."""

    batch_size = 8


def test_a_sampler_inside_that_has_the_size_for_a_moment_keeps_its_own():
    inner = batch_sampler(2)
    loader = DataLoader(DATASET, batch_sampler=Regroups(inner))
    restore = keep_sizes([loader])
    for size in (2, 16):
        set_loader_batch_size(loader, size)
        assert inner.batch_size == 2
    restore()
    assert (loader.batch_sampler.batch_size, inner.batch_size) == (8, 2)
    # The length of a batch sampler is not a number of samples.
    assert count_samples(DataLoader(DATASET, batch_sampler=BatchSampler(inner, 2, False))) == 10
