"""Results of trials, the lines fitted to them, and the choice of a size.

All of it is plain data in bytes, seconds and samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.options import BoundArgument

MIB = 2**20
"""Bytes in a mebibyte, the unit in which memory is shown to people."""

PHASES = ("forward", "backward", "optimizer_step", "evaluation")
"""The parts of a step whose peaks are measured and fitted apart, in the order in which they run."""

Outcome = Literal["ok", "out_of_memory", "over_limit", "allocator_retry"]
TrialKind = Literal["probe", "rehearsal"]
_ShareLimit = Literal[
    "limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"
]
_DataLimit = Literal["dataset", "validation data", "CPU memory", "shared memory"]
_SettingLimit = Literal["overfit_batches", "val_check_interval"]
SizeLimit = Literal[_DataLimit, BoundArgument, "recipe", _ShareLimit, _SettingLimit]
LimitedBy = Literal["memory", "throughput", SizeLimit]

Bound = tuple[int, SizeLimit]
"""A largest size in samples, and the argument, setting or data that limits it."""

# For a training whose number of batches is unknown.
_MANY_BATCHES = 1_000_000

# Of an out-of-memory error.
_ERROR_SENTENCES = 3

# The worst outcome comes first: several ranks or repetitions agree on the first that occurred.
_OUTCOMES: tuple[Outcome, ...] = ("out_of_memory", "over_limit", "allocator_retry", "ok")

_FAILURES: Mapping[Outcome, str] = {
    "out_of_memory": "ran out of memory",
    "over_limit": "need {needed}",
    "allocator_retry": "fit only if the allocator releases its cache in every step",
}


def mib(count_bytes: float) -> str:
    """Bytes as a person reads them, e.g. ``"1,536.0 MiB"``; three decimals below one MiB."""
    decimals = 1 if abs(count_bytes) >= MIB else 3
    # The sum with 0.0 turns -0.0 into 0.0.
    return f"{round(count_bytes / MIB, decimals) + 0.0:,.{decimals}f} MiB"


def device_text(device: str) -> str:
    """The name of a device as a person reads it: its name in a plan, or ``"CPU"`` or ``"GPU"``."""
    return {"host": "CPU", "cuda": "GPU"}.get(device, device)


def counted(count: int, noun: str) -> str:
    """A number of things, e.g. ``"1 sample"`` or ``"1,024 samples"``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@dataclass(frozen=True)
class Growth:
    """What equal steps keep besides what lasts from one step to the next.

    Args:
        batch_bytes: bytes of tensors that each batch adds, at the size that was run.
        batches: the batches over which they add up; ``None`` if their number is unknown.
        batches_run: batches that a rehearsal kept together, so that there was room for them.
        is_of_epoch: whether the batches are an epoch's, because something at its end may free
            memory, and not the whole training's.
        is_of_validation: whether steps of an evaluation keep them, also in a training.
    """

    batch_bytes: int
    batches: int | None
    batches_run: int = 0
    is_of_epoch: bool = False
    is_of_validation: bool = False

    @property
    def total_bytes(self) -> int:
        """The bytes in the end; for very many batches if their number is unknown."""
        batches = _MANY_BATCHES if self.batches is None else self.batches
        return batches * self.batch_bytes

    def needed_bytes(self, trial: Trial, batch_size: int) -> float:
        """The least that steps need while these bytes are kept, at a size up to a trial's.

        What the end of a validation frees is not kept in training steps, which may need more.
        """
        memory = trial.memory
        needed_bytes: float = max(memory.needed_bytes, memory.held_bytes)
        if self.is_of_validation and self.is_of_epoch:
            needed_bytes *= memory.phase_peak_bytes.get("evaluation", 0) / memory.peak_bytes
        # The states of the optimizer last too. So a size may be too large, and is lowered again.
        lasting_bytes = min(memory.start_bytes, needed_bytes)
        return lasting_bytes + (needed_bytes - lasting_bytes) * batch_size / trial.batch_size

    def fits(self, room_bytes: float) -> bool:
        """Whether there is room for all of it; never known of an unknown number of batches."""
        return (
            self.batches is not None
            and (self.batches - self.batches_run) * self.batch_bytes <= room_bytes
        )

    def note(self, room_bytes: float) -> Note:
        """A remark on a plan whose rehearsal left this much room."""
        whole = "the training has"
        advice = " Keep loss.item() or loss.detach() instead of the loss."
        if self.is_of_validation:
            whole = "all evaluations have"
            advice = " Let their end hook free it."
        if self.is_of_epoch:
            whole = f"an {'evaluation' if self.is_of_validation else 'epoch'} has"
            # What an epoch frees is kept on purpose.
            advice = ""
        number = "" if self.batches is None else f", and {whole} {self.batches:,}"
        return Note(
            "risk",
            f"Equal steps need {mib(self.batch_bytes)} more each time: if it goes on, about"
            f" {self.batches_run + max(0, room_bytes) // self.batch_bytes:,.0f} steps fit{number}."
            f"{advice}",
        )


@dataclass(frozen=True)
class TrialMemory:
    """Memory that the steps of a trial used.

    Args:
        phase_peak_bytes: most bytes of tensors in each phase that ran (keys from :data:`PHASES`).
            On a GPU these are bytes requested from the allocator. On a CPU they include what the
            process took before its first step.
        is_exact: whether the peaks count tensors. ``False`` where only the process could be
            measured.
        start_bytes: bytes of tensors before the first step; in a rehearsal on a GPU, before the
            first training step.
        held_peak_bytes: most bytes that this process took. On a GPU PyTorch calls them reserved
            bytes, on a CPU they are the resident set. ``None`` where they are not known.
        needed_bytes: what was compared with the limit: on a GPU what the process takes, on a CPU
            what tensors take.
        set_aside_bytes: memory of the CPU that is taken besides the steps; 0 on a GPU. In the
            training these are, by arithmetic, a checkpoint and the batches that loader workers make
            ahead; in the search the samples that it keeps. The larger of both counts.
        fixed_bytes: bytes of tensors that last from one step to the next, without gradients; 0
            where it is not known.
        largest_batch_bytes: bytes of the largest training batch, as the module gets it; 0 where it
            is not known.
        differing_bytes: the highest and the lowest peak of steps on equal batches, which something
            random may change; empty where they are about equal.
    """

    phase_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    is_exact: bool = True
    start_bytes: int = 0
    held_peak_bytes: int | None = None
    needed_bytes: int = 0
    set_aside_bytes: int = 0
    fixed_bytes: int = 0
    largest_batch_bytes: int = 0
    differing_bytes: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors inside a step, over all phases; 0 when nothing was measured."""
        return max(self.phase_peak_bytes.values(), default=0)

    @property
    def held_bytes(self) -> int:
        """Most bytes that this process took; the bytes of tensors where it is not known."""
        return self.peak_bytes if self.held_peak_bytes is None else self.held_peak_bytes

    @property
    def growing_bytes(self) -> int:
        """The most that may grow with the size; at least 1. An optimizer step does not grow."""
        peaks = [peak for phase, peak in self.phase_peak_bytes.items() if phase != "optimizer_step"]
        return max(1, max(peaks, default=self.peak_bytes) - self.fixed_bytes)

    def with_set_aside(self) -> TrialMemory:
        """The same memory, with the bytes that are set aside in its peaks."""
        peaks = {
            phase: peak + self.set_aside_bytes for phase, peak in self.phase_peak_bytes.items()
        }
        return replace(self, phase_peak_bytes=peaks)

    @classmethod
    def worst_of(cls, parts: Sequence[TrialMemory]) -> TrialMemory:
        """The highest peaks of all of these."""
        phases = [phase for phase in PHASES if any(phase in one.phase_peak_bytes for one in parts)]
        is_held_known = any(one.held_peak_bytes is not None for one in parts)
        return cls(
            {phase: max(one.phase_peak_bytes.get(phase, 0) for one in parts) for phase in phases},
            is_exact=all(one.is_exact for one in parts),
            start_bytes=max(one.start_bytes for one in parts),
            held_peak_bytes=max(one.held_bytes for one in parts) if is_held_known else None,
            needed_bytes=max(one.needed_bytes for one in parts),
            set_aside_bytes=max(one.set_aside_bytes for one in parts),
            fixed_bytes=min(one.fixed_bytes for one in parts),
            largest_batch_bytes=max(one.largest_batch_bytes for one in parts),
            differing_bytes=max(one.differing_bytes for one in parts),
        )


@dataclass(frozen=True)
class Trial:
    """What real steps at one batch size used.

    Args:
        batch_size: samples in each step, on this rank.
        outcome: ``"ok"``; ``"out_of_memory"`` (the peaks are then incomplete); ``"over_limit"``
            when more was needed than the limit;
            ``"allocator_retry"`` when the allocator had to release its cache in a steady step.
        memory: the memory that the steps used.
        kind: ``"probe"`` for a few steps that are only measured, ``"rehearsal"`` for steps as in a
            training.
        step_seconds: median time of a timed step (of a micro-batch under gradient accumulation)
            without the making of its batch; ``None`` when none was completed.
        samples_per_s: throughput of this rank, from median steps; under gradient
            accumulation the throughput of a whole optimizer step. ``None`` likewise.
        full_steps: full steps that ran at this size, warm-up included.
        growth: what equal steps of a rehearsal keep; ``None`` if nothing grows.
        notes: what could not be measured.
        failed_phase: the phase of a training step or a validation in which memory ran out; empty
            otherwise.
        error: first line of the out-of-memory error; empty otherwise.
    """

    batch_size: int
    outcome: Outcome
    memory: TrialMemory
    kind: TrialKind = "probe"
    step_seconds: float | None = None
    samples_per_s: float | None = None
    full_steps: int = 0
    growth: Growth | None = None
    notes: tuple[Note, ...] = ()
    failed_phase: str = ""
    error: str = ""

    @property
    def failure(self) -> str:
        """What happened at a size that did not pass, as a clause."""
        memory = self.memory
        # On the host the process holds more than its tensors need.
        needed_bytes = max(memory.needed_bytes, memory.held_bytes + memory.set_aside_bytes)
        text = _FAILURES[self.outcome].format(needed=mib(needed_bytes))
        if self.fails_in_validation:
            text += " in the validation"
        if not self.error:
            return text
        # Torch names what was wanted and what is free, and then gives advice of its own.
        sentences = self.error.split(". ")[:_ERROR_SENTENCES]
        return f"{text} ({'. '.join(sentences).removesuffix('.')})"

    @property
    def fails_in_validation(self) -> bool:
        """Whether the validation of a training ran out of memory, or needs more than the limit."""
        if self.outcome == "out_of_memory":
            return self.failed_phase == "evaluation"
        peaks = self.memory.phase_peak_bytes
        # In an evaluation by itself it is the only phase.
        return len(peaks) > 1 and peaks.get("evaluation", 0) == self.memory.peak_bytes

    @property
    def is_known(self) -> bool:
        """Whether this version knows the outcome and the kind; a later one may have others."""
        return self.outcome in get_args(Outcome) and self.kind in get_args(TrialKind)

    @classmethod
    def worst_of(cls, trials: Iterable[Trial]) -> Trial:
        """Combine what was run at one batch size.

        The result has the worst outcome, the highest peaks and the slowest step. It is a rehearsal
        if one with this outcome is.
        """
        trials = list(trials)
        return replace(
            min(trials, key=_rank),
            memory=TrialMemory.worst_of([trial.memory for trial in trials]),
            step_seconds=max(
                (t.step_seconds for t in trials if t.step_seconds is not None), default=None
            ),
            samples_per_s=min(
                (t.samples_per_s for t in trials if t.samples_per_s is not None),
                default=None,
            ),
            full_steps=min(trial.full_steps for trial in trials),
            growth=max(
                (trial.growth for trial in trials if trial.growth is not None),
                key=lambda growth: growth.total_bytes,
                default=None,
            ),
            notes=tuple(sorted({note for trial in trials for note in trial.notes})),
        )


def _rank(trial: Trial) -> tuple[int, bool]:
    """The worst trial first, and a rehearsal before a probe."""
    # A plan may have outcomes of another version.
    is_known = trial.outcome in _OUTCOMES
    return _OUTCOMES.index(trial.outcome) if is_known else -1, trial.kind != "rehearsal"


@dataclass(frozen=True)
class Speed:
    """The throughput that was measured at one size, in samples per second of one rank."""

    batch_size: int
    samples_per_s: float


@dataclass(frozen=True)
class Line:
    """A straight line over the batch size.

    Args:
        intercept: bytes at batch size 0.
        slope: bytes that each sample adds.
        first_batch_size: smallest batch size that the line was fitted to.
        last_batch_size: largest batch size that the line was fitted to.
    """

    intercept: float
    slope: float
    first_batch_size: int
    last_batch_size: int

    def at(self, batch_size: float) -> float:
        """The bytes that the line expects at ``batch_size`` samples."""
        return self.intercept + self.slope * batch_size


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory of a step as a function of the batch size: the highest of one line per phase.

    Args:
        lines: phase -> line of the bytes of tensors over samples; see :class:`Trial`.
    """

    lines: Mapping[str, Line]

    def predict_bytes(self, batch_size: float) -> float:
        """Expected peak of tensors in bytes.

        It is a lower bound beyond the sizes that were run, because the peak may bend upward there.
        """
        return max(line.at(batch_size) for line in self.lines.values())

    def size_at(self, limit_bytes: float) -> float:
        """The size at which the first line reaches this many bytes; ``inf`` if none grows."""
        growing = [line for line in self.lines.values() if line.slope > 0]
        return min(
            ((limit_bytes - line.intercept) / line.slope for line in growing), default=math.inf
        )

    def phase_at(self, batch_size: float) -> str:
        """The phase in which the peak is expected at ``batch_size`` samples."""
        return max(self.lines, key=lambda phase: self.lines[phase].at(batch_size))


@dataclass(frozen=True)
class NextSize:
    """The next size to run.

    Args:
        batch_size: the size in samples.
        kind: whether it is only measured, or rehearsed as in a training.
    """

    batch_size: int
    kind: TrialKind


@dataclass(frozen=True)
class Chosen:
    """The size to train with.

    Args:
        batch_size: the size in samples.
        limited_by: what limits it.
        why: a clause: why this size. Further sentences may follow it.
        notes: remarks on the lines and the allocator, until a plan has them.
        is_verified: whether a rehearsal passed at exactly this size.
        fastest_batch_size: the smallest size near the best throughput that was measured; ``None``
            if no step was timed.
        largest_batch_size: the largest size that fits, as far as it is known: a size that passed a
            rehearsal, or one that is predicted to fit.
        speeds: the throughput at the size of the project and at the one that was found, timed one
            after the other; empty where they were not compared.
        state: the later state of the training that limits it, such as ``"with the layers that
            BackboneFinetuning unfreezes"``; empty: the one in which the training starts.
    """

    batch_size: int
    limited_by: LimitedBy
    why: str
    notes: tuple[Note, ...] = ()
    is_verified: bool = True
    fastest_batch_size: int | None = None
    largest_batch_size: int | None = None
    speeds: tuple[Speed, ...] = ()
    state: str = ""


@dataclass(frozen=True)
class SearchFailed:
    """No size fits.

    Args:
        reason: what was measured, and what to do.
    """

    reason: str
