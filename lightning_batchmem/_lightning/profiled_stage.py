"""A stage that a profiler watches: samples of its batches, moments of its steps, and what it logs.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_batchmem._lightning.data_source import combined_mode, stage_loop
from lightning_batchmem._lightning.trainer_state import accumulates, call_before, replaced
from lightning_batchmem.batches.loader_size import count_samples, loader_batch_size
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.tensors import samples_in

# The folders of Trainers without loggers.
_LOG_DIRS: WeakKeyDictionary[Trainer, Path] = WeakKeyDictionary()

_LOADERS = "The batch size of the loaders"


PlacedBatch = tuple[object, int, int]
"""A batch, its number in its loader, and the number of the loader.

The loader has a number where loaders follow each other.
"""


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
        if batch is None:
            # Lightning passes it to the step of an evaluation.
            return 0
        # Loaders may be requested again in each epoch.
        combined = self._loop._combined_loader
        if combined is not self._combined or loader_number != self._loader_number:
            self._combined = combined
            self._read_sizes(loader_number)
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
        for one in self._of_loaders:
            samples = one.in_batch(number, is_last=is_last)
            if samples is None:
                return None
            total += samples
        return total

    def _read_sizes(self, loader_number: int) -> None:
        """Read the sizes of the loaders that have samples in a batch."""
        self._loader_number = loader_number
        self._of_loaders = value_or_none(_LOADERS, self._read_loaders, loader_number) or []
        # A loader of single samples may have batches as samples.
        sizes = [one.size for one in self._of_loaders if one.size != 1]
        self.loaders_have_sizes = bool(sizes) and None not in sizes
        self._size = sum(one.size or 0 for one in self._of_loaders)

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


class WatchedCalls:
    """Calls functions at the moments of a stage that limit the time of its steps.

    The hooks of a callback come too late: other callbacks may have run before.

    Args:
        trainer: the Trainer, in the stage.
        on_request: called before the batches of the stage are requested.
        on_validation_request: called before batches of an evaluation in the training are requested.
        after_step: called before an evaluation within the training, the end of an epoch, and the
            making of a checkpoint.
        at_end: called when the work of a batch has ended, before the hooks that follow.
    """

    def __init__(
        self,
        trainer: Trainer,
        on_request: Callable[[], object],
        on_validation_request: Callable[[], object],
        after_step: Callable[[], object],
        at_end: Callable[[], object],
    ) -> None:
        loop = stage_loop(trainer)
        batch_loop = loop.epoch_loop if trainer.training else loop
        self._fetchers = {batch_loop: loop._data_fetcher}
        calls = [
            (batch_loop, "_on_before_fetch", on_request),
            (batch_loop.batch_progress, "increment_processed", at_end),
            (trainer, "save_checkpoint", after_step),
        ]
        if trainer.training:
            val_loop = batch_loop.val_loop
            self._fetchers[val_loop] = val_loop._data_fetcher
            calls += [
                (val_loop, "_on_before_fetch", on_validation_request),
                (val_loop.batch_progress, "increment_processed", at_end),
                (loop, "on_advance_end", after_step),
                (val_loop, "run", after_step),
            ]
        self._cancels = [call_before(*call) for call in calls]
        self._hand_over()

    def close(self) -> None:
        """Stop calling the functions."""
        for cancel in self._cancels:
            cancel()
        self._hand_over()

    def _hand_over(self) -> None:
        """Let the fetchers that exist call the methods of their loops.

        A loop hands its method to a new fetcher when an epoch begins.
        """
        for loop, fetcher in self._fetchers.items():
            if fetcher is not None:
                fetcher._start_profiler = loop._on_before_fetch


def log_dir_of(trainer: Trainer) -> str | None:
    """What ``trainer.log_dir`` is on the first rank; None where the logger does not tell it.

    Without loggers it is a new folder, since ``trainer.log_dir`` is that of the user's code then.
    Every rank must call this function.
    """
    # Reading it is a broadcast, for which the other ranks would wait after an error on this one.
    with replaced(trainer.strategy, broadcast=lambda value, src=0: value):
        log_dir = value_or_none("The log directory", lambda: _path_text(trainer.log_dir))
    if not trainer.loggers and log_dir and "://" not in log_dir:
        if trainer not in _LOG_DIRS:
            _LOG_DIRS[trainer] = _next_version(Path(log_dir) / "lightning_batchmem_logs")
        log_dir = str(_LOG_DIRS[trainer])
    return trainer.strategy.broadcast(log_dir)


def _next_version(logs: Path) -> Path:
    versions = (logs / f"version_{number}" for number in count())
    return next(version for version in versions if not os.path.lexists(version))


def _path_text(path: Any) -> str | None:
    # Some loggers have a Path, and a mock of a logger has a mock.
    return os.fsdecode(path) or None if isinstance(path, str | bytes | os.PathLike) else None


def logging_step(trainer: Trainer) -> int:
    """The step under which Lightning logs.

    ``trainer.global_step`` is another number: it counts every optimizer of a manual step.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def logs_now(trainer: Trainer, step: int) -> bool:
    """Whether values of ``self.log`` reach the loggers after the current batch.

    The step is the one of :func:`logging_step`.

    The rule is that of ``update_train_step_metrics`` and ``should_update_logs`` in Lightning's
    ``_LoggerConnector``. It is written out because it is needed in every step.
    """
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if not interval or ((step + 1) % interval and not trainer.should_stop):
        return False
    return (
        # Each batch steps then, and this runs at each log.
        trainer.accumulate_grad_batches == 1
        or not accumulates(trainer)
        or not trainer.lightning_module.automatic_optimization
    )


def logs_at_all(trainer: Trainer) -> bool:
    """Whether ``log_every_n_steps`` lets any value reach the loggers."""
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    return bool(trainer.log_every_n_steps)  # type: ignore[attr-defined]
