"""State outside the trainer: recorded before the search, restored in place afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_batchmem._lightning.packages import in_every_package
from lightning_batchmem.batches.loaders import state_of
from lightning_batchmem.state.recorded_objects import RecordedObjects


class RecordedState(RecordedObjects):
    """Everything outside the trainer that a search may change, recorded once and restored in place.

    Configuring the optimizers twice may change it too, so it is recorded before the first time.

    Args:
        module: the module.
        loaders: loaders that the project has made already.
        others: other objects of the project, such as its datamodule.
    """

    def __init__(
        self,
        module: LightningModule,
        loaders: Sequence[DataLoader[Any]] = (),
        others: Iterable[object] = (),
    ) -> None:
        self.loaders = loaders
        not_walked = in_every_package(
            "trainer.Trainer", "callbacks.Callback", "loggers.Logger", "core.LightningDataModule"
        )
        super().__init__([module], [state_of(loaders), *others], not_walked=not_walked)

    def restore(self) -> None:
        """Restore everything, and warn of what could not be restored."""
        if failed := self.write_back():
            rank_zero_warn(f"BatchFinder could not restore: {'; '.join(failed)}")
