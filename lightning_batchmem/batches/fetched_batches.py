"""Data sets whose ``__getitems__`` returns a batch: only they can join samples to one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

# The name is private in torch 2.5.1 to 2.14.
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader

from lightning_batchmem.batches.batch_sampler import SingleSamples
from lightning_batchmem.batches.isolated import read_isolated
from lightning_batchmem.devices.tensors import copied
from lightning_batchmem.plan.policy import ReadingPolicy


@dataclass(frozen=True)
class FetchedSample:
    """A batch of one sample, and the index with which the data set makes it again."""

    index: Any
    batch: Any


@dataclass(eq=False)
class FetchedSamples(SingleSamples):
    """Single samples of a data set that fetches a batch at once.

    Where it returns a list of samples, as most of them do, they are those samples.
    """

    returns_lists: bool | None = None

    def __getitem__(self, index: Any) -> Any:
        if self.returns_lists is None:
            # A list may also be a batch, whose length does not depend on the number of samples.
            counts = (2, 3)
            lists = [self.batched.__getitems__([index] * count) for count in counts]
            self.returns_lists = all(
                isinstance(fetched, list) and len(fetched) == count
                for fetched, count in zip(lists, counts, strict=True)
            )
        fetched = self.batched.__getitems__([index])
        return fetched[0] if self.returns_lists else FetchedSample(index, fetched)


@dataclass
class FetchedCollate:
    """The collate function of a project, which gets batches that the data set has joined.

    The last batch is kept, because the steps of a trial have the same one.
    """

    loader: DataLoader[Any]
    collate: Callable[[Any], Any]
    last_indices: bytes | None = None
    last_batch: Any = None

    def __call__(self, samples: Sequence[Any]) -> Any:
        if not isinstance(samples[0], FetchedSample):
            return self.collate(samples)
        if len(samples) == 1:
            return self.collate(samples[0].batch)
        indices = [sample.index for sample in samples]
        key = _comparable(indices)
        if key is None or key != self.last_indices:
            # The last batch would take memory beside the next one.
            self.last_indices = self.last_batch = None
            # The samples of a batch may each take as long as the policy allows one.
            seconds = ReadingPolicy().sample_seconds * len(samples)
            fetch = partial(_fetched, indices=indices)
            self.last_batch = read_isolated(self.loader, fetch, timeout_seconds=seconds)
            self.last_indices = key
        # A collate function, or a step, may write to its batch. The kept one is no live memory of a
        # training.
        with _disable_current_modes():
            batch = copied(self.last_batch)
        return self.collate(batch)


def _comparable(indices: list[Any]) -> bytes | None:
    try:
        return pickle.dumps(indices)
    # Those of a user's sampler may refuse it in any way. Their batch is read again in each step.
    except Exception:  # noqa: BLE001
        return None


def fetched_samples(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader, or a view of it that reads single samples where its data set fetches batches."""
    fetches = callable(getattr(loader.dataset, "__getitems__", None))
    if loader.batch_sampler is None or not fetches or isinstance(loader.dataset, SingleSamples):
        return loader
    view = copy.copy(loader)
    # DataLoader.__setattr__ raises an error for this attribute (torch 2.5.1 to 2.14).
    vars(view)["dataset"] = FetchedSamples(loader.dataset)
    return view


def _fetched(loader: DataLoader[Any], indices: list[Any]) -> Any:
    dataset: Any = loader.dataset
    return dataset.__getitems__(indices)
