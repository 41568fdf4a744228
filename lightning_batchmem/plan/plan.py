"""The plan: the batch size that was chosen, what limits it, and everything it was computed from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_batchmem.plan.json_fields import from_json
from lightning_batchmem.plan.records import (
    LimitedBy,
    MemoryModel,
    TimeModel,
    Trial,
    mib,
)

_HEADINGS = ("run", "result", "size", "live MiB", "line MiB", "held MiB", "ms", "samples/s")
_ROW = "  {:<9} {:<10} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9}"
_OUTCOMES = {
    "ok": "ok",
    "out_of_memory": "no memory",
    "over_limit": "over limit",
    "allocator_retry": "retries",
}


@dataclass(frozen=True)
class Plan:
    """The batch size that was chosen, what limits it, and everything it was computed from.

    Args:
        batch_size: the chosen size, in samples for each rank.
        limited_by: what kept it from being larger.
        verified: whether a rehearsal passed at exactly this size: real steps from the state in
            which training starts.
        limit_bytes: what this process may hold.
        predicted_peak_bytes: live bytes that the lines through the *smaller* sizes predict at
            ``batch_size``; ``None`` when fewer than two of them were run.
        measured_peak_bytes: live bytes at the peak of the rehearsal; ``None`` when no step had to
            be run.
        trials: every size that was run, in the order in which it was run.
        memory: the fitted memory lines; ``None`` when a single size was run.
        time: the fitted time line; ``None`` likewise.
        reason: one sentence: why this size.
        device: where it was measured, such as ``"NVIDIA H100 80GB HBM3"`` or ``"host"``.
        accumulate_grad_batches: batches to an optimizer step.
        effective_batch_size: samples to an optimizer step over all ranks; ``None`` for a plan of
            evaluation.
        learning_rate: the module's new learning rate; ``None`` when it was left alone.
        learning_rate_before: the learning rate before that; ``None`` likewise.
        notes: remarks on the search and the training, a sentence each.
        evaluation: the plan of validation's own size, if it has one.
        ranks: how many processes searched together; peaks are the highest of them, times the
            slowest's.
        held_peak_bytes: what the rehearsal took from the device: reserved bytes (CUDA) or the
            resident set without files that were mapped since (host); ``None`` when it is not known.
        conditions: what has to match before ``BatchFinder(plan=...)`` uses the plan again: its
            options, ranks, precision and parameters; ``None`` for a plan of an evaluation, and of
            version 0.1.0.
    """

    batch_size: int
    limited_by: LimitedBy
    verified: bool
    limit_bytes: int
    predicted_peak_bytes: int | None
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
    held_peak_bytes: int | None = None
    conditions: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        table = [_HEADINGS, *map(self._cells, self.trials)] if self.trials else []
        rows = [f"  {name:<10}{value}" for name, value in self._rows()]
        rows += [_ROW.format(*row).rstrip() for row in table]
        text = "\n".join([self._head(), *rows])
        return text if self.evaluation is None else f"{text}\nvalidation: {self.evaluation}"

    def short_text(self) -> str:
        """The plan in at most six lines.

        The reason, the fitted lines, the trials and all notes but the first are left out.
        """
        # Of several notes the dictionary keeps the first, because the last of equal keys counts.
        rows = dict(reversed(self._rows()))
        memory = "; ".join(
            f"{name} {rows[name]}" for name in ("limit", "predicted", "measured") if name in rows
        )
        shown = {"memory": memory}
        shown |= {name: rows[name] for name in ("speed", "step", "note") if name in rows}
        shown["details"] = (
            "print(finder.plan) or BatchFinder(verbose=True): reasons, all sizes, all notes"
        )
        lines = [f"  {name:<10}{text}" for name, text in shown.items()]
        return "\n".join([f"BatchFinder: {self._head()}", *lines])

    @property
    def _each_rank(self) -> str:
        return f" on each of {self.ranks} ranks" if self.ranks > 1 else ""

    def _head(self) -> str:
        validation = ""
        if self.evaluation is not None:
            validation = f" (validation {self.evaluation.batch_size})"
        verified = "verified by a rehearsal" if self.verified else "not verified"
        limited_by = self.limited_by.replace("_", " ")
        return (
            f"batch size {self.batch_size}{validation}{self._each_rank},"
            f" limited by {limited_by}, {verified}"
        )

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("limit", mib(self.limit_bytes))]
        if self.predicted_peak_bytes is not None:
            rows.append(("predicted", mib(self.predicted_peak_bytes)))
        if self.measured_peak_bytes is not None:
            held = ""
            if self.held_peak_bytes is not None:
                held = f", {mib(self.held_peak_bytes)} taken from the device"
            total_bytes = self.ranks * max(self.held_peak_bytes or 0, self.measured_peak_bytes)
            total = f"; at most {mib(total_bytes)} on all ranks" if self.ranks > 1 else ""
            rows.append(("measured", f"{mib(self.measured_peak_bytes)}{held}{total}"))
        if self.memory is not None:
            phase = self.memory.phase_at(self.batch_size)
            line = self.memory.lines[phase]
            text = f"{mib(line.intercept)} + {mib(line.slope)} a sample"
            rows.append(("memory", f"{text} ({phase.replace('_', ' ')})"))
        if self.time is not None:
            line = self.time.line
            text = f"{line.intercept * 1e3:.3g} ms + {line.slope * 1e3:.3g} ms a sample"
            rows.append(("time", text))
        same_size = [trial for trial in self.trials if trial.batch_size == self.batch_size]
        timed = [trial for trial in same_size if trial.step_seconds]
        if timed:
            rows.append(("speed", f"{self._cells(timed[-1])[-1]} samples/s"))
        changes = []
        is_divided = self.accumulate_grad_batches > 1 or self.ranks > 1
        if self.effective_batch_size is not None and is_divided:
            batches = f"{self.accumulate_grad_batches} batches"
            if self.accumulate_grad_batches == 1:
                batches = "a batch"
            changes.append(f"{self.effective_batch_size} samples, in {batches}{self._each_rank}")
        if self.learning_rate is not None and self.learning_rate != self.learning_rate_before:
            changes.append(
                f"learning rate {self.learning_rate:.6g} instead of {self.learning_rate_before:.6g}"
            )
        if changes:
            rows.append(("step", "; ".join(changes)))
        if self.reason:
            rows.append(("why", self.reason))
        return rows + [("note", note) for note in self.notes]

    def _cells(self, trial: Trial) -> tuple[str, ...]:
        """What was measured at one size, and the value of the line there."""
        line_bytes = None if self.memory is None else self.memory.predict_bytes(trial.batch_size)
        readings = (trial.peak_bytes or None, line_bytes, trial.peak_held_bytes)
        memory = [
            "" if count_bytes is None else mib(count_bytes).removesuffix(" MiB")
            for count_bytes in readings
        ]
        seconds = trial.step_seconds
        samples = self.ranks * trial.batch_size
        times = [f"{seconds * 1e3:,.1f}", f"{samples / seconds:,.0f}"] if seconds else ["", ""]
        return (trial.kind, _OUTCOMES[trial.outcome], str(trial.batch_size), *memory, *times)

    def to_json(self) -> str:
        """The plan as JSON; :meth:`from_json` makes an equal plan of it."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote, also in version 0.1.0.

        Fields that are no longer known are left out.

        Raises:
            ValueError: when ``text`` is not the JSON of a plan.
        """
        return from_json(cls, text)
