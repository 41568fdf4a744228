"""What a plan says of the training steps of one process. Pure."""

from __future__ import annotations

import statistics

from lightning_batchmem.plan.plan import Plan


class Expected:
    """What a plan says of the training steps of this process, in allocated bytes.

    Nothing is said beyond 1.5 times the largest size that was run.
    """

    def __init__(self, plan: Plan) -> None:
        workers = {trial.batch_size: trial.worker_bytes for trial in plan.trials if trial.outcome == "ok"}
        self._lines = {} if plan.memory is None else plan.memory.lines
        self._most_samples = 1.5 * max(workers, default=0)
        # On the host the peaks of a plan have in them what its loader workers hold, which is in other processes.
        self._worker_line = (0.0, 0.0)
        if plan.device == "host" and len(workers) > 1:
            self._worker_line = statistics.linear_regression(list(workers), list(workers.values()))

    def bytes_at(self, batch_size: int | None) -> int | None:
        """The peak that is expected; ``None`` where nothing is."""
        lines = [line for phase, line in self._lines.items() if phase != "evaluation"]
        if batch_size is None or batch_size > self._most_samples or not lines:
            return None
        return round(max(line.at(batch_size) for line in lines) - self._worker_bytes(batch_size))

    def upper_bytes(self, batch_size: int | None) -> float | None:
        """What the peak should not exceed; ``None`` where nothing is expected.

        A line is fitted to the largest sizes and may lie too low under smaller ones, where its value at the first of
        them is still a bound, as memory never falls in the batch. Evaluation counts: a heap keeps what that has freed.
        """
        if batch_size is None or batch_size > self._most_samples or not self._lines:
            return None
        sizes = [(line, max(batch_size, line.first_batch_size)) for line in self._lines.values()]
        return 1.3 * max(line.at(size) for line, size in sizes)

    def _worker_bytes(self, batch_size: int) -> float:
        slope, intercept = self._worker_line
        return max(0.0, intercept + slope * batch_size)
