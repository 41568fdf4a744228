"""Errors of a search: whether they are ours or the project's, and what is said about them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.devices.foreign_values import add_note, error_text, value_or_none
from lightning_batchmem.devices.out_of_memory import is_out_of_memory, release_traceback
from lightning_batchmem.plan.options import SearchOptions


def is_our_error(error: BaseException) -> bool:
    """Whether a line of this package raised the error, with a sentence for the user."""
    is_own = calls_after_ours(error) == 0
    return is_own and isinstance(error, ValueError | RuntimeError | ImportError)


def calls_after_ours(error: BaseException) -> int:
    """How many of the last calls in the traceback of an error are not in this package."""
    package = Path(__file__).parents[1]
    calls = reversed(traceback.extract_tb(error.__traceback__))
    are_ours = [Path(call.filename).is_relative_to(package) for call in calls]
    return [*are_ours, True].index(True)


def reason_of(error: Exception) -> str:
    """The text of an error, with the first note that the search has added."""
    text = str(error) if is_our_error(error) else error_text(error)
    notes: list[str] = value_or_none("An error", getattr, error, "__notes__", []) or []
    return " ".join([text, *notes[:1]])


@contextmanager
def noted_errors(
    batch_size: Callable[[], object], batches: Sequence[ProbeBatches] = ()
) -> Iterator[None]:
    """Add a note to errors of the project, which may occur only because a search is not a training.

    Args:
        batch_size: returns the size that is tried.
        batches: the batches of the search.
    """
    try:
        yield
    # A user's step may raise any error, which is raised again with the note.
    except Exception as error:
        # An error of this package says its reason itself, and other samples need as much memory.
        if not (is_our_error(error) or is_out_of_memory(error)):
            counts = [one.distinct_samples for one in batches if one.distinct_samples]
            if counts:
                add_note(
                    error,
                    "The batch had some samples more than once, because the search has only"
                    f" {min(counts):,} distinct ones for it. If the module needs distinct samples,"
                    f" pass max_batch_size={min(counts)}, or set the size by hand.",
                )
            add_note(
                error,
                "BatchFinder: this error occurred in the search before the training, at batch size"
                f" {batch_size()}. If the step needs more samples, pass min_batch_size, or"
                " drop_last=True for the last batch of an epoch; if it can take no more,"
                " max_batch_size; if it needs what another callback sets in on_fit_start or later,"
                " let the callback set it in setup.",
            )
        raise


def retry_text(error: Exception, setting: BatchSizeSetting, options: SearchOptions) -> str:
    """Why a search begins again at the project's own size, after an error below it.

    A step may divide its batch, or start a codebook with it, and need more than two samples.

    Returns:
        A note; empty where the search has to end with the error.
    """
    size = setting.size or 0
    project_size = setting.project_size or 0
    largest_size = min(bound for bound, _ in options.bounds)
    # Another rank may have passed this step.
    may_retry = setting.trainer.world_size == 1 and options.min_batch_size is None
    if is_our_error(error) or not (may_retry and size < project_size <= largest_size):
        return ""
    return (
        f"Sizes below {project_size}, your own, were left out: at {size} there was an error"
        f" ({release_traceback(error)})."
    )
