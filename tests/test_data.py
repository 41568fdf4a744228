from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from lightning_batchmem._lightning.loaders import loader_batch_size, set_loader_batch_size
from lightning_batchmem.data import Samples, count_samples


class Counting(Dataset):
    """Counts its reads in this process, and notes the process that reads."""

    def __init__(self, length: int = 100) -> None:
        self.length = length
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        return {"index": torch.tensor(index), "pid": torch.tensor(os.getpid())}


class Owner:
    """Collates with a method of its own, and is too large to be copied, let us say."""

    def __deepcopy__(self, memo: object) -> Owner:
        raise AssertionError("copied")

    def collate(self, samples: list[Any]) -> int:
        return len(samples)


def test_the_owner_of_a_collate_method_is_not_copied() -> None:
    assert Samples(DataLoader(Counting(), batch_size=4, collate_fn=Owner().collate)).batch(5) == 5


class Stream(IterableDataset):
    """An iterator that can be used up."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([number]) for number in self.numbers)


def test_a_batch_of_any_size_comes_from_the_loaders_own_collate() -> None:
    loader = DataLoader(Counting(), batch_size=4, collate_fn=lambda samples: [s["index"].item() for s in samples])
    samples = Samples(loader)
    assert len(samples.batch(3)) == 3
    large = samples.batch(100)
    assert len(large) == 100
    assert min(large) == 0
    assert max(large) > 90  # spread over the whole set, not its first samples


def test_samples_are_drawn_in_another_process_and_leave_no_trace() -> None:
    dataset = Counting()
    random = torch.get_rng_state()
    batch = Samples(DataLoader(dataset, batch_size=4, generator=(own := torch.Generator()))).batch(2)
    assert dataset.reads == 0
    assert (batch["pid"] != os.getpid()).all()
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(own.get_state(), torch.Generator().get_state())
    assert not batch["index"].is_shared()


def test_a_stream_is_not_consumed() -> None:
    stream = Stream(iter(range(1000)))
    assert Samples(DataLoader(stream, batch_size=4)).batch(5).shape == (5, 1)
    assert next(stream.numbers) == 0


class OnlyHere(Dataset):
    """Refuses to be read in a worker."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.reads = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        if os.getpid() != self.pid:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        self.reads += 1
        return torch.tensor(index)


def test_what_a_worker_cannot_read_is_read_from_a_copy() -> None:
    dataset = OnlyHere()
    assert Samples(DataLoader(dataset, batch_size=2)).batch(4).tolist() == [0, 1, 2, 0]
    assert dataset.reads == 0


class Broken(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        raise KeyError("the user's own mistake")


def test_a_users_error_stays_the_users_error() -> None:
    with pytest.raises(KeyError, match="the user's own mistake"):
        Samples(DataLoader(Broken(), batch_size=2))


def test_an_empty_data_set_is_said() -> None:
    with pytest.raises(ValueError, match="at least one sample, got none"):
        Samples(DataLoader(Stream(iter(())), batch_size=2))


def test_count_samples() -> None:
    dataset = TensorDataset(torch.zeros(10, 1))
    assert count_samples(DataLoader(dataset, batch_size=3)) == 10
    assert count_samples(DataLoader(dataset, batch_size=3, sampler=[1, 2, 3, 4])) == 4
    batches = BatchSampler(SequentialSampler(range(7)), batch_size=3, drop_last=False)
    assert count_samples(DataLoader(dataset, batch_sampler=batches)) == 7
    assert count_samples(DataLoader(Stream(iter(())), batch_size=3)) is None


class Renamed(DataLoader):
    """A subclass with arguments of its own."""

    def __init__(self, secret: int, dataset: Any, size: int) -> None:
        super().__init__(dataset, batch_size=size)
        self.secret = secret


def test_setting_the_size_of_a_loader_in_place() -> None:
    dataset = TensorDataset(torch.arange(10))
    loaders = [
        DataLoader(dataset, batch_size=2),
        Renamed(7, dataset, 2),
        DataLoader(dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), 2, drop_last=False)),
    ]
    for loader in loaders:
        set_loader_batch_size(loader, 4)
        assert loader_batch_size(loader) == 4
        assert [len(batch[0]) for batch in loader] == [4, 4, 2]
    assert loader_batch_size(DataLoader(dataset, batch_size=None)) is None
    assert loader_batch_size(DataLoader(dataset, batch_sampler=[[0], [1, 2]])) is None


def test_no_file_descriptor_is_kept() -> None:
    loader = DataLoader(Counting(), batch_size=4)

    def descriptors_after(times: int) -> int:
        kept = [Samples(loader) for _ in range(times)]
        gc.collect()
        assert len(kept) == times
        return len(os.listdir("/proc/self/fd"))

    descriptors_after(1)  # the first one opens what stays open (the resource tracker, say)
    assert descriptors_after(1) == descriptors_after(5)
