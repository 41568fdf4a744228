"""Run the user's real validation, test or prediction step on a batch of our own, in Lightning's own loop.

Read in lightning 2.5.0 and 2.6.6: ``_EvaluationLoop._evaluation_step`` and ``_PredictionLoop._predict_step`` take a
batch, and do with it all that evaluation does: precision plugin, transfer hooks, batch hooks, the step, the logger
connector.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop  # private in 2.5.0 to 2.6.6
from lightning.pytorch.loops.prediction_loop import _PredictionLoop  # private in 2.5.0 to 2.6.6
from lightning.pytorch.loops.progress import _BatchProgress  # private in 2.5.0 to 2.6.6
from lightning.pytorch.loops.utilities import _no_grad_context  # private in 2.5.0 to 2.6.6
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader

EvaluationLoop = _EvaluationLoop | _PredictionLoop


class _NoSource:
    """Stands where the loop keeps its data fetcher; the batches come from elsewhere."""

    done = False

    def teardown(self) -> None:
        """Nothing to end."""


def validation_loop(trainer: Trainer) -> EvaluationLoop:
    """The loop that validates during ``fit``."""
    return trainer.fit_loop.epoch_loop.val_loop


def stage_loop(trainer: Trainer) -> EvaluationLoop:
    """The loop of ``trainer.validate``, ``trainer.test`` or ``trainer.predict``, whichever runs."""
    loops: dict[Any, EvaluationLoop] = {
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    return loops[trainer.state.fn]


def before_loaders(loop: EvaluationLoop, call: Callable[[], None]) -> Callable[[], object]:
    """Let ``call`` run when the loop is about to ask for its loaders: the weights are loaded by then, nothing has run.

    Returns:
        To be called when the loop ends before that: takes the call away.
    """
    original = loop.setup_data

    def take_away() -> object:
        return vars(loop).pop("setup_data", None)  # the class's own method is in force again

    def calling() -> None:
        take_away()
        call()
        original()

    vars(loop)["setup_data"] = calling
    return take_away


def begin_evaluation(trainer: Trainer, loop: EvaluationLoop, loaders: CombinedLoader, batches: float) -> None:
    """Bring trainer and module where they are before the first batch of an evaluation; hooks of the module run.

    Args:
        trainer: in a search.
        loop: of the stage.
        loaders: the stage's loaders, for the questions that are asked of them.
        batches: batches of each loader; ``inf`` when unknown.
    """
    if trainer.state.fn == TrainerFn.FITTING:
        trainer.validating = True
    loop._combined_loader = loaders
    loop._data_fetcher = _NoSource()  # type: ignore[assignment]
    loop.batch_progress = _BatchProgress()
    counts = [batches] * len(loaders.flattened)
    if isinstance(loop, _PredictionLoop):
        loop.max_batches = counts
        loop.epoch_batch_indices = [[] for _ in counts]
    else:
        loop._max_batches = counts
        loop._seen_batches_per_dataloader = defaultdict(int)
    _no_grad_context(lambda loop: loop.on_run_start())(loop)


def run_evaluation_step(loop: EvaluationLoop, make_batch: Callable[[], tuple[Any, int]]) -> None:
    """Run one step, without gradients, on the batch that ``make_batch`` returns with the index of its loader."""

    def step(loop: EvaluationLoop) -> None:
        batch, loader_index = make_batch()
        if isinstance(loop, _PredictionLoop):
            loop._predictions = [[] for _ in loop.max_batches]  # what a prediction keeps for its return value
            loop._predict_step(batch, 0, loader_index, None)
        else:
            loop._evaluation_step(batch, 0, loader_index, None)

    _no_grad_context(step)(loop)


def end_evaluation(trainer: Trainer, loop: EvaluationLoop) -> None:
    """Undo :func:`begin_evaluation`: the module's mode and the trainer's stage, whatever became of the steps."""
    if isinstance(loop, _PredictionLoop):
        loop._on_predict_model_train()
    else:
        loop._on_evaluation_model_train()
        loop._results.batch = None
        loop._results.batch_size = None
    loop._data_fetcher = None
    if trainer.state.fn == TrainerFn.FITTING:
        trainer.training = True
