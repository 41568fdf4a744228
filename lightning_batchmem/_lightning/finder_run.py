"""What a BatchFinder keeps for one fit or evaluation."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem._lightning.clean_start import ProjectSnapshot, project_snapshot
from lightning_batchmem._lightning.errors import reason_of
from lightning_batchmem._lightning.trainer_state import call_once_before
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.optimizers import state_tensors
from lightning_batchmem.devices.peaks import RequestedBytes
from lightning_batchmem.devices.tensors import bytes_of, tensors_in
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import mib
from lightning_batchmem.search.ranks import Ranks

MORE_IN_USE_SHARE = 0.01
"""Training that begins with more in use than the search, by this share of the limit, warns."""

LARGER_SHARE = 0.05
"""A batch counts as larger from this share of more bytes on: the limit has room for a few per cent.
"""


# The plan of each training in this process, with an object that has the size since then. Not every
# object has a hash. The last ones are enough for the folds of a cross validation.
_PLANS_OF_PROCESS = deque[tuple[ref[Any], Plan]](maxlen=100)


def earlier_plan_of(owners: Iterable[Any]) -> Plan | None:
    """The plan of the last fit of these objects, which may have had another finder."""
    objects = list(owners)
    earlier = None
    for owner, plan in _PLANS_OF_PROCESS:
        if any(owner() is one for one in objects):
            earlier = plan
    return earlier


class TrainingWatch:
    """Warns once if a training begins with more in use than its search, and once of a larger batch.

    Args:
        device_memory: the memory of the device.
        plan: the plan of the search.
        knows_largest_batch: whether the search has used the largest batches, and not average ones.
    """

    def __init__(
        self, device_memory: DeviceMemory, plan: Plan, *, knows_largest_batch: bool
    ) -> None:
        at_size = [trial for trial in plan.trials if trial.batch_size == plan.batch_size]
        self._device_memory = device_memory
        self._plan = plan
        # Live bytes before the first step; 0 where they are not known, or were compared.
        self._start_bytes = 0
        if device_memory.reports_requested_bytes and at_size:
            self._start_bytes = at_size[-1].memory.start_bytes
        # Bytes of the largest batch; 0 where it is not known, or a warning was given.
        self._largest_bytes = 0
        if knows_largest_batch and at_size:
            self._largest_bytes = at_size[-1].memory.largest_batch_bytes

    def begin_step(self, trainer: Trainer, batch: object) -> None:
        """Compare what is in use, and the batch, with the search's."""
        if self._start_bytes > 0:
            value_or_none("What memory the training begins with", self._check_start, trainer, batch)
            self._start_bytes = 0
        # The first epoch has every sample.
        if trainer.current_epoch == 0 and self._largest_bytes > 0:
            value_or_none("The size of a batch", self._check_batch, batch)

    def _check_start(self, trainer: Trainer, batch: object) -> None:
        # A resumed run has restored the optimizer state, which the rehearsal made itself.
        made_bytes = bytes_of(
            [*tensors_in(batch), *state_tensors(trainer.optimizers)],
            trainer.strategy.root_device,
        )
        current_bytes = RequestedBytes(self._device_memory).current().allocated_bytes
        more_bytes = current_bytes - made_bytes - self._start_bytes
        if more_bytes > MORE_IN_USE_SHARE * self._plan.limit_bytes:
            rank_zero_warn(
                f"Training begins with {mib(more_bytes)} more in use than the search did, for"
                " example because of another callback. If it runs out of memory, set a smaller"
                " max_batch_size."
            )

    def _check_batch(self, batch: object) -> None:
        batch_bytes = bytes_of(tensors_in(batch))
        if batch_bytes <= (1 + LARGER_SHARE) * self._largest_bytes:
            return
        largest_bytes = self._largest_bytes
        self._largest_bytes = 0
        # Activations and the batch grow with the bytes of the batch, and other memory does not.
        fitting_size = max(1, self._plan.batch_size * largest_bytes // batch_bytes)
        # Each rank reads other samples, so each of them may warn.
        warnings.warn(
            f"A training batch has {mib(batch_bytes)}, and the largest that BatchFinder measured at"
            f" this batch size has {mib(largest_bytes)}. If memory runs out, batches as large"
            f" as this one fit with max_batch_size={fitting_size}.",
            stacklevel=2,
        )


class FinderRun:
    """One fit or evaluation of a BatchFinder, from its ``setup`` on.

    Args:
        ranks: the processes that search together.
        is_optional: whether a search that cannot be made is a warning, after which the run goes on.
        parameters: the number of parameters, before a strategy has sharded them; empty where they
            are made later.

    Attributes:
        ranks: the processes that search together.
        undo: calls at its end, which undo what the run has changed: the limit of the user, or the
            size of an evaluation.
        checkpoint: the state of the finder in the checkpoint that the run resumes from, loaded
            between ``setup`` and the search; empty for a run that does not resume.
        plan: the plan that a training has; ``None`` before, and in an evaluation.
    """

    def __init__(
        self, ranks: Ranks | None = None, *, is_optional: bool = False, parameters: str = ""
    ) -> None:
        self.ranks = ranks or Ranks(0, 1)
        self.parameters = parameters
        self.undo = ExitStack()
        self.checkpoint: dict[str, Any] = {}
        self.plan: Plan | None = None
        self._is_optional = is_optional
        # The state before configure_optimizers, until the search begins.
        self._snapshot: ProjectSnapshot | None = None
        # The error of an optional search in setup, which ends the search on all ranks later.
        self._refusal: Exception | None = None
        self._watch: TrainingWatch | None = None

    def __reduce__(self) -> tuple[type[FinderRun], tuple[()]]:
        """Give a copy of the finder a new run, because the training belongs to the original."""
        return FinderRun, ()

    def call_before(self, owner: Any, method: str, call: Callable[[], None]) -> None:
        """Run ``call`` before the next ``owner.method()``, unless the run ends before it."""
        self.undo.callback(call_once_before(owner, method, call))

    def record_project(self, trainer: Trainer) -> None:
        """Take a snapshot before the user's ``configure_optimizers``, which may change anything."""

        def take_snapshot() -> None:
            with self.kept_refusal():
                self._snapshot = project_snapshot(trainer)

        if self._refusal is None:
            self.call_before(trainer.strategy, "setup_optimizers", take_snapshot)

    def load(self, state: dict[str, Any]) -> None:
        """Keep the state of the finder in a checkpoint."""
        self.checkpoint = state

    def begin_search(self) -> ProjectSnapshot | None:
        """End what ``setup`` has begun; returns the snapshot, which only the search keeps now.

        There is none where a strategy configures its optimizers in another way than by its own
        method.
        """
        self.end()
        snapshot = self._snapshot
        self._snapshot = None
        return snapshot

    @contextmanager
    def kept_refusal(self) -> Iterator[None]:
        """Keep an error in the body for :meth:`raise_refusal` if the search is optional."""
        try:
            yield
        # A user's object may raise any error where its state is recorded.
        except Exception as error:
            if not self._is_optional:
                raise
            self._refusal = error

    def raise_refusal(self) -> None:
        """Raise the error that was kept."""
        refusal = self._refusal
        self._refusal = None
        if refusal is not None:
            raise refusal

    @contextmanager
    def warned_of_error(self) -> Iterator[ExitStack]:
        """Warn of an error in the body if the search is optional.

        Yields:
            What is called after such an error, to start the run without a search.
        """
        without_search = ExitStack()
        try:
            yield without_search
        # A search may end with an error of the user's code, which the training may not reach.
        except Exception as error:
            # The other ranks would wait in their step.
            if not self._is_optional or self.ranks.in_collective_step:
                raise
            rank_zero_warn(
                f"BatchFinder leaves the batch size of the project as it is: {reason_of(error)}"
            )
            without_search.close()

    def begin_training(self, plan: Plan, owners: Iterable[Any] = ()) -> None:
        """Keep the plan of a training, for later fits of the objects that have its size too."""
        self.plan = plan
        _PLANS_OF_PROCESS.extend((ref(one), plan) for one in owners)

    def watch(self, watch: TrainingWatch) -> None:
        """Keep the watch over a training whose plan a search has made."""
        self._watch = watch

    def begin_step(self, trainer: Trainer, batch: object) -> None:
        """Warn once if training needs more memory than the search could see."""
        if self._watch is not None:
            self._watch.begin_step(trainer, batch)

    def end(self) -> None:
        """Undo the limit, and the size of an evaluation: the next run starts without them."""
        self.undo.close()

    def fail(self, error: BaseException) -> None:
        """End the run after an error."""
        # The other ranks may wait in a search that this one has not reached.
        if self.begin_search() is not None:
            self.ranks.report(error)
