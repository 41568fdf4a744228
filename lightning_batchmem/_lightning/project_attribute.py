"""An attribute of a project: in its module, datamodule, or hyperparameters and dicts of these."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.parsing import AttributeDict

from lightning_batchmem._lightning.trainer_state import datamodules_of


@dataclass(frozen=True)
class ProjectAttribute:
    """All places to which ``path`` leads, such as ``"batch_size"`` or ``"kwargs.batch_size"``.

    Without a dot they are those of Lightning's ``lightning_getattr`` and ``lightning_setattr``; the
    last one is read. Where ``owners`` are given, the path leads from these objects only.
    """

    trainer: Trainer
    module: LightningModule
    path: str
    owners: tuple[Any, ...] | None = None

    @property
    def exists(self) -> bool:
        return bool(self._holders(self.roots))

    @property
    def value(self) -> Any:
        """The value as the project has it now, of any type; ``None`` without one."""
        holders = self._holders(self.roots)
        return _get(holders[-1], self._name) if holders else None

    def set(self, value: Any) -> None:
        """Set the value everywhere, but not in the hyperparameters that Lightning logs."""
        for holder in self._holders(self.roots):
            _set(holder, self._name, value)

    def set_logged(self, value: Any) -> None:
        """Set the value in the copy of the hyperparameters that Lightning logs."""
        for holder in self._holders(self._logged):
            _set(holder, self._name, value)

    def without(self, params: Any) -> dict[str, Any]:
        """Hyperparameters without the one that leads to the value."""
        items = vars(params) if isinstance(params, Namespace) else dict(params or {})
        return {name: one for name, one in items.items() if name not in self.path.split(".")}

    def drop_logged(self) -> None:
        """Let Lightning no longer log the hyperparameter that leads to the value."""
        for owner in self._owners:
            if logged := _or_empty(owner, "_hparams_initial"):
                owner._hparams_initial = AttributeDict(self.without(logged))

    def keep(self) -> Callable[[], None]:
        """Record the value of each place; returns a function that restores them."""
        undo = ExitStack()
        for holder in self._holders(self.roots + self._logged):
            undo.callback(_set, holder, self._name, _get(holder, self._name))
        return undo.close

    @property
    def _name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def _owners(self) -> list[Any]:
        if self.owners is not None:
            return list(self.owners)
        return [self.module, *datamodules_of(self.trainer)]

    @property
    def roots(self) -> list[Any]:
        """The objects and dicts from which the path leads."""
        return [root for owner in self._owners for root in (owner, _or_empty(owner, "hparams"))]

    @property
    def _logged(self) -> list[Any]:
        # _hparams_initial is private in lightning 2.5.0 to 2.6.6.
        return [_or_empty(owner, "_hparams_initial") for owner in self._owners]

    def _holders(self, holders: list[Any]) -> list[Any]:
        """The objects or dicts at the end of the path from these, which have the value."""
        for part in self.path.split(".")[:-1]:
            holders = [_get(holder, part) for holder in holders if _has(holder, part)]
        return [holder for holder in holders if _has(holder, self._name)]


def _or_empty(owner: Any, name: str) -> Any:
    return _get(owner, name) if _has(owner, name) else {}


def _has(holder: Any, name: str) -> bool:
    # A property of the user may raise any exception.
    try:
        return name in holder if isinstance(holder, Mapping) else hasattr(holder, name)
    except Exception:  # noqa: BLE001
        return False


def _get(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, Mapping) else getattr(holder, name)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, MutableMapping):
        holder[name] = value
    else:
        setattr(holder, name, value)
