"""The user's real steps on given batches in Lightning's loops, and the callback that measures them.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_batchmem._lightning.bounds import limited_batches
from lightning_batchmem._lightning.trainer_state import (
    accumulates,
    call_module_hook,
    count_optimizer_step,
    lightning_name,
    logger_connector,
    renew_results,
    results_of,
)
from lightning_batchmem.batches.loaders import StageLoaders
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.devices.tensors import bytes_of, tensors_in
from lightning_batchmem.search.program import Steps
from lightning_batchmem.search.ranks import CollectiveFoundError

_TRAIN_END = ("on_train_epoch_end",)
_BETWEEN_EPOCHS = (
    *_TRAIN_END,
    "on_train_epoch_start",
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
)
"""Hooks that may free what the steps of an epoch keep."""

_STOPPED = (
    "the {} raised StopIteration, which would end the epoch, so BatchFinder cannot measure it."
    " Begin the exhausted iterator again, or use next(iterator, default)."
)


@dataclass
class _BatchFetcher:
    """The part of Lightning's ``_DataFetcher`` that the training loop uses."""

    next_batch: list[tuple[Any, int]]
    done = False

    def __next__(self) -> tuple[Any, int, int]:
        return *self.next_batch.pop(), 0


@dataclass(eq=False)
class _StageSteps(Steps):
    """Steps of one stage, on batches of real samples.

    Args:
        trainer: the Trainer.
        loop: the loop of either Lightning package that runs the steps.
        loaders: the loaders of the stage.
        batches: the batches, made of samples of these loaders.
    """

    trainer: Trainer
    loop: Any
    loaders: StageLoaders
    batches: ProbeBatches
    # The batch of the next step, with the index of its loader. It is taken out by the step, which
    # then holds the only reference.
    _next_batch: list[tuple[Any, int]] = field(default_factory=list)

    @property
    def sample_bytes(self) -> int:
        return self.batches.sample_bytes

    @property
    def follows_size(self) -> bool:
        return self.loaders.follows

    @property
    def num_other_batches(self) -> int:
        return self.batches.num_other_batches

    def items(self, batch_size: int) -> float:
        return self.batches.items(batch_size)

    def batches_in_epoch(self, batch_size: int) -> float:
        """Batches of an epoch on this rank, as far as the Trainer's limits allow."""
        limit = getattr(self.trainer, f"limit_{self.loaders.stage}_batches")
        return limited_batches(self.loaders.batches(batch_size), limit)

    def last_batch_size(self, batch_size: int) -> int:
        in_epoch = self.batches_in_epoch(batch_size)
        if not any(info.may_end_smaller(batch_size, in_epoch) for info in self.loaders.sized):
            return batch_size
        # A batch of one sample needs next to no memory, so half of the size takes its place.
        last_size = self.loaders.last_batch_size(batch_size)
        return last_size if last_size > 1 else min(batch_size, max(2, batch_size // 2))

    @property
    def frees_at_epoch_end(self) -> bool:
        module = self.trainer.lightning_module
        # Lightning itself resets the metrics that a module logs.
        return self._overrides(_BETWEEN_EPOCHS) or any(
            isinstance(part, Metric) for part in module.modules()
        )

    def make_batch(self, batch_size: int, index: int, *, other_lengths: bool = False) -> None:
        make = self.batches.other_lengths if other_lengths else self.batches.batch
        self._make_again = partial(make, batch_size, index)
        try:
            self._next_batch[:] = [self._make_again()]
        except StopIteration as error:
            raise RuntimeError(_STOPPED.format("collate function")) from error

    def end(self) -> None:
        """Drop the batch that a failed step leaves, which would count as other memory."""
        # A prediction has no results.
        if (results := results_of(self.loop)) is not None:
            results.batch = None

    def _overrides(self, hooks: Sequence[str]) -> bool:
        """Whether the module has one of these hooks."""
        is_overridden = lightning_name(self.trainer, "utilities.model_helpers.is_overridden")
        return any(is_overridden(hook, self.trainer.lightning_module) for hook in hooks)

    def _call_end_hooks(self, *hooks: str) -> None:
        """Call hooks at the end of an epoch, which may need a whole one."""
        connector = logger_connector(self.trainer)
        connector.epoch_end_reached()
        try:
            for hook in hooks:
                call_module_hook(self.trainer, hook)
        # A user's hook may raise any exception after a few batches.
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, CollectiveFoundError):
                raise
            rank_zero_warn(
                f"{hook} failed after a few batches of the search, which goes on:"
                f" {type(error).__name__}: {error}"
            )
        connector.reset_results()


@dataclass(eq=False)
class TrainingSteps(_StageSteps):
    """The user's training step; under gradient accumulation, each step is a micro batch.

    Args:
        hook_of_epoch: calls what comes before the first batch of another epoch.
    """

    hook_of_epoch: Callable[[], None] = field(kw_only=True)

    first_phase = "forward"

    def begin(self, batch_size: int) -> int:
        self.batches.prepare(batch_size)
        trainer = self.trainer
        self._begin_epoch()
        # The results are new, because values may now be reduced in another way: on this rank only,
        # or over all ranks.
        renew_results(self.loop)
        trainer.fit_loop.max_batches = self.batches_in_epoch(batch_size)
        # The first micro batch clears the gradients, and the last one makes the optimizer step.
        # Those between them take no more memory than the last.
        trainer.accumulate_grad_batches = min(2, trainer.accumulate_grad_batches)
        return trainer.accumulate_grad_batches * self.batches.loaders_in_turn

    def complete(self) -> None:
        """Nothing follows the last step."""

    def make_copies(self, batch_size: int) -> None:
        """Make a batch of copies of one sample, the batch of the next :meth:`run`."""
        self._make_again = partial(self.batches.copies, batch_size)
        self._next_batch[:] = [self._make_again()]

    def run(self) -> None:
        """Run one step.

        Raises:
            RuntimeError: if the user's hooks or step end the epoch.
        """
        loop = self.loop
        # A project may look up values by the index of the batch.
        if loop.batch_progress.current.ready >= self.trainer.fit_loop.max_batches:
            self._begin_epoch()
        for _ in range(2):
            try:
                loop.advance(_BatchFetcher(self._next_batch))
                break
            except StopIteration as error:
                counts = loop.batch_progress.current
                # The counts differ in this way only for a batch that the hook skipped.
                if counts.processed <= counts.started:
                    raise RuntimeError(_STOPPED.format("training step")) from error
                # on_train_batch_start ended the epoch.
                self._begin_epoch()
                self._next_batch[:] = [self._make_again()]
        else:
            raise RuntimeError(
                "on_train_batch_start returned -1 for the first batch, so BatchFinder cannot"
                " measure a training step. Set the batch size by hand, or return -1 only after"
                " training has begun."
            )
        if not accumulates(self.trainer):
            # Lightning counts in on_advance_end, which is not called because it also validates.
            count_optimizer_step(self.trainer)

    def _begin_epoch(self) -> None:
        """Count batches from 0 again, as in another epoch."""
        num_batches = self.loop.batch_progress.current.ready
        # The hook may need all its batches. It may also need all ranks, and they would take all
        # steps together for it.
        is_whole = num_batches >= self.trainer.fit_loop.max_batches and self.trainer.world_size == 1
        if is_whole and self._overrides(_TRAIN_END):
            self._call_end_hooks(*_TRAIN_END)
        # The first epoch has begun with the restart of the program.
        if num_batches > 0:
            self.hook_of_epoch()
        self.loop.batch_progress = type(self.loop.batch_progress)()


class EvaluationSteps(_StageSteps):
    """The user's validation, test or prediction step, without gradients."""

    first_phase = "evaluation"
    # The batches since the begin, of all loaders.
    _num_batches = 0

    def begin(self, batch_size: int) -> int:
        """Enter the evaluation with the module's hooks."""
        self._num_batches = 0
        self.batches.prepare(batch_size)
        if self.trainer.training:
            self.trainer.validating = True
            # Lightning drops the gradients before a validation, except between the batches of an
            # accumulation.
            if not accumulates(self.trainer):
                call_module_hook(self.trainer, "on_validation_model_zero_grad")
        counts = [self.loaders.batches(batch_size)] * len(self.loaders.sized)
        # Where a name belongs to the other kind of loop only, this one does not read it.
        vars(self.loop).update(
            _combined_loader=self.loaders.combined,
            # The loops only require that there is a fetcher of batches.
            _data_fetcher=self,
            batch_progress=type(self.loop.batch_progress)(),
            _seen_batches_per_dataloader=defaultdict(int),
            _max_batches=counts,
            max_batches=counts,
            epoch_batch_indices=[[] for _ in counts],
        )
        self._without_gradients(type(self.loop).on_run_start)
        return self.batches.loaders_in_turn

    def make_batch(self, batch_size: int, index: int, *, other_lengths: bool = False) -> None:
        super().make_batch(batch_size, index, other_lengths=other_lengths)
        # A project may look up values by the index of the batch.
        self._index = self._num_batches // self.batches.loaders_in_turn
        self._num_batches += 1

    def begin_step(self, batch_size: int) -> None:
        """Begin again after the last batch: what an evaluation keeps is freed at its end."""
        if 0 < self.batches_in_epoch(batch_size) <= self._num_batches:
            self.complete()
            self.end()
            self.begin(batch_size)

    def complete(self) -> None:
        """Call the end hooks of the module: they may swap its weights back, or free outputs."""
        stage = self._stage
        starts = (f"on_{stage}_start", f"on_{stage}_epoch_start")
        ends = (f"on_{stage}_epoch_end", f"on_{stage}_end")
        # It may write predictions, or need all ranks, which would take all steps together for it.
        leaves_out_end = stage == "predict" or self.trainer.world_size > 1
        if self._overrides(starts if leaves_out_end else starts + ends):
            self._without_gradients(lambda _: self._call_end_hooks(*ends))

    def end(self) -> None:
        """Leave the evaluation."""
        super().end()
        getattr(self.loop, f"_on_{self._kind}_model_train")()
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.trainer.training = True

    def run(self) -> None:
        def step(loop: Any) -> None:
            batch, loader_index = self._next_batch.pop()
            # A prediction collects its outputs in these lists, for its return value.
            loop._predictions = [[] for _ in self.loaders.sized]
            getattr(loop, f"_{self._kind}_step")(batch, self._index, loader_index, None)

        self._without_gradients(step)

    @property
    def _stage(self) -> str:
        """The word for the stage in the names of hooks."""
        return self.loaders.stage.replace("val", "validation")

    @property
    def _kind(self) -> str:
        """The word for the kind of loop in the names of its methods."""
        return "predict" if hasattr(self.loop, "_predict_step") else "evaluation"

    def _without_gradients(self, call: Callable[[Any], None]) -> None:
        no_grad_context = lightning_name(self.loop, "loops.utilities._no_grad_context")
        no_grad_context(call)(self.loop)


class SearchCallback(Callback):
    """Marks the phases of a step and measures its batch.

    It is the only callback whose hooks a search calls.

    Args:
        phases: where the phases of each step are marked.

    Attributes:
        largest_batch_bytes: bytes of the largest training batch so far, as the module gets it.
        losses: the recorded losses, as Lightning divides them under accumulation.
    """

    def __init__(self, phases: PhasePeaks) -> None:
        self._phases = phases
        self.largest_batch_bytes = 0
        self.losses: list[Tensor] | None = None

    def record_losses(self) -> None:
        """Record each further loss, which takes memory of a step."""
        self.losses = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure the batch after the hooks of its transfer."""
        batch_bytes = value_or_none("The size of a batch", lambda: bytes_of(tensors_in(batch)))
        self.largest_batch_bytes = max(self.largest_batch_bytes, batch_bytes or 0)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """End forward."""
        if self.losses is not None:
            self.losses.append(loss.detach())
        self._phases.enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End backward; clipping and the optimizer follow."""
        self._phases.enter("optimizer_step")
