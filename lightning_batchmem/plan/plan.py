"""The plan: the batch size that was chosen, what limits it, and everything it was computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_batchmem.plan.fit import fit_memory, ran_through
from lightning_batchmem.plan.json_fields import from_json, to_json
from lightning_batchmem.plan.learning_rate import OptimizerStep
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.records import (
    Chosen,
    LimitedBy,
    MemoryModel,
    Trial,
)
from lightning_batchmem.plan.text import full_text, headline, short_text


@dataclass(frozen=True)
class Plan:
    """The batch size that was chosen, what limits it, and everything it was computed from.

    Args:
        batch_size: the chosen size, in samples for each rank.
        limited_by: what kept it from being larger.
        verified: whether a rehearsal passed at exactly this size: real steps from the state in
            which training starts.
        limit_bytes: what this process may hold in the training.
        predicted_peak_bytes: live bytes that the lines through the *smaller* sizes predict at
            ``batch_size``; ``None`` when fewer than two of them were run.
        measured_peak_bytes: live bytes at the peak of the rehearsal; ``None`` when no step had to
            be run.
        trials: every size that was run, in the order in which it was run.
        memory: the fitted memory lines; ``None`` when a single size was run.
        reason: one sentence: why this size.
        device: where it was measured, such as ``"NVIDIA H100 80GB HBM3"`` or ``"host"``.
        accumulate_grad_batches: batches to an optimizer step.
        effective_batch_size: samples to an optimizer step over all ranks; ``None`` for a plan of
            evaluation.
        learning_rate: the module's new learning rate; ``None`` when it was left alone.
        learning_rate_before: the learning rate before that; ``None`` likewise.
        notes: remarks on the search and the training, a sentence each.
        ranks: how many processes searched together; peaks are the highest of them, times the
            slowest's.
        held_peak_bytes: bytes that this process held in the rehearsal: reserved (CUDA) or the
            resident set (host); ``None`` when it is not known.
        fastest_batch_size: the smallest size with at least 95 % of the best throughput that was
            measured; ``None`` for ``objective="memory"``.
        largest_batch_size: the largest size that passed a rehearsal, or for
            ``objective="throughput"`` the largest that is predicted to fit; ``None`` for a plan of
            an earlier version.
        parameters: the number of parameters, which has to be the same before
            ``BatchFinder(plan=...)`` uses the plan again; empty for a plan of an evaluation.
        budget_name: the attribute that ``batch_size`` is a value of, where it is a budget within
            which loaders form their own batches, such as ``"max_tokens"``. All sizes are budgets
            then, and throughput is in items. ``None``: sizes are in samples.
        place: where the size is set, if it was found by trying: the path of an attribute, such as
            ``"task.batch_size"``, or ``"train_dataloader()"`` for the loaders that this hook
            returns. Empty: the attribute that ``batch_arg_name`` names, or loaders passed to
            ``fit``.
        project_batch_size: the size that the project had before the search; ``None`` where it is
            not known.
        simulated: whether the device was a simulated one. Such a plan is never ``verified``, and
            :class:`~lightning_batchmem.BatchFinder` only rehearses its size first.
    """

    batch_size: int
    limited_by: LimitedBy
    verified: bool
    limit_bytes: int
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    trials: tuple[Trial, ...]
    memory: MemoryModel | None
    reason: str = ""
    device: str = ""
    accumulate_grad_batches: int = 1
    effective_batch_size: int | None = None
    learning_rate: float | None = None
    learning_rate_before: float | None = None
    notes: tuple[str, ...] = ()
    ranks: int = 1
    held_peak_bytes: int | None = None
    fastest_batch_size: int | None = None
    largest_batch_size: int | None = None
    parameters: str = ""
    budget_name: str | None = None
    place: str = ""
    project_batch_size: int | None = None
    simulated: bool = False

    def __repr__(self) -> str:
        return f"<Plan: {headline(self)}>"

    def __str__(self) -> str:
        return full_text(self)

    def _repr_markdown_(self) -> str:
        """The text of the plan in a notebook, with its columns aligned."""
        return f"```text\n{self}\n```"

    def short_text(self) -> str:
        """The plan with the first note only, and without reasons; lines have at most 80 columns."""
        return short_text(self)

    def to_json(self) -> str:
        """The plan as JSON; :meth:`from_json` makes an equal plan of it, with printable texts."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote, also in version 0.1.0.

        Fields that are no longer known are left out, and control characters become escapes.

        Raises:
            ValueError: when ``text`` is not the JSON of a plan.
        """
        plan = from_json(cls, text)
        smallest = min([plan.batch_size, *(trial.batch_size for trial in plan.trials)])
        if smallest < 1:
            raise ValueError(f"batch_size of a plan must be at least 1, got {smallest}")
        return plan


def make_plan(
    chosen: Chosen,
    trials: Sequence[Trial],
    limits: SearchLimits,
    *,
    device: str,
    notes: Sequence[str],
    step: OptimizerStep,
    parameters: str = "",
    place: str = "",
) -> Plan:
    """Make the plan of a search, once, at its end.

    Args:
        chosen: the size.
        trials: every size that was run, in the order in which it was run.
        limits: the limits at the end of the search.
        device: the name of the device.
        notes: remarks on the search and the training, a sentence each.
        step: the optimizer steps of a training; ``OptimizerStep()`` for an evaluation.
        parameters: the number of parameters; empty for an evaluation.
        place: where the size is set, if it was found by trying; empty otherwise.
    """
    size = chosen.batch_size
    passed = ran_through(trial for trial in trials if trial.outcome == "ok")
    rehearsal = next((trial for trial in passed if trial.batch_size == size), None)
    smaller = fit_memory([trial for trial in trials if trial.batch_size < size])
    # The learning rate comes first, because the console shows only one note.
    all_notes = (step.learning_rate_note, *notes, *step.notes)
    return Plan(
        batch_size=size,
        limited_by=chosen.limited_by,
        verified=chosen.is_verified,
        limit_bytes=limits.limit_bytes,
        predicted_peak_bytes=None if smaller is None else round(smaller.predict_bytes(size)),
        measured_peak_bytes=None if rehearsal is None else rehearsal.peak_bytes,
        held_peak_bytes=None if rehearsal is None else rehearsal.held_peak_bytes,
        trials=tuple(trials),
        memory=fit_memory(trials),
        reason=chosen.reason,
        device=device,
        accumulate_grad_batches=step.accumulate_grad_batches,
        effective_batch_size=step.effective_batch_size,
        learning_rate=step.learning_rate,
        learning_rate_before=step.learning_rate_before,
        notes=tuple(note for note in all_notes if note),
        ranks=limits.ranks,
        fastest_batch_size=chosen.fastest_batch_size,
        largest_batch_size=chosen.largest_batch_size,
        parameters=parameters,
        budget_name=limits.options.budget_name,
        place=place,
    )
