"""The state in which trials of a search begin where no training follows in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_batchmem._lightning.clean_start import CleanStart, ProjectSnapshot
from lightning_batchmem.state.snapshot import Restored, restored_parts


class KeptStart(CleanStart):
    """A trainer whose optimizers and engine, and the project, stay as the last step has left them.

    Its loops begin again with each trial, and callbacks and loggers are muted.
    """

    _has_started = False

    def restore_collate(self, loaders: Sequence[DataLoader[Any]]) -> None:
        """Restore nothing."""

    def start_training(self) -> None:
        """Keep the optimizers, because an engine cannot be made again, and call the hooks once.

        Hooks that wrap a layer or register something would do so again and again.
        """
        if not self._has_started:
            self._has_started = True
            self._call_first_hooks()

    def _record_muted(self, snapshot: ProjectSnapshot) -> Restored:
        return restored_parts([])

    def _clear_optimizers(self) -> None:
        """Keep their states."""
