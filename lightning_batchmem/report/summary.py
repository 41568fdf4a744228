"""The summary of a run as data, for the table, the figures and a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_batchmem.measure.breakdown import MemoryBreakdown

SUMMARY_NAME = "memory_summary.json"


def summary_name(stage: str) -> str:
    """Return the file name of a training's summary, or of an evaluation's, such as ``memory_summary_test.json``."""
    return SUMMARY_NAME if stage == "train" else SUMMARY_NAME.replace(".json", f"_{stage}.json")


@dataclass(frozen=True)
class Summary:
    """Memory and time of the steps of one stage in one call of ``fit``, ``validate``, ``test`` or ``predict``.

    Args:
        device: ``"cuda"`` or ``"host"``; the device type if its memory cannot be measured.
        steps: number of steps.
        peak_bytes: highest allocated bytes in a step (host: resident set); None if memory cannot be measured.
        peak_step: the step of this peak, as in ``memory_per_batch.csv``.
        batch_size: samples of that step, on this rank; None if its batch does not show it.
        phase_peak_bytes: phase -> highest allocated bytes in it, over all steps.
        peak_reserved_bytes: highest reserved bytes; None if the device reserves none.
        limit_bytes: bytes that this process may hold, at the last reading: the limit of the device, or of a
            BatchFinder's plan.
        breakdown: parts of the memory at the highest peak of the steady state, which begins with the first step after
            an optimizer step (in an evaluation: with the second step); None if the run ended before.
        samples_per_second: samples of all ranks per second of wall time; None if no batch shows its size.
        step_seconds: mean time of a step.
        data_wait_share: share of wall time before the batch arrived, 0 to 1; None if unknown.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        items_per_second: items of all ranks per second, as ``items_fn`` counts them; None without it.
        outside_bytes: bytes on the device outside this process's allocator when the breakdown was taken: contexts,
            NCCL, other processes; None if unknown.
        predicted_bytes: prediction of a BatchFinder's plan at ``batch_size``; None without a plan.
        alerts: the alerts of the run, in their order.
        rank_peaks_bytes: highest peak of each rank, in rank order; empty for one rank.
        validation: the validation inside this ``fit``; None if there was none.
    """

    device: str
    steps: int
    peak_bytes: int | None
    peak_step: int
    batch_size: int | None
    phase_peak_bytes: dict[str, int]
    peak_reserved_bytes: int | None
    limit_bytes: int | None
    breakdown: MemoryBreakdown | None
    samples_per_second: float | None
    step_seconds: float
    data_wait_share: float | None
    stage: str = "train"
    items_per_second: float | None = None
    outside_bytes: int | None = None
    predicted_bytes: int | None = None
    alerts: tuple[str, ...] = ()
    rank_peaks_bytes: tuple[int, ...] = ()
    validation: Summary | None = None

    @property
    def cached_bytes(self) -> int | None:
        """Reserved bytes beyond the highest allocated bytes; None if the device reserves none."""
        if self.peak_reserved_bytes is None or self.peak_bytes is None:
            return None
        return max(0, self.peak_reserved_bytes - self.peak_bytes)

    def to_json(self) -> str:
        """Return the summary as JSON, for :meth:`from_json`."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Summary:
        """Read the JSON of :meth:`to_json`; unknown keys are ignored.

        Raises:
            ValueError: if ``text`` is not the JSON of a summary.
        """
        try:
            return cls._from_dict(json.loads(text))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"text must be the JSON of a Summary, got {text[:80]!r}") from error

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> Summary:
        known = {one.name: data[one.name] for one in fields(cls) if one.name in data}
        known["breakdown"] = data["breakdown"] and MemoryBreakdown(**data["breakdown"])
        known["validation"] = data["validation"] and cls._from_dict(data["validation"])
        known |= {name: tuple(data[name]) for name in ("alerts", "rank_peaks_bytes")}
        return cls(**known)
