"""Simulations of the command line: their words, and what they print in lines of 80 columns."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_batchmem.check import HOST, MeasuredStep
from lightning_batchmem.plan.objectives import objective_of
from lightning_batchmem.plan.options import SearchOptions, bytes_in
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.printing import shown, table_text
from lightning_batchmem.plan.records import mib
from lightning_batchmem.plan.text import headline, is_rehearsed
from lightning_batchmem.script import Script
from lightning_batchmem.simulated_gpu.gpus import CONTEXT_BYTES, CONTEXT_SOURCE, gpu_named
from lightning_batchmem.simulated_gpu.launch import Outcome, kernels_of, run

GIB = 2**30

# Peaks on a real GPU may be higher by this share. Source: 73 peaks that others published differ
# from simulated ones by 0.3 % in the median, and nine of ten by at most 7.6 %
# (`python -m benchmarks.published_memory --cudnn`).
HIGHER_SHARE = 0.08
_HIGHER = f"{100 * HIGHER_SHARE:.0f} %"

_WIDTH = 80


def with_program_as_list(words: list[str]) -> list[str]:
    """The words of a command line, with the program of ``simulate`` or ``find`` as a list.

    Its arguments may have the names of options. An option becomes one word with its value, so
    that an unknown one is an error of its own.

    Raises:
        ValueError: if there is no GPU, or no program.
    """
    if words[:1] not in (["simulate"], ["find"]):
        return words
    joined = words[:1]
    remaining = words[1:]
    has_gpus = words[0] == "find"
    while remaining:
        word = remaining.pop(0)
        if word.startswith("--"):
            # Every option but --help has a value.
            if remaining and "=" not in word and word != "--help":
                word = f"{word}={remaining.pop(0)}"
        elif word != "-h":
            if has_gpus and words[0] == "find" and is_function([word]):
                return [*joined, json.dumps([word]), *remaining]
            if has_gpus:
                return [*joined, json.dumps([word, *remaining])]
            has_gpus = True
        joined.append(word)
    # A configuration may name the program of find.
    if words[0] == "simulate" and not {"-h", "--help"} & set(joined):
        raise ValueError(
            "simulate must be followed by a GPU and a program, as in `simulate RTX-4090 train.py`;"
            " `simulate --list` prints the GPUs"
        )
    return joined


def is_function(program: list[str]) -> bool:
    """Whether a program is the name of a function, as in ``module:function``."""
    return len(program) == 1 and ":" in program[0] and not Path(program[0]).is_file()


@dataclass(frozen=True)
class Findings:
    """What was found on each of the GPUs.

    Args:
        outcomes: a result for each GPU.
        context_bytes: bytes that the CUDA context was assumed to take.
    """

    outcomes: tuple[Outcome, ...]
    context_bytes: int

    @property
    def exit_code(self) -> int:
        """0 for a plan, 1 if nothing fits on any GPU, 2 for an error."""
        if self.errors:
            return 2
        return 0 if self._plans else 1

    @property
    def errors(self) -> list[str]:
        """A sentence for each GPU on which there was no search."""
        return [
            f"simulated {outcome.gpu.name}: {outcome.error}"
            for outcome in self.outcomes
            if outcome.error
        ]

    @property
    def text(self) -> str:
        """The plan, or a table for several GPUs; empty if there was no search."""
        if len(self.errors) == len(self.outcomes):
            return ""
        if len(self.outcomes) > 1:
            return table_of(self.outcomes, self.context_bytes)
        return text_of(self.outcomes[0], self.context_bytes)

    @property
    def json(self) -> str:
        """The plan as JSON, or a list of plans for several GPUs; empty without a plan."""
        plans = self._plans
        if not plans:
            return ""
        return json.dumps(plans[0] if len(self.outcomes) == 1 else plans, indent=2)

    @property
    def _plans(self) -> list[Any]:
        plans = [outcome.plan for outcome in self.outcomes if outcome.plan is not None]
        return [json.loads(plan.to_json()) for plan in plans]


def simulate(program: Script, gpus: str, context: str, options: Mapping[str, Any]) -> Findings:
    """Search on each GPU, one after another.

    Args:
        program: the program.
        gpus: the names of the GPUs, with commas between them.
        context: the memory that the CUDA context takes, such as ``"300MiB"``.
        options: arguments of BatchFinder.

    Raises:
        ValueError: for a GPU or an option that cannot be simulated.
    """
    objective = options.get("objective", "memory")
    if objective_of(SearchOptions(objective=objective)).needs_times:
        raise ValueError("objective must be memory for a simulated GPU, which has no times")
    context_bytes = int(bytes_in(context))
    if context_bytes == 0:
        raise ValueError(f"context must be a size such as 300MiB, got {context!r:.80}")
    named = [gpu_named(name.strip()) for name in gpus.split(",")]
    # Otherwise a GPU without kernels would end the command after minutes on others.
    for gpu in named:
        kernels_of(gpu)
        if context_bytes >= gpu.memory_bytes:
            raise ValueError(f"context must be less than the memory of {gpu.name}, got {context}")
    outcomes = [run(program, gpu, context_bytes, options) for gpu in named]
    return Findings(tuple(outcomes), context_bytes)


def device_name(gpu: str | None) -> str:
    """The name of the device of a memory test: a simulated GPU, or without one the host.

    Raises:
        ValueError: for a GPU that is not known.
    """
    return HOST if gpu is None else f"simulated {gpu_named(gpu).name}"


def memory_on(gpu: str, make: str, trainer: Mapping[str, Any]) -> tuple[MeasuredStep, list[str]]:
    """Measure the memory of a training step on a simulated GPU.

    Args:
        gpu: the name of the GPU.
        make: a function ``module:name`` that makes the module and its data.
        trainer: arguments of the Trainer.

    Returns:
        The memory, and lines that say what was simulated and assumed.

    Raises:
        ValueError: for a GPU that cannot be simulated, and a step that cannot be measured.
    """
    program = Script("memory_test", make, trainer=trainer)
    outcome = run(program, gpu_named(gpu), CONTEXT_BYTES, {})
    device = device_name(gpu)
    if outcome.memory is None:
        raise ValueError(f"{device}: {outcome.error or outcome.nothing_fits}")
    remarks = [f"memory of a step on a {device}; nothing here ran on a GPU"]
    return outcome.memory, remarks + [f"note: {text}" for text in outcome.assumptions]


def text_of(outcome: Outcome, context_bytes: int) -> str:
    """The result on one GPU: the size, and the rows that explain it."""
    plan = outcome.plan
    if plan is None:
        return _wrapped(f"simulated {outcome.gpu.name}: {outcome.nothing_fits or outcome.error}")
    rows = [("training", plan.training)] if plan.training else []
    rows.append(("memory", _memory(plan)))
    size = plan.project_batch_size
    if size is not None:
        rows.append(("own size", f"batch size {size}: {_fit(plan, size)}"))
    smallest = smallest_of_range(plan, outcome.multiple_of)
    if smallest is not None:
        rows.append(("range", _range(plan, smallest)))
    rows += [
        ("assumed", _assumed(context_bytes)),
        *[("note", note.text) for note in plan.notes],
        ("next", "search again on the GPU itself; nothing here ran on one"),
    ]
    lines = [_wrapped(f"  {name:<10}{text}", indent=12) for name, text in rows]
    return "\n".join([_wrapped(headline(plan)), *lines])


def table_of(outcomes: Sequence[Outcome], context_bytes: int) -> str:
    """The results on several GPUs: a row for each, and below it what has no room in a row."""
    plans = [outcome.plan for outcome in outcomes if outcome.plan is not None]
    sizes = {str(plan.project_batch_size) for plan in plans if plan.project_batch_size is not None}
    own_size = f"{', '.join(sorted(sizes))} fits? (GiB)" if sizes else "own size"
    headings = ("GPU", own_size, "largest", f"+{_HIGHER}", "limited by")
    remarks = [
        f"{outcome.gpu.name}: {outcome.nothing_fits or outcome.error}"
        for outcome in outcomes
        if outcome.plan is None
    ]
    if plans:
        remarks += [
            *dict.fromkeys(text for outcome in outcomes for text in outcome.assumptions),
            *[
                f"{plan.device}: {plan.batch_size} was not rehearsed"
                for plan in plans
                if not is_rehearsed(plan)
            ],
            "largest: rehearsed on the simulated GPU; nothing here ran on a GPU",
            f"+{_HIGHER}: what fits if peaks on the real GPU are higher by it",
            f"assumed: {_assumed(context_bytes)}",
        ]
        # They differ in their numbers, and would be longer than the table.
        if any({note.text for note in plan.notes} - set(remarks) for plan in plans):
            remarks.append("a plan has more notes, which simulate prints for a single GPU")
    table = table_text(headings, map(_row, outcomes), left=2)
    return "\n".join([table, "", *[_wrapped(f"- {remark}") for remark in remarks]])


def needed_bytes(plan: Plan, batch_size: int) -> float | None:
    """Bytes that the process holds at a size: measured, between two measured sizes, or predicted.

    A prediction is that of live bytes, times the ratio of held and live bytes at the chosen size.
    ``None`` where no line was fitted.
    """
    completed = [trial for trial in plan.trials if trial.outcome == "ok"]
    # Of several trials of a size the last one, which is the rehearsal.
    held_bytes = {trial.batch_size: trial.memory.held_bytes for trial in completed}
    smaller = max((size for size in held_bytes if size <= batch_size), default=None)
    larger = min((size for size in held_bytes if size >= batch_size), default=None)
    if smaller is not None and larger is not None:
        share = (batch_size - smaller) / max(1, larger - smaller)
        return held_bytes[smaller] + share * (held_bytes[larger] - held_bytes[smaller])
    if plan.memory is None:
        return None
    return plan.memory.predict_bytes(batch_size) * _held_by_live(plan)


def smallest_of_range(plan: Plan, multiple_of: int = 1) -> int | None:
    """The size that fits if peaks are higher by :data:`HIGHER_SHARE`.

    ``None`` where no size was measured, or none is small enough.
    """
    needed = needed_bytes(plan, plan.batch_size)
    if needed is None:
        return None
    allowed_bytes = plan.limit_bytes / (1 + HIGHER_SHARE)
    if needed <= allowed_bytes:
        return plan.batch_size
    if plan.memory is None:
        return None
    size = min(plan.memory.size_at(allowed_bytes / _held_by_live(plan)), plan.batch_size)
    whole_size = int(size) // multiple_of * multiple_of
    return whole_size if whole_size >= 1 else None


def how_it_fits(plan: Plan, batch_size: int) -> str:
    """Whether a size fits: as a rehearsal has shown, or else as the lines predict."""
    rehearsed = {t.batch_size: t.outcome for t in plan.trials if t.kind == "rehearsal"}
    if batch_size in rehearsed:
        return "fits" if rehearsed[batch_size] == "ok" else "too large"
    if batch_size <= (plan.largest_batch_size or plan.batch_size):
        return "fits"
    failed = [trial.batch_size for trial in plan.trials if trial.outcome != "ok"]
    if failed and batch_size >= min(failed):
        return "too large"
    needed = needed_bytes(plan, batch_size)
    if needed is None:
        return "not known"
    return "may fit" if needed <= plan.limit_bytes else "too large"


def _held_by_live(plan: Plan) -> float:
    """Held bytes for each live byte at the chosen size; 1 where one of them is not known."""
    if plan.held_peak_bytes is None or not plan.measured_peak_bytes:
        return 1.0
    return max(1.0, plan.held_peak_bytes / plan.measured_peak_bytes)


def _fit(plan: Plan, batch_size: int) -> str:
    """Whether a size fits, and what it needs."""
    word = how_it_fits(plan, batch_size)
    needed = needed_bytes(plan, batch_size)
    return word if needed is None else f"{word}, {_of_limit(plan, needed)}"


def _short_fit(plan: Plan, batch_size: int) -> str:
    """The same in a column of a table, whose heading has the unit."""
    words = {"fits": "yes", "may fit": "maybe", "too large": "no", "not known": "?"}
    word = how_it_fits(plan, batch_size)
    return _fit(plan, batch_size).replace(word, words[word]).removesuffix(" GiB")


def _memory(plan: Plan) -> str:
    held = plan.held_peak_bytes or plan.measured_peak_bytes
    if held is None:
        return f"limit {_gib(plan.limit_bytes)} GiB"
    text = f"needs {_of_limit(plan, held)}"
    if plan.memory is None:
        return text
    line = plan.memory.lines[plan.memory.phase_at(plan.batch_size)]
    return f"{text}; {mib(line.slope)} a sample"


def _of_limit(plan: Plan, needed: float) -> str:
    """Bytes of those that the process may hold, without the context."""
    return f"{_gib(needed)} of {_gib(plan.limit_bytes)} GiB"


def _gib(count_bytes: float) -> str:
    gib = count_bytes / GIB
    return f"{gib:.1f}" if gib >= 1 else f"{gib:.2f}"


def _assumed(context_bytes: int) -> str:
    source = f" ({CONTEXT_SOURCE})" if context_bytes == CONTEXT_BYTES else ""
    return f"{mib(context_bytes)} for the CUDA context{source}; nothing else on the GPU"


def _range(plan: Plan, smallest: int) -> str:
    higher = f"if peaks on the real GPU are {_HIGHER} higher"
    if smallest == plan.batch_size:
        return f"{plan.batch_size} fits also {higher}"
    return f"{smallest} to {plan.batch_size}: {smallest} fits {higher}"


def _row(outcome: Outcome) -> tuple[str, ...]:
    plan = outcome.plan
    if plan is None:
        return (outcome.gpu.name, "-", "none" if outcome.nothing_fits else "failed", "-", "-")
    smallest = smallest_of_range(plan, outcome.multiple_of)
    size = plan.project_batch_size
    return (
        outcome.gpu.name,
        "-" if size is None else _short_fit(plan, size),
        str(plan.batch_size),
        "-" if smallest is None else str(smallest),
        # Some names are longer than a column of a terminal allows.
        plan.limited_by.replace("_", " ").removeprefix("min ").removeprefix("limit "),
    )


def _wrapped(text: str, *, indent: int = 2) -> str:
    return textwrap.fill(
        shown(text), _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False
    )
