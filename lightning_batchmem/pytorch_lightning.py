"""The callbacks for projects that import ``pytorch_lightning`` instead of ``lightning.pytorch``.

Example:
    >>> from pytorch_lightning import Trainer
    >>> from lightning_batchmem.pytorch_lightning import BatchFinder
    >>> finder = BatchFinder(memory_limit=0.9)
    >>> trainer = Trainer(callbacks=[finder], logger=False, enable_checkpointing=False)
"""

from __future__ import annotations

from pytorch_lightning import Callback

# It says what to use instead of a name that is not here.
from lightning_batchmem import __getattr__ as __getattr__
from lightning_batchmem import batch_finder, callback_adder, memory_profiler

__all__ = ["BatchFinder", "MemoryProfiler"]


# mypy does not see that both classes ``Callback`` have the same code.
class BatchFinder(batch_finder.BatchFinder, Callback):  # type: ignore[misc]
    """:class:`lightning_batchmem.BatchFinder` for a Trainer of ``pytorch_lightning``."""


# mypy does not see that both classes ``Callback`` have the same code.
class MemoryProfiler(memory_profiler.MemoryProfiler, Callback):  # type: ignore[misc]
    """:class:`lightning_batchmem.MemoryProfiler` for a Trainer of ``pytorch_lightning``."""


# mypy does not see that both classes ``Callback`` have the same code.
class CallbackAdder(callback_adder.CallbackAdder, Callback):  # type: ignore[misc]
    """:class:`.callback_adder.CallbackAdder` for a Trainer of ``pytorch_lightning``."""
