"""The callback that the entry points in ``factory`` return."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer


class CallbackAdder(Callback):
    """Add callbacks when a run starts, unless the Trainer has some of the same class.

    It has no state, because the Trainer refuses two callbacks with state of one class, before any
    hook runs.
    """

    def __init__(self, callbacks: list[Callback]) -> None:
        self._callbacks = callbacks

    @property
    def runs(self) -> str:
        """What a finder among them runs in this process, as in BatchFinder."""
        return next((one.runs for one in self._callbacks if hasattr(one, "runs")), "both")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Insert them after this one, so that their ``setup`` runs next."""
        # mypy does not see attributes that Lightning sets outside the class Trainer.
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if self.runs != "both" and any(getattr(one, "runs", "") == "both" for one in callbacks):
            raise ValueError(
                "LIGHTNING_BATCHMEM must have neither then=exit nor the word apply for a script"
                ' with its own BatchFinder: pass plan="plan.json" to it, and then="exit", or'
                " apply=True"
            )
        # Names are compared, because the classes for the two packages of Lightning differ.
        names = {kind.__name__ for callback in callbacks for kind in type(callback).__mro__}
        missing = [callback for callback in self._callbacks if type(callback).__name__ not in names]
        index = callbacks.index(self) + 1
        callbacks[index:index] = missing
