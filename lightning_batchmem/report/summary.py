"""What a run used, as data: for the table, the figures, and a file from which both can be made again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from lightning_batchmem.measure.breakdown import MemoryBreakdown
from lightning_batchmem.measure.estimate import Estimate

SUMMARY_NAME = "memory_summary.json"


def summary_name(stage: str) -> str:
    """The file of a summary: of a training, or of an evaluation by itself, such as ``memory_summary_test.json``."""
    return SUMMARY_NAME if stage == "train" else SUMMARY_NAME.replace(".json", f"_{stage}.json")


@dataclass(frozen=True)
class Summary:
    """What the steps of one stage used in one call of ``fit``, ``validate``, ``test`` or ``predict``.

    Args:
        device: the kind of device, as its meter is named: ``"cuda"``, ``"host"`` or ``"mps"``.
        steps: steps that were measured.
        peak_bytes: highest allocated bytes inside a step (host: resident set).
        peak_step: the step it was seen in, as in ``memory_per_batch.csv``.
        batch_size: samples of that step, on this rank; ``None`` when its batch did not tell.
        phase_peak_bytes: phase -> highest allocated bytes while it ran, over all steps.
        peak_reserved_bytes: highest reserved bytes; ``None`` where nothing is reserved.
        limit_bytes: what this process might hold when it was last asked: what the device can give, or the limit of a
            BatchFinder's plan.
        parts: what the memory is made of at the highest peak of the steady state, that is from the first step after
            an optimizer step on (in an evaluation: from its second step on); ``None`` when the run ended before.
            Parameters, gradients, optimizer state, batch and rest are those of the first such step; what the peak held
            beyond them counts as activations.
        samples_per_second: samples of all ranks over wall time; ``None`` when no batch told its size.
        step_seconds: mean wall time of a step.
        data_wait_share: share of that spent waiting for the next batch, 0 to 1; ``None`` when it is not known.
        has_peak: ``False`` where the device has no peak counter, and the bytes are the highest seen at the marks.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        items_per_second: items of all ranks, as ``items_fn`` counts them, over wall time; ``None`` without one.
        estimate: what arithmetic says of the parts; ``None`` where they were not taken.
        outside_bytes: what the device held beside this process's allocator when the parts were taken: contexts, NCCL,
            other processes; ``None`` where that is not told.
        predicted_bytes: what the plan of a BatchFinder in the same run expects at ``batch_size``; ``None`` without one.
        alarms: what was warned of, in the order in which it was.
        rank_peaks_bytes: the highest peak of each rank, in their order; empty for one rank.
        validation: the validation inside this ``fit``; ``None`` when there was none.
    """

    device: str
    steps: int
    peak_bytes: int
    peak_step: int
    batch_size: int | None
    phase_peak_bytes: dict[str, int]
    peak_reserved_bytes: int | None
    limit_bytes: int
    breakdown: MemoryBreakdown | None
    samples_per_second: float | None
    step_seconds: float
    data_wait_share: float | None
    has_peak: bool = True
    stage: str = "train"
    items_per_second: float | None = None
    estimate: Estimate | None = None
    outside_bytes: int | None = None
    predicted_bytes: int | None = None
    alerts: tuple[str, ...] = ()
    rank_peaks_bytes: tuple[int, ...] = ()
    validation: Summary | None = None

    @property
    def cached_bytes(self) -> int | None:
        """What the allocator held beyond the highest allocated bytes: freed, and kept for later."""
        return None if self.peak_reserved_bytes is None else max(0, self.peak_reserved_bytes - self.peak_bytes)

    def to_json(self) -> str:
        """The summary as JSON; :meth:`from_json` makes an equal summary of it."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Summary:
        """The summary that :meth:`to_json` wrote.

        Args:
            text: JSON.

        Raises:
            ValueError: when ``text`` is not the JSON of a summary.
        """
        try:
            return cls._from_dict(json.loads(text))
        except (KeyError, TypeError) as error:
            raise ValueError(f"text must be the JSON of a Summary, got {text[:80]!r}") from error

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> Summary:
        breakdown, estimate, validation = data["breakdown"], data["estimate"], data["validation"]
        made = {
            "breakdown": None if breakdown is None else MemoryBreakdown(**breakdown),
            "estimate": None if estimate is None else Estimate(**estimate),
            "validation": None if validation is None else cls._from_dict(validation),
            "alerts": tuple(data["alerts"]),
            "rank_peaks_bytes": tuple(data["rank_peaks_bytes"]),
        }
        return cls(**{**data, **made})
