"""Names of both packages of Lightning, errors of this one, and the newest torch that was tested."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.devices.foreign_values import add_note, error_text, value_or_none

# The files with private names of torch state these versions too.
NEWEST_TESTED_TORCH = (2, 14)

_UNIFIED = "lightning.pytorch"
_STANDALONE = "pytorch_lightning"


def is_own_error(error: BaseException) -> bool:
    """Whether this package raised the error, with a sentence for the user."""
    origin = traceback.extract_tb(error.__traceback__)[-1].filename
    is_own = Path(origin).is_relative_to(Path(__file__).parents[1])
    return is_own and isinstance(error, ValueError | RuntimeError | ImportError)


def end_of_tuning(trainer: object) -> BaseException:
    """An exception that ends ``fit`` without an error, as after a tuner."""
    # _TunerExitException is private in lightning 2.5.0 to 2.6.6.
    exception: BaseException = lightning_name(trainer, "utilities.exceptions._TunerExitException")()
    return exception


def lightning_name(owner: object, path: str) -> Any:
    """The object at ``path``, such as ``"loops.loop._Loop"``, in the package of ``owner``.

    The owner is a trainer or a loop, and its class decides which Lightning package is used.
    """
    kinds = type(owner).__mro__
    is_standalone = any(kind.__module__.startswith(f"{_STANDALONE}.") for kind in kinds)
    package = _STANDALONE if is_standalone else _UNIFIED
    return resolve_name(f"{package}.{path}")


def in_every_package(*paths: str) -> tuple[Any, ...]:
    """``paths`` in each of the packages that is imported."""
    packages = [package for package in (_UNIFIED, _STANDALONE) if package in sys.modules]
    return tuple(resolve_name(f"{package}.{path}") for package in packages for path in paths)


@functools.cache
def warn_of_untested_torch(torch_version: str = torch.__version__) -> None:
    """Warn once if torch is newer than every version that the package was run with."""
    major, minor = torch_version.split(".")[:2]
    if (int(major), int(minor)) > NEWEST_TESTED_TORCH:
        newest = ".".join(map(str, NEWEST_TESTED_TORCH))
        rank_zero_warn(
            f"torch {torch_version} is newer than {newest}, the newest that lightning-batchmem was"
            " tested with. If it fails, use an older torch or a newer lightning-batchmem."
        )


def reason_of(error: Exception) -> str:
    """The text of an error, with the first note that the search has added."""
    text = str(error) if is_own_error(error) else error_text(error)
    notes: list[str] = value_or_none("An error", getattr, error, "__notes__", []) or []
    return " ".join([text, *notes[:1]])


@contextmanager
def noted_errors(
    batch_size: Callable[[], object], batches: Sequence[ProbeBatches] = ()
) -> Iterator[None]:
    """Add a note to errors, whose reason may be that a search is no training.

    Args:
        batch_size: returns the size that is tried.
        batches: those of the search.
    """
    try:
        yield
    # A user's step may raise any error, which is raised again with the note.
    except Exception as error:
        # An error of this package has its reason in its own sentence.
        if not is_own_error(error):
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
                " drop_last=True if the last batch of an epoch is too small; if it needs"
                " what another callback sets in on_fit_start or later, let the callback set it in"
                " setup.",
            )
        raise
