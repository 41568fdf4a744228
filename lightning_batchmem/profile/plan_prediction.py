"""The peak of a training step according to a BatchFinder's plan."""

from __future__ import annotations

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MemoryModel


class PlanPrediction:
    """Predicts the peak of a training step.

    Args:
        plan: the plan; None to predict nothing.
        is_host: whether the peaks to compare are those of the resident set. The lines of the plan
            are live bytes, and the resident set is larger. It is compared with what the search held
            at this size.
    """

    def __init__(self, plan: Plan | None, *, is_host: bool) -> None:
        self._held_bytes: dict[int, int] | None = None
        self._lines: MemoryModel | None = None
        self._largest_size = 0
        if plan is None:
            return
        completed = [trial for trial in plan.trials if trial.outcome == "ok"]
        lines = {} if plan.memory is None else dict(plan.memory.lines)
        lines.pop("evaluation", None)
        if is_host:
            self._held_bytes = {trial.batch_size: trial.held_bytes for trial in completed}
        elif lines:
            self._lines = MemoryModel(lines)
            self._largest_size = max((trial.batch_size for trial in completed), default=0)

    def bytes_at(self, batch_size: int | None) -> int | None:
        """Return the peak that the plan expects; None if the plan does not reach this size."""
        if batch_size is None:
            return None
        if self._held_bytes is not None:
            return self._held_bytes.get(batch_size)
        if self._lines is None or batch_size > 1.5 * self._largest_size:
            return None
        return round(self._lines.predict_bytes(batch_size))
