"""The state in which trials of a search begin where no training follows in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_batchmem._lightning.clean_start import CleanStart, ProjectSnapshot, project_snapshot
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.state.snapshot import Restored, restored_parts


class AttributesOnly(ProjectSnapshot):
    """A snapshot of attributes for requests of loaders, without the bytes of tensors."""

    _keeps_tensors = False

    @property
    def not_restorable(self) -> list[str]:
        """Nothing, because no step runs."""
        return []


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


def found_before_steps(
    setting: BatchSizeSetting,
    device_memory: DeviceMemory,
    find: Callable[[CleanStart], BatchSizeSetting],
) -> BatchSizeSetting:
    """The setting at the place that is found, before any step, with attributes restored.

    Args:
        setting: the setting at the place that the options name.
        device_memory: the memory of the device.
        find: finds the place in a state.
    """
    snapshot = project_snapshot(setting.trainer, AttributesOnly)
    # The path may lead through a class, which is not restored.
    snapshot.add(setting.place.restorer())
    start = KeptStart(setting.trainer, device_memory, snapshot)
    with start.entered():
        return find(start)
