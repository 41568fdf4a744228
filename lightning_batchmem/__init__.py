"""Measure what fills the memory of a Lightning training step, and compute the batch size instead of guessing it."""

from lightning_batchmem.batch_finder import BatchFinder
from lightning_batchmem.memory_profiler import MemoryProfiler
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import Line, MemoryModel, TimeModel, Trial

__version__ = "0.1.0"

__all__ = ["BatchFinder", "Line", "MemoryModel", "MemoryProfiler", "Plan", "TimeModel", "Trial"]
