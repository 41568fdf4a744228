"""The text of searches on simulated GPUs, in lines of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.printing import shown
from lightning_batchmem.plan.records import mib
from lightning_batchmem.plan.text import headline, is_rehearsed
from lightning_batchmem.simulated_gpu.gpus import CONTEXT_BYTES, CONTEXT_SOURCE
from lightning_batchmem.simulated_gpu.launch import FoundWorld, Outcome

GIB = 2**30

# Peaks on a real GPU may be higher by this share. Source: 73 peaks that others published differ
# from simulated ones by 0.3 % in the median, and nine of ten by at most 7.6 %
# (`python -m benchmarks.published_memory --cudnn`).
HIGHER_SHARE = 0.08
_HIGHER = f"{100 * HIGHER_SHARE:.0f} %"

_WIDTH = 80

# Headings of columns that a remark explains.
_NEEDS = "needs"
_RANGE = f"+{_HIGHER}"
_SAMPLES = "samples"
_EXPLAINED = {
    _NEEDS: "needs: GiB of a GPU at the largest size",
    _RANGE: f"{_RANGE}: what fits if peaks on the real GPU are higher by it",
    _SAMPLES: "samples: of an optimizer step on all GPUs; sizes and GiB are those of one GPU",
}


def text_of(outcome: Outcome, context_bytes: int) -> str:
    """The result on one GPU: the size, and the rows that explain it."""
    plan = outcome.plan
    if plan is None:
        return _wrapped(f"simulated {outcome.name}: {outcome.nothing_fits or outcome.error}")
    world = outcome.world
    rows = [("training", plan.training)] if plan.training else []
    if world is not None:
        rows.append(("ranks", _ranks(plan, world)))
    rows.append(("memory", _memory(plan)))
    if world is not None and world.gathered_bytes is not None:
        rows.append(
            (
                "gathered",
                f"{_gib(world.gathered_bytes)} GiB of weights stay from forward to backward",
            )
        )
    size = plan.project_batch_size
    if size is not None:
        rows.append(("own size", f"batch size {size}: {_fit(plan, size)}"))
    smallest = smallest_of_range(plan, outcome.multiple_of)
    if smallest is not None:
        rows.append(("range", _range(plan, smallest)))
    rows += [
        ("assumed", _assumed(context_bytes, [outcome])),
        *[("note", note.text) for note in plan.notes],
        ("next", "search again on the GPU itself; nothing here ran on one"),
    ]
    lines = [_wrapped(f"  {name:<10}{text}", indent=12) for name, text in rows]
    return "\n".join([_wrapped(headline(plan)), *lines])


class Table:
    """A table in Markdown, whose rows can be printed one by one.

    Args:
        first: the first outcome, which decides about the columns.
        gpus: the names of all GPUs.
    """

    def __init__(self, first: Outcome, gpus: Sequence[str]) -> None:
        size = None if first.plan is None else first.plan.project_batch_size
        self._own_size = "own size" if size is None else f"{size} fits?"
        if first.world is None and first.asked.devices is None:
            self._own_size += " (GiB)"
            self._end_of_fit = " GiB"
            own_cell = "yes, 10.5 of 22.0"
            left_out = {"devices", _SAMPLES}
        else:
            # The limit and the range have no room here.
            self._end_of_fit = " of "
            # Where the first row has no size, later ones name it.
            own_cell = "yes, 10.5" if size is not None else "16: yes, 10.5"
            left_out = {_RANGE}
        cells = self._cells(first)
        self._widths = {
            heading: max(len(heading), len(cell))
            for heading, cell in cells.items()
            if heading not in left_out
        }
        # Later rows may have longer values.
        self._widths["GPU"] = max(map(len, ["GPU", *gpus]))
        self._widths[self._own_size] = max(self._widths[self._own_size], len(own_cell))
        for optional in (_NEEDS, _RANGE):
            if self._excess > 0:
                self._widths.pop(optional, None)
        self._widths["limited by"] -= max(0, self._excess)

    @property
    def _excess(self) -> int:
        """How much wider than a terminal a line is."""
        return sum(self._widths.values()) + 3 * len(self._widths) + 1 - _WIDTH

    @property
    def heading(self) -> str:
        """The first two lines."""
        line = self._line({heading: heading for heading in self._widths})
        return f"{line}\n|{'|'.join('-' * (width + 2) for width in self._widths.values())}|"

    def row(self, outcome: Outcome) -> str:
        """The line of an outcome."""
        return self._line(self._cells(outcome))

    def remarks(self, outcomes: Sequence[Outcome], context_bytes: int) -> str:
        """A list of what has no room in a row."""
        plans = [outcome.plan for outcome in outcomes if outcome.plan is not None]
        remarks = [
            f"{outcome.name}: {outcome.nothing_fits or outcome.error}"
            for outcome in outcomes
            if outcome.plan is None
        ]
        if plans:
            remarks += [
                *dict.fromkeys(text for outcome in outcomes for text in outcome.assumptions),
                *[
                    f"simulated {outcome.name}: {outcome.plan.batch_size} was not rehearsed"
                    for outcome in outcomes
                    if outcome.plan is not None and not is_rehearsed(outcome.plan)
                ],
                "largest: rehearsed on the simulated GPU; nothing here ran on a GPU",
                *[text for heading, text in _EXPLAINED.items() if heading in self._widths],
                f"assumed: {_assumed(context_bytes, outcomes)}",
            ]
            # They differ in their numbers, and would be longer than the table.
            if any({note.text for note in plan.notes} - set(remarks) for plan in plans):
                remarks.append("a plan has more notes, which simulate prints for a single GPU")
        return "\n".join(_wrapped(f"- {remark}") for remark in remarks)

    def _line(self, cells: Mapping[str, str]) -> str:
        """A line, which is cut off where its cells are wider than those of the first row."""
        padded = [f"{cells[heading]:>{width}}" for heading, width in self._widths.items()]
        padded[0] = cells["GPU"].ljust(self._widths["GPU"])
        return f"| {' | '.join(padded):.{_WIDTH - 4}} |"

    def _cells(self, outcome: Outcome) -> dict[str, str]:
        """The cells of a row by their headings, in the order of the columns."""
        plan = outcome.plan
        cells = {
            "GPU": outcome.gpu.name,
            "devices": outcome.devices,
            self._own_size: "-",
            "largest": "none" if outcome.nothing_fits else "failed",
            **dict.fromkeys((_NEEDS, _RANGE, _SAMPLES, "limited by"), "-"),
        }
        if plan is None:
            return cells
        size = plan.project_batch_size
        if size is not None:
            cells[self._own_size] = self._own_fit(plan, size)
        needed = needed_bytes(plan, plan.batch_size)
        if needed is not None:
            cells[_NEEDS] = _gib(needed)
        smallest = smallest_of_range(plan, outcome.multiple_of)
        if smallest is not None:
            cells[_RANGE] = str(smallest)
        if plan.effective_batch_size is not None:
            cells[_SAMPLES] = str(plan.effective_batch_size)
        # Some names are longer than a column of a terminal allows.
        limited_by = plan.limited_by.replace("_", " ").removeprefix("min ").removeprefix("limit ")
        return cells | {"largest": str(plan.batch_size), "limited by": limited_by}

    def _own_fit(self, plan: Plan, size: int) -> str:
        """Whether the project's own size fits, and what it needs."""
        words = {"fits": "yes", "may fit": "maybe", "too large": "no", "not known": "?"}
        word = how_it_fits(plan, size)
        text = _fit(plan, size).replace(word, words[word]).partition(self._end_of_fit)[0]
        # It may depend on the GPU.
        return text if self._own_size.startswith(f"{size} ") else f"{size}: {text}"


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


def _assumed(context_bytes: int, outcomes: Sequence[Outcome]) -> str:
    source = f" ({CONTEXT_SOURCE})" if context_bytes == CONTEXT_BYTES else ""
    parts = [f"{mib(context_bytes)} for the CUDA context{source}"]
    ranks_with: dict[tuple[int, str], list[str]] = {}
    for outcome in outcomes:
        if world := outcome.world:
            ranks = ranks_with.setdefault((world.nccl_bytes, world.nccl_source), [])
            ranks.append(str(world.devices * world.nodes))
    for (nccl_bytes, nccl_source), ranks in ranks_with.items():
        # The rows of a table may have taken different amounts.
        rows = f"{'/'.join(dict.fromkeys(ranks))} ranks: " if len(ranks_with) > 1 else ""
        parts.append(f"{mib(nccl_bytes)} for NCCL ({rows}{nccl_source})")
    return f"{', '.join(parts)}; nothing else on the GPU"


def _ranks(plan: Plan, world: FoundWorld) -> str:
    """Which rank ran, and what all of them take together."""
    text = f"rank 0 of {world.devices * world.nodes}"
    if plan.effective_batch_size is not None:
        text += f"; {plan.effective_batch_size:,} samples a step on all of them"
    if world.devices == 1:
        return text
    return f"{text}; a node needs {world.devices} times the host memory of one process"


def _range(plan: Plan, smallest: int) -> str:
    higher = f"if peaks on the real GPU are {_HIGHER} higher"
    if smallest == plan.batch_size:
        return f"{plan.batch_size} also fits {higher}"
    return f"{smallest} to {plan.batch_size}: {smallest} fits {higher}"


def _wrapped(text: str, *, indent: int = 2) -> str:
    return textwrap.fill(
        shown(text), _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False
    )
