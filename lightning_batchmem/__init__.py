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
    "__version__",
    "assert_memory",
    "compare",
    "find_batch_size",
    "find_batch_size_of_loop",
]

_MODULES = {
    "BatchFinder": "batch_finder",
    "Comparison": "comparison",
    "Line": "plan.records",
    "MemoryModel": "plan.records",
    "MemoryProfiler": "memory_profiler",
    "Note": "plan.notes",
    "NothingFitsError": "search.search",
    "Plan": "plan.plan",
    "Trial": "plan.records",
    "TrialMemory": "plan.records",
    "Variant": "comparison",
    "assert_memory": "check",
    "compare": "comparison",
    "find_batch_size": "find",
    "find_batch_size_of_loop": "find",
}

# What to use instead of Lightning's names, and of one that has left.
_INSTEAD = {
    "BatchSizeFinder": "use BatchFinder (docs/coming-from-batch-size-finder.md has its arguments)",
    "OomGuard": "copy examples/oom_guard.py of its repository",
    "Tuner": "call find_batch_size(trainer, model), or add a BatchFinder to the callbacks",
}


def __dir__() -> list[str]:
    """The public names too; none is imported before it is used."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a public name when it is used first.

    Every Trainer imports this package, because of the entry points in ``factory``.
    """
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name in _INSTEAD:
        # `from lightning_batchmem import OomGuard` hides the text of an AttributeError.
        raise ImportError(f"lightning_batchmem has no {name}: {_INSTEAD[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
