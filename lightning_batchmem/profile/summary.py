"""The summary of a run, made of parts."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_batchmem.devices.breakdown import MemoryBreakdown
from lightning_batchmem.plan.json_fields import from_json, to_json
from lightning_batchmem.profile.alerts import conclusion
from lightning_batchmem.profile.flop_step import FlopRate
from lightning_batchmem.profile.module_memory import PeakByModule
from lightning_batchmem.profile.step_memory import PeakBetweenSteps
from lightning_batchmem.profile.text import headline, summary_text


@dataclass(frozen=True)
class RunMemory:
    """Memory of the steps of a run.

    Args:
        peak_step: the step of the highest peak, as in ``memory_per_batch.csv``.
        batch_size: samples of that step, on this rank; None if its batch does not show it.
        peak_allocated_bytes: most bytes that tensors took in a step on a GPU; None on a CPU, and
            if memory cannot be measured.
        peak_reserved_bytes: most bytes that the process took for tensors on a GPU; None likewise.
        peak_process_bytes: most bytes that the process took in a step on a CPU; None on a GPU.
        limit_bytes: bytes that this process may take, at the last reading: the limit of the device,
            or of a BatchFinder's plan.
        breakdown: parts of the memory at the highest peak of the steady state, which begins with
            the first step after an optimizer step (in an evaluation: with the second step); None if
            the run ended before.
        rank_peaks_bytes: highest peak of each rank, in rank order; empty for one rank.
        validation_peak_bytes: highest peak of a step of the validations of a training; None
            without them.
        graph_steps: steps that replayed CUDA graphs. The peak of their tensors is not known, so
            ``peak_allocated_bytes`` has only the other steps.
        is_planned: whether the limit is that of a BatchFinder's plan.
        between_steps: the highest memory between two steps, as far as it was read there; None if it
            was not.
    """

    peak_step: int
    batch_size: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_process_bytes: int | None = None
    limit_bytes: int | None = None
    breakdown: MemoryBreakdown | None = None
    rank_peaks_bytes: tuple[int, ...] = ()
    validation_peak_bytes: int | None = None
    graph_steps: int = 0
    is_planned: bool = False
    between_steps: PeakBetweenSteps | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The highest peak of the tensors, or of the process where they are not counted."""
        allocated_bytes = self.peak_allocated_bytes
        return self.peak_process_bytes if allocated_bytes is None else allocated_bytes

    @property
    def between_bytes(self) -> int:
        """The memory between two steps if it was above that of all steps; otherwise 0."""
        if self.between_steps is None or self.peak_bytes is None:
            return 0
        peak_bytes = max(self.peak_bytes, self.validation_peak_bytes or 0)
        between_bytes = self.between_steps.peak_bytes
        return between_bytes if between_bytes > peak_bytes else 0

    @property
    def held_bytes(self) -> int:
        """The most that the process of a rank took; 0 if it is unknown."""
        peaks = (self.peak_bytes, self.peak_reserved_bytes, self.validation_peak_bytes)
        known = [peak for peak in (*peaks, *self.rank_peaks_bytes) if peak is not None]
        return max(self.between_bytes, *known) if known else 0

    @property
    def cached_bytes(self) -> int | None:
        """Bytes of the process beyond those of tensors on a GPU; None on a CPU."""
        if self.peak_reserved_bytes is None or self.peak_allocated_bytes is None:
            return None
        taken_bytes = max(self.peak_allocated_bytes, self.between_bytes)
        return max(0, self.peak_reserved_bytes - taken_bytes)


@dataclass(frozen=True)
class RunSpeed:
    """Time and throughput of the steps of a run, with the names of ``memory_per_batch.csv``.

    Args:
        step_ms: mean time of a step. This and the other means are without the first step, those
            that compile, and those that a measurement slowed. If there are no others, this is the
            mean of all, and the other means are None.
        samples_per_s: samples of all ranks per second of wall time; None if no batch shows its
            size.
        items_per_s: items of all ranks per second, as ``items_fn`` counts them; None without
            it.
        data_wait_pct: per cent of wall time before the batch arrived; None if unknown.
        gpu_utilization_pct: per cent of the steps in which any process used the GPU; None on a
            CPU, and if it cannot be read.
        cpu_utilization_pct: per cent of the cores of this process that it used in the steps; None
            on a GPU.
        cores: how many cores this process may use; None on a GPU.
        first_step_ms: time of the first step; None if it is unknown.
    """

    step_ms: float
    samples_per_s: float | None
    items_per_s: float | None = None
    data_wait_pct: float | None = None
    gpu_utilization_pct: float | None = None
    cpu_utilization_pct: float | None = None
    cores: float | None = None
    first_step_ms: float | None = None


@dataclass(frozen=True)
class Summary:
    """Memory and time of the steps of one stage in one call of a Trainer.

    The call is one of ``fit``, ``validate``, ``test`` and ``predict``.

    Args:
        device: ``"cuda"``, or ``"host"`` for a CPU; the device type if its memory cannot be
            measured.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        steps: number of steps.
        memory: their memory.
        speed: their time and throughput.
        modules: the bytes of each module at the peak of one steady step, or why they could not be
            measured, with ``MemoryProfiler(modules=True)``; None without it, or if the run ended
            before.
        flops: the floating-point operations, with ``MemoryProfiler(flops=True)``; None without it.
        alerts: the alerts of the run, in their order.
        fits: a line for a README or an issue, with the size of a BatchFinder's plan, the memory
            that it takes, and where; empty without a plan, after an error, and where allocations
            failed, memory grew or a part of it was not measured.
        training: what a BatchFinder has changed in the training, as in ``Plan.training``; empty
            without one.
    """

    device: str
    stage: str
    steps: int
    memory: RunMemory
    speed: RunSpeed
    modules: PeakByModule | None = None
    flops: FlopRate | None = None
    alerts: tuple[str, ...] = ()
    fits: str = ""
    training: str = ""

    def __repr__(self) -> str:
        return f"<Summary of {headline(self)}>"

    def __str__(self) -> str:
        return summary_text(self)

    def _repr_markdown_(self) -> str:
        """The text in a notebook, with its columns aligned."""
        # With the name of a language, the HTML of nbconvert has no font of equal widths.
        return f"```\n{self}\n```"

    @property
    def conclusion(self) -> str:
        """What limits the run, and what helps, in a line; empty where the numbers do not decide."""
        return conclusion(self.speed, self.memory, self.steps)

    def to_json(self) -> str:
        """Return the summary as JSON, for :meth:`from_json`."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Summary:
        """Read the JSON of :meth:`to_json`; unknown keys are ignored.

        Raises:
            ValueError: if ``text`` is not the JSON of a summary.
        """
        return from_json(cls, text)
