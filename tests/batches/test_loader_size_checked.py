"""Batches that are counted after the size of a loader was set."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_batchmem.batches.loader_size import (
    check_batch_of_one,
    check_batch_sampler,
    check_iteration,
    set_loader_batch_size,
)
from tests.helpers.own_loaders import Buckets, FixedLoader, OfClasses, RepeatingLoader


class Rows(torch.utils.data.Dataset):
    """Rows that count how often they were read in this process."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.reads += 1
        return torch.zeros(2)


def test_a_sampler_of_other_numbers_is_named():
    loader = DataLoader(Rows(), batch_sampler=OfClasses(2, 3))
    check_batch_sampler(loader)
    set_loader_batch_size(loader, 4)
    message = (
        "the batch sampler OfClasses must .* the largest has 6 samples after it was set to 4. Make"
        " it in train_dataloader from an attribute such as `self.batch_size`; if that counts"
    )
    with pytest.raises(ValueError, match=message):
        check_batch_sampler(loader)


def test_the_last_batch_of_a_bucket_may_be_smaller():
    loader = DataLoader(Rows(), batch_sampler=Buckets(40, 5))
    for size in (3, 7, 40):
        set_loader_batch_size(loader, size)
        if size <= 20:
            check_batch_sampler(loader)
        else:
            # No bucket has as many samples.
            with pytest.raises(ValueError, match="the largest has 20 samples after it was set to"):
                check_batch_sampler(loader)


class ComputedBefore(Buckets):
    """Has computed its groups from the size that it had when it was made."""

    def __init__(self, samples, batch_size):
        super().__init__(samples, batch_size)
        self.groups = torch.arange(samples).reshape(-1, batch_size)

    def __iter__(self):
        for group in self.groups:
            yield (group + torch.zeros(self.batch_size)).tolist()


def test_a_sampler_that_raises_after_its_size_was_set():
    loader = DataLoader(Rows(), batch_sampler=ComputedBefore(40, 5))
    check_batch_sampler(loader)
    set_loader_batch_size(loader, 4)
    message = (
        "the batch sampler ComputedBefore must make batches after its batch_size was set to 4, but"
        " it raised RuntimeError: The size of tensor"
    )
    with pytest.raises(ValueError, match=message):
        check_batch_sampler(loader)


class Draws(Buckets):
    def __iter__(self):
        torch.rand(1)
        random.random()
        self.iterations = getattr(self, "iterations", 0) + 1
        yield from super().__iter__()


def test_counting_leaves_no_trace():
    loader = DataLoader(Rows(), batch_sampler=Draws(40, 5))
    before = (torch.get_rng_state(), random.getstate())
    check_batch_sampler(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert not hasattr(loader.batch_sampler, "iterations")
    assert loader.dataset.reads == 0


@pytest.mark.parametrize("in_worker", [True, False])
def test_a_loader_that_ignores_its_size(in_worker, request):
    if not in_worker:
        request.getfixturevalue("reads_here")
    loader = FixedLoader(Rows(), batch_size=4)
    check_iteration(loader)
    set_loader_batch_size(loader, 8)
    message = "the loader FixedLoader must make batches of its batch_size, .* has 4 samples after"
    with pytest.raises(ValueError, match=message):
        check_iteration(loader)
    assert loader.dataset.reads == 0


class Regroups(DataLoader):
    """Iterates over another loader, of the size that it was made with."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.inner = DataLoader(self.dataset, self.batch_size, collate_fn=self.collate_fn)

    def __iter__(self):
        return iter(self.inner)


def boxes_of(samples):
    """A batch of detection, which does not tell the number of its samples."""
    return {"boxes": torch.cat([sample.repeat(3, 1) for sample in samples]), "names": "cat"}


def test_a_loader_around_another_one_ignores_its_size():
    loader = Regroups(Rows(), batch_size=4, collate_fn=boxes_of)
    check_iteration(loader)
    set_loader_batch_size(loader, 8)
    with pytest.raises(ValueError, match=r"the loader Regroups must make .* has 4 samples after"):
        check_iteration(loader)


def test_a_loader_that_repeats_follows():
    loader = RepeatingLoader(Rows(), batch_size=4)
    set_loader_batch_size(loader, 8)
    check_iteration(loader)
    assert loader.dataset.reads == 0
    assert [len(batch) for batch in loader] == [8] * 5


class OwnIteration(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.zeros(40, 2)


def test_a_stream_is_counted_too():
    loader = OwnIteration(Stream(), batch_size=4)
    set_loader_batch_size(loader, 8)
    check_iteration(loader)


def test_a_copy_cannot_take_batches_of_a_live_iteration(reads_here):
    loader = RepeatingLoader(Rows(), batch_size=4)
    message = "the loader RepeatingLoader must not have begun an iteration before its batch size is"
    with pytest.raises(ValueError, match=message):
        check_iteration(loader)


def test_workers_have_made_batches_ahead():
    loader = RepeatingLoader(Rows(), batch_size=4, num_workers=1)
    try:
        with pytest.raises(ValueError, match="because it has made batches of the old size"):
            check_iteration(loader)
    finally:
        loader.iterator._shutdown_workers()


@pytest.mark.parametrize("batch", [torch.zeros(1, 5), [torch.zeros(1), torch.zeros(3)], "text"])
def test_a_batch_of_one_sample(batch):
    check_batch_of_one(batch, "train_dataloader")


def test_a_data_set_that_forms_the_batches_itself():
    message = (
        "each sample of train_dataloader must be a single one, but a batch of one sample has 12"
        " rows: the data set forms the batches itself"
    )
    with pytest.raises(ValueError, match=message):
        check_batch_of_one({"x": torch.zeros(12, 5), "y": torch.zeros(12)}, "train_dataloader")


class Fails(DataLoader):
    def __iter__(self):
        raise OSError("of the user")


def test_an_error_of_the_loader(reads_here):
    message = (
        "the batches of Fails must follow its batch size, but none could be made before the"
        " training to count its samples: OSError: of the user"
    )
    with pytest.raises(ValueError, match=message):
        check_iteration(Fails(Rows(), batch_size=4))
