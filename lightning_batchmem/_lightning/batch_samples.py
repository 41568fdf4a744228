"""How many samples each batch of a stage has, by its loaders.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_batchmem._lightning.data_source import combined_mode, stage_loop
from lightning_batchmem.batches.loader_size import count_samples, loader_batch_size
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.tensors import samples_in

_LOADERS = "The batch size of the loaders"


class PlacedBatch(NamedTuple):
    """A batch, its number in its loader, and the number of the loader.

    The loader has a number where loaders follow each other.
    """

    batch: object
    number: int
    loader_number: int


class BatchSamples:
    """Counts the samples of the batches of the stage that runs.

    The loader has the number. The dimensions of tensors may be something else, such as time or
    channels, so they count only where a loader has no size, or where they have been its size.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._loop = stage_loop(trainer)
        # The loop that counts the batches.
        self._counter = trainer.fit_loop.epoch_loop if trainer.training else self._loop
        # Whether the loaders of the last batch have sizes.
        self.loaders_have_sizes = False
        # Whether the first dimension of a full batch was the size of its loader.
        self._has_rows = False
        self._combined: object = None
        self._loader_number = 0
        self._of_loaders: list[_LoaderSamples] = []
        # The samples of a full batch of all of these.
        self._size = 0

    def in_batch(self, batch: object, number: int, loader_number: int = 0) -> int | None:
        """The samples of a batch, as in :class:`PlacedBatch`; None if they are unknown."""
        of_loaders = self._loaders_of(loader_number)
        rows = samples_in(batch)
        if not self.loaders_have_sizes:
            return rows
        size = self._size
        # A collate function may leave out samples, and each worker of a stream ends with fewer.
        self._has_rows |= rows == size
        if self._has_rows and rows is not None and rows <= size:
            return rows
        is_last = self._counter.batch_progress.is_last_batch
        total = 0
        for one in of_loaders:
            samples = one.in_batch(number, is_last=is_last)
            if samples is None:
                return None
            total += samples
        return total

    def _loaders_of(self, loader_number: int) -> list[_LoaderSamples]:
        """The loaders that have samples in a batch."""
        # Loaders may be requested again in each epoch.
        combined = self._loop._combined_loader
        if combined is not self._combined or loader_number != self._loader_number:
            self._combined = combined
            self._loader_number = loader_number
            of_loaders = value_or_none(_LOADERS, self._read_loaders, loader_number) or []
            # A loader of single samples may have batches as samples.
            sizes = [one.size for one in of_loaders if one.size != 1]
            self.loaders_have_sizes = bool(sizes) and None not in sizes
            self._size = sum(one.size or 0 for one in of_loaders)
            self._of_loaders = of_loaders
        return self._of_loaders

    def _read_loaders(self, loader_number: int) -> list[_LoaderSamples]:
        combined: Any = self._combined
        mode = combined_mode(combined)
        loaders = combined.flattened
        if mode == "sequential":
            loaders = loaders[loader_number : loader_number + 1]
        return [_samples_of(loader, begins_again="cycle" in mode) for loader in loaders]


@dataclass(frozen=True)
class _LoaderSamples:
    """The samples of the batches of one loader.

    Args:
        size: samples in a full batch; None if the loader has no such number.
        samples: samples in an epoch; None for a stream without a length.
        batches: batches in an epoch; None likewise.
        begins_again: whether the loader begins again while another one goes on.
    """

    size: int | None
    samples: int | None = None
    batches: int | None = None
    begins_again: bool = False

    def in_batch(self, number: int, *, is_last: bool) -> int | None:
        """The samples of a batch; None for the last one of a stream."""
        if self.size is None or not self.samples or not self.batches:
            return None if is_last else self.size
        if self.begins_again:
            number %= self.batches
        if number >= self.batches:
            # The loader has ended, and another one goes on.
            return 0
        return min(self.size, self.samples - number * self.size)


def _samples_of(loader: object, *, begins_again: bool) -> _LoaderSamples:
    if not isinstance(loader, DataLoader):
        # Loaders of other libraries have this attribute too.
        size = getattr(loader, "batch_size", None)
        return _LoaderSamples(size if isinstance(size, int) else None)
    size = loader_batch_size(loader)
    # The batch size of a sampler of the project may be another number, such as a budget.
    is_plain = loader.batch_size is not None or type(loader.batch_sampler) is BatchSampler
    samples = count_samples(loader)
    # The length of a stream is an estimate, and each worker ends with a batch of its own.
    is_stream = isinstance(loader.dataset, IterableDataset)
    if not is_plain or size is None or samples is None or is_stream:
        return _LoaderSamples(size if is_plain else None)
    drop_last = loader.drop_last or getattr(loader.batch_sampler, "drop_last", False)
    batches = samples // size if drop_last else -(-samples // size)
    return _LoaderSamples(size, samples, batches, begins_again)
