"""Both callbacks for projects that import ``pytorch_lightning`` instead of ``lightning.pytorch``.

Example:
    >>> from pytorch_lightning import Trainer
    >>> from lightning_batchmem.pytorch_lightning import BatchFinder
    >>> trainer = Trainer(callbacks=[BatchFinder(memory_limit=0.9)], logger=False, enable_checkpointing=False)
"""

from __future__ import annotations

from pytorch_lightning import Callback

from lightning_batchmem import batch_finder, memory_profiler
from lightning_batchmem._lightning import hooks

__all__ = ["BatchFinder", "MemoryProfiler"]


class BatchFinder(batch_finder.BatchFinder, Callback):  # type: ignore[misc]  # two classes of the same code
    """:class:`lightning_batchmem.BatchFinder` for a Trainer of ``pytorch_lightning``."""


class MemoryProfiler(memory_profiler.MemoryProfiler, Callback):  # type: ignore[misc]  # as above
    """:class:`lightning_batchmem.MemoryProfiler` for a Trainer of ``pytorch_lightning``."""


class CallbackAdder(hooks.CallbackAdder, Callback):  # type: ignore[misc]  # as above
    """:class:`lightning_batchmem._lightning.hooks.CallbackAdder` for a Trainer of ``pytorch_lightning``."""
