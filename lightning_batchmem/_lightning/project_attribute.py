"""An attribute of a project: in its module, its datamodule, or hyperparameters and dicts of these."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_batchmem._lightning.trainer_state import datamodules_of


@dataclass(frozen=True)
class ProjectAttribute:
    """All places to which ``path`` leads, such as ``"batch_size"`` or ``"kwargs.batch_size"``.

    Without a dot they are those of Lightning's ``lightning_getattr`` and ``lightning_setattr``; the last one is read.
    """

    trainer: Trainer
    module: LightningModule
    path: str

    @property
    def exists(self) -> bool:
        return bool(self._holders(self._roots))

    @property
    def value(self) -> Any:
        """The value as the project has it now, of any type; ``None`` without one."""
        holders = self._holders(self._roots)
        return _get(holders[-1], self._name) if holders else None

    def set(self, value: Any, *, also_logged: bool = False) -> None:
        """Set the value everywhere, with ``also_logged`` in the copy of the hyperparameters that Lightning logs."""
        logged = [getattr(owner, "_hparams_initial", {}) for owner in self._owners] if also_logged else []
        for holder in self._holders([*self._roots, *logged]):  # `_hparams_initial` is private in 2.5.0 to 2.6.6
            if isinstance(holder, MutableMapping):
                holder[self._name] = value
            else:
                setattr(holder, self._name, value)

    def others_with(self, values: Collection[object]) -> list[str]:
        """Paths of other attributes and entries of dicts that have one of these whole numbers."""
        held = [entry for owner in self._owners for root in (vars(owner), owner.hparams) for entry in root.items()]
        held += [
            (f"{name}.{key}", one) for name, table in held if isinstance(table, Mapping) for key, one in table.items()
        ]
        names = dict.fromkeys(name for name, value in held if type(value) is int and value in values)
        return sorted((n for n in names if n[0] != "_" and n != self.path), key=lambda name: "batch" not in name)

    @property
    def _name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def _owners(self) -> list[Any]:
        return [self.module, *datamodules_of(self.trainer)]

    @property
    def _roots(self) -> list[Any]:
        return [root for owner in self._owners for root in (owner, owner.hparams)]

    def _holders(self, found: list[Any]) -> list[Any]:
        for part in self.path.split(".")[:-1]:
            found = [_get(one, part) for one in found if _has(one, part)]
        return [one for one in found if _has(one, self._name)]


def _has(holder: Any, name: str) -> bool:
    return name in holder if isinstance(holder, Mapping) else hasattr(holder, name)


def _get(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, Mapping) else getattr(holder, name)
