"""Loaders and samplers of projects, which know the batch size in ways of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler


class Repeats:
    """Repeats a batch sampler without an end, as those of timm and Ultralytics do."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class RepeatingLoader(DataLoader[Any]):
    """Begins an iteration when it is made, and goes on with it in every epoch."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        object.__setattr__(self, "batch_sampler", Repeats(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


class FixedLoader(DataLoader[Any]):
    """Makes batches of four samples, whatever its size is."""

    def __iter__(self) -> Iterator[Any]:
        rows = [self.dataset[index] for index in range(len(self.dataset))]
        for start in range(0, len(rows), 4):
            yield self.collate_fn(rows[start : start + 4])


class OfClasses(Sampler[list[int]]):
    """Batches of P classes with K samples each: two numbers whose product is the size."""

    def __init__(self, classes: int, samples: int) -> None:
        self.classes = classes
        self.samples = samples
        self.batch_size = classes * samples

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(4):
            yield [batch] * (self.classes * self.samples)


class Buckets(Sampler[list[int]]):
    """Batches of buckets: the last one of a bucket has fewer samples."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.samples = samples
        self.batch_size = batch_size

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[list[int]]:
        half = self.samples // 2
        for bucket in (range(half), range(half, self.samples)):
            for start in range(0, len(bucket), self.batch_size):
                yield list(bucket[start : start + self.batch_size])


class Wraps:
    """A batch sampler around another one, whose size it only reads."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    @property
    def batch_size(self) -> int:
        return int(self.batch_sampler.batch_size)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batch_sampler)
