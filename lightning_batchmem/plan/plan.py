"""The plan: the size that was chosen, what bounds it, and everything it was computed from.

Plain data in bytes, seconds and samples. Nothing imports torch or Lightning.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from lightning_batchmem.plan.records import LimitedBy, Line, MemoryModel, TimeModel, Trial, mib


@dataclass(frozen=True)
class Plan:
    """The size that was chosen, what bounds it, and everything it was computed from.

    Args:
        batch_size: the chosen size, in samples for each rank.
        limited_by: what kept it from being larger.
        verified: whether at least two full steps at this very size were run.
        limit_bytes: what this process may hold.
        predicted_peak_bytes: what the lines through the *smaller* sizes expect at ``batch_size``; ``None`` when fewer
            than two of them were run.
        upper_peak_bytes: the upper bound of the same prediction; ``None`` likewise.
        measured_peak_bytes: what the verifying steps held at their peak; ``None`` when no step had to be run.
        trials: every size that was run, in the order in which it was run.
        memory: the fitted memory lines; ``None`` when a single size was run.
        time: the fitted time line; ``None`` likewise.
        reason: one sentence: why this size.
        device: where it was measured, such as ``"NVIDIA H100 80GB HBM3"`` or ``"host"``.
        accumulate_grad_batches: batches to an optimizer step.
        effective_batch_size: samples to an optimizer step over all ranks; ``None`` for a plan of evaluation.
        learning_rate: what the module's learning rate was set to; ``None`` when it was left alone.
        learning_rate_before: what it was before that; ``None`` likewise.
        notes: what else a person should know, a sentence each.
        evaluation: the plan of validation's own size, where it has one.
        ranks: how many processes searched together; peaks are the highest of them, times the slowest's.
    """

    batch_size: int
    limited_by: LimitedBy
    verified: bool
    limit_bytes: int
    predicted_peak_bytes: int | None
    upper_peak_bytes: int | None
    measured_peak_bytes: int | None
    trials: tuple[Trial, ...]
    memory: MemoryModel | None
    time: TimeModel | None
    reason: str = ""
    device: str = ""
    accumulate_grad_batches: int = 1
    effective_batch_size: int | None = None
    learning_rate: float | None = None
    learning_rate_before: float | None = None
    notes: tuple[str, ...] = ()
    evaluation: Plan | None = None
    ranks: int = 1

    @property
    def margin_bytes(self) -> int | None:
        """What the prediction may be off by, in bytes: its upper bound less the line; ``None`` without a prediction."""
        if self.upper_peak_bytes is None or self.predicted_peak_bytes is None:
            return None
        return self.upper_peak_bytes - self.predicted_peak_bytes

    def __str__(self) -> str:
        rows = [("limit", mib(self.limit_bytes))]
        if self.predicted_peak_bytes is not None and self.margin_bytes is not None:
            rows.append(("predicted", f"{mib(self.predicted_peak_bytes)} from the smaller sizes"))
            rows.append(("margin", f"{mib(self.margin_bytes)} on top, for {self._margin_is_for()}"))
        if self.measured_peak_bytes is not None:
            on_ranks, workers = self._of_all_ranks(), self._of_it_workers()
            rows.append(("measured", f"{mib(self.measured_peak_bytes)} at its peak{on_ranks}{workers}"))
        if self.memory is not None:
            phase = self.memory.phase_at(self.batch_size)
            line = self.memory.lines[phase]
            rows.append(("memory", f"{mib(line.intercept)} + {mib(line.slope)} a sample ({phase.replace('_', ' ')})"))
        if self.time is not None:
            line = self.time.line
            rows.append(("time", f"{line.intercept * 1e3:.3g} ms + {line.slope * 1e3:.3g} ms a sample"))
        if self.trials:
            rows.append(("tried", ", ".join(str(trial.batch_size) for trial in self.trials)))
        if self.effective_batch_size is not None and (self.accumulate_grad_batches > 1 or self.ranks > 1):
            shared = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
            batches = "a batch" if self.accumulate_grad_batches == 1 else f"{self.accumulate_grad_batches} batches"
            rows.append(("step", f"{self.effective_batch_size} samples, in {batches}{shared}"))
        if self.learning_rate is not None and self.learning_rate != self.learning_rate_before:
            rows.append(("lr", f"{self.learning_rate:.6g} instead of {self.learning_rate_before:.6g}"))
        rows += [("why", self.reason)] if self.reason else []
        rows += [("note", note) for note in self.notes]
        verified = "verified by real steps" if self.verified else "not verified"
        on_each = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        head = f"batch size {self.batch_size}{on_each}, limited by {self.limited_by.replace('_', ' ')}, {verified}"
        text = "\n".join([head, *(f"  {name:<10}{text}" for name, text in rows)])
        return text if self.evaluation is None else f"{text}\nvalidation: {self.evaluation}"

    def _of_all_ranks(self) -> str:
        if self.ranks == 1 or self.measured_peak_bytes is None:
            return ""
        return f" on the rank that held most, at most {mib(self.ranks * self.measured_peak_bytes)} on all"

    def _of_it_workers(self) -> str:
        held = max((t.worker_bytes for t in self.trials if t.batch_size == self.batch_size), default=0)
        return f"; loader workers hold up to {mib(held)}" if held else ""

    def _margin_is_for(self) -> str:
        lines = self.memory.lines.values() if self.memory is not None else ()
        repeatability = max((line.repeatability for line in lines), default=0.0)
        text = "noise and residuals of the lines"
        if repeatability:
            text += f" and {repeatability:.0%} of the growth, by which the device differs from run to run"
        return text

    def to_json(self) -> str:
        """The plan as JSON; :meth:`from_json` makes an equal plan of it."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            ValueError: when ``text`` is not the JSON of a plan.
        """
        try:
            return cls._from_dict(json.loads(text))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"text must be the JSON of a Plan, got {text[:80]!r}") from error

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> Plan:
        memory, time, evaluation = data["memory"], data["time"], data["evaluation"]
        if memory is not None:
            lines = {phase: Line(**line) for phase, line in memory["lines"].items()}
            memory = MemoryModel(lines, memory["reserved_ratio"])
        if time is not None:
            time = TimeModel(Line(**time["line"]))
        if evaluation is not None:
            evaluation = cls._from_dict(evaluation)
        trials, notes = tuple(Trial(**trial) for trial in data["trials"]), tuple(data["notes"])
        made = {"memory": memory, "time": time, "evaluation": evaluation, "trials": trials, "notes": notes}
        return cls(**{**data, **made})
