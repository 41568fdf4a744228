"""A training that counts what goes through it, whoever runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from benchmarks.common import described
from benchmarks.workloads import WORKLOADS, Training
from lightning_batchmem.devices.out_of_memory import is_out_of_memory


class Watched(Training):
    """Counts samples at the begin of each ``training_step``, and out-of-memory errors wherever a step raises them.

    A step that is aborted counts with all its samples. The counts are the class's, since a search puts back what an
    instance holds, and since some finders make a module for each attempt.

    Attributes:
        samples_by_size: batch size -> samples pushed through.
        out_of_memory: the out-of-memory errors, each as a line.
    """

    samples_by_size: ClassVar[Counter[int]] = Counter()
    out_of_memory: ClassVar[list[str]] = []
    _is_watching: ClassVar[bool] = False

    @classmethod
    @contextmanager
    def watch(cls) -> Iterator[None]:
        """Count an out-of-memory error that leaves the block, once where blocks are nested."""
        if Watched._is_watching:
            yield
            return
        Watched._is_watching = True
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                cls.out_of_memory.append(described(error))
            raise
        finally:
            Watched._is_watching = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples_by_size[len(batch[0])] += len(batch[0])
        with self.watch():  # under manual optimization backward and the optimizers' steps are in it
            return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        with self.watch():  # forward and backward are in its closure
            super().optimizer_step(*args, **kwargs)

    def transfer_batch_to_device(self, *args: Any, **kwargs: Any) -> Any:
        with self.watch():
            return super().transfer_batch_to_device(*args, **kwargs)

    def collate(self, samples: list[Any]) -> Any:
        with self.watch():
            return super().collate(samples)


def watched(name: str, batch_size: int = 2) -> Watched:
    """The module that ``module_for`` makes, watched."""
    workload = WORKLOADS[name]
    module: Watched = type("Watched", (Watched, workload.training), {})(workload, batch_size)
    return module
