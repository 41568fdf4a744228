"""Validation in a search for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import CombinedLoader

from lightning_batchmem._lightning.data_source import validation_loop
from lightning_batchmem.apply.batch_size import BatchSizeSetting
from lightning_batchmem.apply.loaders import LoaderInfo
from lightning_batchmem.measure.trial import with_evaluation
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import SearchFailed, SearchLimits, Trial

if TYPE_CHECKING:
    from lightning_batchmem.search import BatchSizeSearch


class Validation:
    """Validation beside training: a phase of every size, or the same at every size, or a search of its own.

    Args:
        search: that of the training.
        setting: where the size of validation lives.
        first: the first size, for loaders that follow it.
        own: whether validation has a size of its own to be found.
    """

    def __init__(self, search: BatchSizeSearch, setting: BatchSizeSetting, first: int, *, own: bool) -> None:
        self._search = search
        self._setting = setting
        self._own = own
        self._first = first
        self._loaders = setting.loaders_for(first, may_be_fixed=not own)
        self._steps = search.evaluation_steps(self._loaders, validation_loop(setting.trainer))
        self._last: Trial | None = None

    @property
    def combined(self) -> CombinedLoader:
        """The validation loaders, as Lightning combines them."""
        return self._loaders.combined

    @property
    def batches(self) -> list[float]:
        """Batches of each of them, at the first size."""
        return [one.batches(self._first) for one in self._loaders.sized]

    @property
    def sized(self) -> Sequence[LoaderInfo]:
        """The validation loaders."""
        return self._loaders.sized

    def beside(self, trial: Trial, search_limits: SearchLimits) -> Trial:
        """The training trial with validation as a phase, as it is at that batch size."""
        if self._own or trial.outcome != "ok":
            return trial
        if self._last is None or self._loaders.follows:
            warmup_steps = 0 if self._last else 1
            self._last = self._search.measure(self._steps, trial.batch_size, search_limits, warmup_steps, 1)
        return with_evaluation(trial, self._last)

    def completed(self, plan: Plan) -> Plan | SearchFailed:
        """The plan with that of validation's own size, where it has one."""
        if not self._own:
            return replace(plan, notes=(*plan.notes, *self._steps.growth_notes(plan.batch_size)))
        own = self._search.over(self._setting, self._loaders, self._steps)
        if isinstance(own, SearchFailed):
            return replace(own, reason=f"validation: {own.reason}")
        return replace(plan, evaluation=own)
