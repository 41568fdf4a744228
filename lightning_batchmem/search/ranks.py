"""One search on several ranks: the worst result of all, and failures that reach every rank."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

# TorchDispatchMode is documented, and public only under this name in torch 2.5 to 2.14.
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_batchmem.devices.foreign_values import add_note, error_text
from lightning_batchmem.plan.records import Trial

_Value = TypeVar("_Value")


class RankFailedError(RuntimeError):
    """Another rank has failed; the message names the rank and its error."""


class RankLostError(RankFailedError):
    """Another rank has ended without a message, for example because memory ran out."""


class Ranks:
    """The processes that search together.

    Each of them calls :meth:`exchange` equally often, and once more after an error.

    Attributes:
        ends_together: whether an error in a step that ranks take together ends all of them.
        rank: the number of this process.
        size: how many processes there are.
        goes_on: whether a new start goes on behind a step that ends all ranks.
        in_collective_step: whether the others wait for this one in a step, also after an error.
    """

    ends_together = True

    def __init__(self, rank: int, size: int, *, goes_on: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.goes_on = goes_on
        self.in_collective_step = False

    def exchange(self, value: _Value) -> list[_Value]:
        """The values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        rows = self._gather(None, value)
        for rank, (failure, _) in enumerate(rows):
            if failure is not None:
                raise RankFailedError(f"rank {rank} ended the search: {failure}")
        return [row[1] for row in rows]

    def on_this_host(self) -> int:
        """How many of the ranks run on the machine of this one, by an exchange."""
        host = socket.gethostname()
        return self.exchange(host).count(host)

    def worst_of(self, trial: Trial) -> Trial:
        """The worst trial of all ranks, which have to run the same size."""
        trials = self.exchange(trial)
        if len({trial.batch_size for trial in trials}) > 1:
            raise RuntimeError(
                "BatchFinder's ranks ran different batch sizes; please report this as a bug."
            )
        return Trial.worst_of(trials)

    def named(self, error: str) -> str:
        """An error of this rank, with the rank if there are several."""
        return f"on rank {self.rank}: {error}" if error and self.size > 1 else error

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Run the body on all ranks; an error on one of them ends it on all."""
        try:
            yield
            self.exchange(None)
        except RankFailedError:
            raise
        # Every error is raised again, after a report to the other ranks.
        except BaseException as error:
            self.report(error)
            raise

    def report(self, error: BaseException) -> None:
        """Tell the other ranks, in the next exchange, that this one failed.

        Nothing happens if the other ranks wait inside a collective step.
        """
        if self.size > 1 and not self.in_collective_step:
            # The exchange fails if the other ranks have ended already. The error of this rank is
            # raised anyway.
            with suppress(RuntimeError):
                self._gather(error_text(error), None)

    @contextmanager
    def collective_step(self, batch_size: int) -> Iterator[None]:
        """Steps that all ranks take together.

        After an error this rank ends without a further exchange.
        """
        self.in_collective_step = True
        try:
            yield
        # Every error is raised again, with a note.
        except Exception as error:
            advice = "use a lower memory_limit"
            if self.goes_on:
                advice = "start the same command again, and the search goes on below this size"
            add_note(
                error,
                f"BatchFinder: this error occurred in a step of {batch_size} samples that all ranks"
                f" take together. If a rank ran out of memory, {advice}.",
            )
            raise
        self.in_collective_step = False

    def _gather(self, failure: str | None, value: Any) -> list[Any]:
        rows: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(rows, (failure, value))
        # Gloo and NCCL have no error class for a peer that is gone.
        except RuntimeError as error:
            raise RankLostError(
                f"another rank ended without a message; rank {self.rank} waited for it"
            ) from error
        return rows


class CollectiveFoundError(RuntimeError):
    """A step needs other ranks; the message names the operation."""


# TorchDispatchMode.__init_subclass__ has no type annotations.
class CollectiveDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises an error at the first collective of ``torch.distributed`` instead of running it.

    So no rank waits for the others.
    """

    def __init__(self) -> None:
        # TorchDispatchMode.__init__ has no type annotations.
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self.found = True
            raise CollectiveFoundError(
                f"The step ends before {func}, which the other ranks would have to reach too."
            )
        return func(*args, **(kwargs or {}))
