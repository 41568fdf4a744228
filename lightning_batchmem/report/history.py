"""The steps of a run, however many, in a bounded number of rows: for the figures at its end."""

from __future__ import annotations

from lightning_batchmem.measure.step_record import StepRecord
from lightning_batchmem.report.step_csv import Row

MOST_ROWS = 2000
"""How many rows are kept at most; a figure is 640 pixels wide."""


class History:
    """Rows in the order of their steps; what becomes too many is halved.

    Each row is then the highest of two, four, eight ... neighbouring steps of its stage, under the number of the first.

    Args:
        has_peak: ``False`` where the bytes are only the highest seen at the marks of a step.
    """

    def __init__(self, *, has_peak: bool = True) -> None:
        self.rows: list[Row] = []
        self._has_peak = has_peak
        self._steps_per_row = 1
        self._open: dict[str, tuple[int, int]] = {}  # stage -> index of its last row, and how many steps are in it

    def add(self, step: StepRecord) -> None:
        """Keep a step."""
        index, steps = self._open.get(step.stage, (0, self._steps_per_row))
        if steps < self._steps_per_row:
            self._open[step.stage] = (index, steps + 1)
            if not _is_covered(step, self.rows[index]):
                self.rows[index] = _highest(self.rows[index], self._row(step))
            return
        self.rows.append(self._row(step))
        self._open[step.stage] = (len(self.rows) - 1, 1)
        if len(self.rows) > MOST_ROWS:
            self._halve()

    def _row(self, step: StepRecord) -> Row:
        return Row(
            step=step.number,
            stage=step.stage,
            batch_size=step.batch_size,
            peak_bytes=step.peaks.peak_bytes if step.peaks.phase_peak_bytes else None,
            peak_reserved_bytes=step.peaks.peak_reserved_bytes,
            limit_bytes=step.limit_bytes,
            samples_per_second=None,
            step_seconds=None,
            phase_peak_bytes=step.peaks.phase_peak_bytes,
            has_peak=self._has_peak,
        )

    def _halve(self) -> None:
        """Make one row of every two neighbours of a stage; the first of them keeps its place."""
        halved: list[Row] = []
        waiting: dict[str, int] = {}  # stage -> index of a row that has no neighbour yet
        for row in self.rows:
            if (index := waiting.pop(row.stage, None)) is not None:
                halved[index] = _highest(halved[index], row)
            else:
                waiting[row.stage] = len(halved)
                halved.append(row)
        # a row that found no neighbour is the last of its stage, and takes in what comes next; a full pair does not
        self._open = {stage: (index, self._open[stage][1]) for stage, index in waiting.items()}
        self.rows, self._steps_per_row = halved, 2 * self._steps_per_row


def _is_covered(step: StepRecord, row: Row) -> bool:
    """Whether nothing of a step is higher than its row, which is so for most steps of a long run."""
    phases = row.phase_peak_bytes
    return (
        (step.limit_bytes is None or row.limit_bytes is not None)
        and all(peak_bytes <= phases.get(phase, -1) for phase, peak_bytes in step.peaks.phase_peak_bytes.items())
        and (
            step.peaks.peak_reserved_bytes is None or step.peaks.peak_reserved_bytes <= (row.peak_reserved_bytes or -1)
        )
    )


def _highest(one: Row, other: Row) -> Row:
    phases = dict(one.phase_peak_bytes)
    for phase, peak_bytes in other.phase_peak_bytes.items():
        phases[phase] = max(peak_bytes, phases.get(phase, peak_bytes))
    return one._replace(
        peak_bytes=_larger(one.peak_bytes, other.peak_bytes),
        peak_reserved_bytes=_larger(one.peak_reserved_bytes, other.peak_reserved_bytes),
        limit_bytes=other.limit_bytes if one.limit_bytes is None else one.limit_bytes,
        phase_peak_bytes=phases,
    )


def _larger(one: int | None, other: int | None) -> int | None:
    known = [count for count in (one, other) if count is not None]
    return max(known, default=None)
