"""The number of samples of each batch, against the batches that Lightning makes."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_batchmem._lightning.profiled_stage import BatchSamples
from tests.helpers.lawful import quiet_trainer


class Flat(BoringModel):
    """Its batches are flattened, so that no dimension of a tensor is the samples."""

    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(1, 32)).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    def train_dataloader(self):
        return flat(10, 4)

    val_dataloader = train_dataloader


class Flattened:
    def __init__(self, samples):
        self.x = torch.ones(1, 3 * len(samples), 2)
        self.truth = len(samples)

    def to(self, device, **_):
        return self


def flat(samples, batch_size, **arguments):
    return DataLoader(range(samples), batch_size=batch_size, collate_fn=Flattened, **arguments)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def parts_of(batch):
    parts = batch.values() if isinstance(batch, dict) else [batch]
    return [part for part in parts if part is not None]


class Counts(Callback):
    """The samples of each batch that were counted, and the true ones."""

    def __init__(self):
        self.counted = []
        self.true = []

    def on_train_start(self, trainer, pl_module):
        self.samples = BatchSamples(trainer)

    def on_validation_start(self, trainer, pl_module):
        self.samples = BatchSamples(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.counted.append(self.samples.in_batch(batch, batch_idx, dataloader_idx))
        self.true.append(sum(part.truth for part in parts_of(batch)))

    on_validation_batch_end = on_train_batch_end


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_the_samples_of_several_loaders_are_their_sum(mode, drop_last):
    loaders = {
        "a": flat(10, 4, drop_last=drop_last),
        "b": flat(7, 1),
        "c": DataLoader(
            range(9),
            batch_sampler=BatchSampler(SequentialSampler(range(9)), 2, drop_last),
            collate_fn=Flattened,
        ),
    }
    counts = Counts()
    trainer = quiet_trainer(counts, max_epochs=2, limit_val_batches=0)
    trainer.fit(Flat(), CombinedLoader(loaders, mode))
    assert counts.counted == counts.true


def test_loaders_that_follow_each_other_have_numbers_of_their_own():
    counts = Counts()
    trainer = quiet_trainer(counts)
    trainer.validate(Flat(), [flat(10, 4), flat(5, 3)], verbose=False)
    assert counts.counted == counts.true == [4, 4, 2, 3, 2]


def test_the_last_batch_of_a_stream_is_unknown():
    counts = Counts()
    trainer = quiet_trainer(counts, max_epochs=1, limit_val_batches=0)
    trainer.fit(Flat(), DataLoader(Stream(), batch_size=4, collate_fn=Flattened))
    assert (counts.counted, counts.true) == ([4, 4, None], [4, 4, 2])


class Rows(torch.Tensor):
    truth = 0


def without_none(samples):
    kept = [sample for sample in samples if sample is not None]
    return torch.ones(len(kept), 2).as_subclass(Rows)


def whole_batches(samples):
    return torch.ones(7, 2).as_subclass(Rows)


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        # A full batch has shown that the first dimension is the samples.
        (
            DataLoader([1, 1, 1, 1, 1, None, 1, 1], batch_size=4, collate_fn=without_none),
            [4, 3],
        ),
        (DataLoader(Stream(), batch_size=4, collate_fn=without_none), [4, 4, 2]),
        # The samples of the data set are batches.
        (DataLoader(range(3), batch_size=1, collate_fn=whole_batches), [7, 7, 7]),
    ],
)
def test_rows_count_where_they_are_the_samples(loader, expected):
    counts = Counts()
    trainer = quiet_trainer(counts, max_epochs=1, limit_val_batches=0)
    trainer.fit(Flat(), loader)
    assert counts.counted == expected


class Budget(BatchSampler):
    """Its ``batch_size`` is a number of tokens."""

    def __iter__(self):
        yield from ([0, 1, 2], [3])

    def __len__(self):
        return 2


class OfAnotherLibrary:
    batch_size = 3

    def __iter__(self):
        yield from (Flattened(range(3)), Flattened(range(3)))

    def __len__(self):
        return 2


def test_loaders_of_other_kinds():
    budget = DataLoader(range(4), batch_sampler=Budget(range(4), 100, False), collate_fn=Flattened)
    # Without a size in the loader, the first dimension of the tensors counts.
    for loader, expected in ((budget, [1, 1]), (OfAnotherLibrary(), [3, None])):
        counts = Counts()
        trainer = quiet_trainer(counts, max_epochs=1, limit_val_batches=0)
        trainer.fit(Flat(), loader)
        assert counts.counted == expected
