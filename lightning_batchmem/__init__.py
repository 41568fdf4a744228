"""Measure what fills the memory of a Lightning training step, and compute the batch size."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_batchmem._version import __version__

if TYPE_CHECKING:
    from lightning_batchmem.batch_finder import BatchFinder
    from lightning_batchmem.check import assert_memory
    from lightning_batchmem.comparison import Comparison, Variant, compare
    from lightning_batchmem.find import find_batch_size, find_batch_size_of_loop
    from lightning_batchmem.memory_profiler import MemoryProfiler
    from lightning_batchmem.plan.notes import Note
    from lightning_batchmem.plan.plan import Plan
    from lightning_batchmem.plan.records import Line, MemoryModel, Trial, TrialMemory
    from lightning_batchmem.search.search import NothingFitsError

__all__ = [
    "BatchFinder",
    "Comparison",
    "Line",
    "MemoryModel",
    "MemoryProfiler",
    "Note",
    "NothingFitsError",
    "Plan",
    "Trial",
    "TrialMemory",
    "Variant",
]
__all__ += ["__version__", "assert_memory", "compare", "find_batch_size", "find_batch_size_of_loop"]

_NAMES = {
    "batch_finder": ("BatchFinder",),
    "check": ("assert_memory",),
    "comparison": ("Comparison", "Variant", "compare"),
    "find": ("find_batch_size", "find_batch_size_of_loop"),
    "memory_profiler": ("MemoryProfiler",),
    "plan.notes": ("Note",),
    "plan.plan": ("Plan",),
    "plan.records": ("Line", "MemoryModel", "Trial", "TrialMemory"),
    "search.search": ("NothingFitsError",),
}


def __dir__() -> list[str]:
    """The public names too; none is imported before it is used."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a public name when it is used first.

    Every Trainer imports this package, because of the entry points in ``factory``.
    """
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    if name == "OomGuard":
        # `from lightning_batchmem import OomGuard` hides the text of an AttributeError.
        raise ImportError(
            "OomGuard has left lightning_batchmem: copy examples/oom_guard.py of its repository."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
