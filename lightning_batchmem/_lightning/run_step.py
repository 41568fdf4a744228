"""Run the user's real steps on given batches, in Lightning's own loops.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader

from lightning_batchmem._lightning.packages import lightning_name

# This is an _EvaluationLoop or a _PredictionLoop of either Lightning package.
EvaluationLoop = Any


class _BatchFetcher:
    """The part of Lightning's ``_DataFetcher`` that the loops use; an evaluation never fetches."""

    done = False

    def __init__(self, make_batch: Callable[[], Any] = lambda: None) -> None:
        self._make_batch = make_batch

    def __next__(self) -> tuple[Any, int, int]:
        return self._make_batch(), 0, 0

    def teardown(self) -> None: ...


def begin_training(trainer: Trainer) -> None:
    """Call the hooks of the module that precede its first batch."""
    # _call_lightning_module_hook is private in lightning 2.5.0 to 2.6.6.
    call_hook = lightning_name(trainer, "trainer.call._call_lightning_module_hook")
    for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
        call_hook(trainer, hook)


def begin_epoch(trainer: Trainer, batches: float) -> int:
    """Make the next step the first of an epoch of ``batches``.

    Returns the micro batches per optimizer step of the epoch, 1 or 2.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.batch_progress = type(epoch_loop.batch_progress)()
    # The results are new, because values may now be reduced in another way: on this rank only, or
    # over all ranks.
    epoch_loop._results = type(epoch_loop._results)(training=epoch_loop._results.training)
    trainer.fit_loop.max_batches = batches
    # The first micro batch clears the gradients, and the last one makes the optimizer step. Those
    # between them take no more memory than the last.
    trainer.accumulate_grad_batches = min(2, trainer.accumulate_grad_batches)
    return trainer.accumulate_grad_batches


def run_step(trainer: Trainer, make_batch: Callable[[], Any]) -> None:
    """Run one training step; under gradient accumulation, a micro batch.

    Raises:
        RuntimeError: if the user's hooks or step end the epoch.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    for _ in range(2):
        try:
            # mypy does not see that _BatchFetcher has the part of _DataFetcher that is used.
            epoch_loop.advance(_BatchFetcher(make_batch))  # type: ignore[arg-type]
            break
        except StopIteration as error:
            counts: Any = epoch_loop.batch_progress.current
            # The counts differ in this way only for a batch that the hook skipped.
            if counts.processed <= counts.started:
                raise RuntimeError(
                    "the training step raised StopIteration, which would end the epoch, so"
                    " BatchFinder cannot measure it. Begin the exhausted iterator again, or use"
                    " next(iterator, default)."
                ) from error
            # on_train_batch_start ended the epoch, so the next one begins.
            epoch_loop.batch_progress = type(epoch_loop.batch_progress)()
    else:
        raise RuntimeError(
            "on_train_batch_start returned -1 for the first batch, so BatchFinder cannot"
            " measure a training step. Set the batch size by hand, or return -1 only after"
            " training has begun."
        )
    if not epoch_loop._should_accumulate():
        # Lightning counts in on_advance_end, which is not called here because it also validates.
        epoch_loop._batches_that_stepped += 1


def drop_batch(loop: Any) -> None:
    """Release the batch that a step left in the results of its loop."""
    loop._results.batch = None
    loop._results.batch_size = None


def begin_evaluation(
    trainer: Trainer, loop: EvaluationLoop, loaders: CombinedLoader, batches: float
) -> None:
    """Enter an evaluation of ``batches`` for each loader; hooks of the module run."""
    if trainer.state.fn == TrainerFn.FITTING:
        trainer.validating = True
    loop._combined_loader = loaders
    loop._data_fetcher = _BatchFetcher()
    loop.batch_progress = type(loop.batch_progress)()
    counts = [batches] * len(loaders.flattened)
    if _predicts(loop):
        loop.max_batches = counts
        loop.epoch_batch_indices = [[] for _ in counts]
    else:
        loop._max_batches = counts
        loop._seen_batches_per_dataloader = defaultdict(int)
    _without_gradients(loop, lambda loop: loop.on_run_start())


def run_evaluation_step(loop: EvaluationLoop, make_batch: Callable[[], tuple[Any, int]]) -> None:
    """Run one step without gradients.

    ``make_batch`` returns the batch and the index of its loader.
    """

    def step(loop: EvaluationLoop) -> None:
        batch, loader_index = make_batch()
        if _predicts(loop):
            # A prediction collects its outputs in these lists, for its return value.
            loop._predictions = [[] for _ in loop.max_batches]
            loop._predict_step(batch, 0, loader_index, None)
        else:
            loop._evaluation_step(batch, 0, loader_index, None)

    _without_gradients(loop, step)


def end_evaluation(trainer: Trainer, loop: EvaluationLoop) -> None:
    """Undo :func:`begin_evaluation`: the mode of the module and the stage of the trainer."""
    if _predicts(loop):
        loop._on_predict_model_train()
    else:
        loop._on_evaluation_model_train()
        drop_batch(loop)
    loop._data_fetcher = None
    if trainer.state.fn == TrainerFn.FITTING:
        trainer.training = True


def _predicts(loop: EvaluationLoop) -> bool:
    return isinstance(loop, lightning_name(loop, "loops.prediction_loop._PredictionLoop"))


def _without_gradients(loop: EvaluationLoop, call: Callable[[Any], None]) -> None:
    # _no_grad_context is private in lightning 2.5.0 to 2.6.6.
    lightning_name(loop, "loops.utilities._no_grad_context")(call)(loop)
