"""Does one simulated rank of many need the memory that others measured on several GPUs? One table.

Each row of ``published/devices.json`` is a number that others published for trainings on several
devices: peaks of Lightning's guides, of torchtitan and of fsdp_qlora, largest sizes, and whether a
training runs at all. Rows were written before any of them was run. The same steps
(``published_devices_steps.py``) run here as rank 0 of so many ranks, in one process without a GPU:
torch's process group on the NCCL of the simulated GPU. Nothing is searched. A row of samples is run
at one size after another, until memory runs out.

The error is simulated over published, less one. The goal is 3 % for DDP and NO_SHARD, and 5 % for
what is sharded. Versions differ from those of the measurements: an experiment is a row with one
thing as it was there. Its error stands beside that of its row, and does not count.

An environment with a CUDA build of torch and what the rows import (Linux, x86-64):

    pip install -c constraints-cuda.txt -e ".[test]" transformers==4.49.0
    pip install --no-deps litgpt==0.5.13
    # the whole table; 15 minutes beside other work on two cores
    python -m benchmarks.published_devices
    # the rows whose names have one of these words
    python -m benchmarks.published_devices --only Trainer "FSDP2 on 128"
    # write benchmarks/results/published/published_devices.md
    python -m benchmarks.published_devices --write
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from benchmarks.common import ROOT, command_line, machine, markdown, write_page
from benchmarks.published_memory import (
    MIB,
    OUT_OF_MEMORY,
    RESULTS,
    UNIT_BYTES,
    peaks_of,
    variables_of,
)
from lightning_batchmem.simulated_gpu.gpus import gpu_named, nccl_bytes

ROWS = ROOT / "benchmarks" / "published" / "devices.json"

CHILD = "PUBLISHED_DEVICES_CHILD"
"""Environment variable of the process on the stub: the trainings to run there, as JSON."""

DEVICES_OF_A_NODE = 8
MOST_LARGER_SIZES = 8
"""So many sizes are tried at most beside the published one."""


@dataclass(frozen=True)
class Row:
    """A number that others published.

    Args:
        name: name of the row.
        source: a key of the sources in the file.
        gpu: the GPU to simulate, as ``simulate --list`` names it.
        ranks: number of devices.
        kind: the function of ``published_devices_steps``.
        published: the number; ``None``: memory ran out; ``"trains"``: only that is known.
        unit: unit of the number, and its reading: ``"allocated"``, ``"reserved"``, ``"active"`` or
            ``"largest"``, the largest size that trains.
        goal_percent: the error that counts as reached; 0 where the number or the word has to be
            the same.
        settings: arguments of the function.
        device: settings of the stub that are not those of ``simulate``.
        assumes: what the source does not say.
        remark: why the row is far off.
        experiment: what is as it was in the measured version.
    """

    name: str
    source: str
    gpu: str
    ranks: int
    kind: str
    published: float | str | None
    unit: str
    goal_percent: float
    settings: Mapping[str, Any]
    device: Mapping[str, str] = field(default_factory=dict)
    assumes: str = ""
    remark: str = ""
    experiment: str = ""

    @property
    def reading(self) -> str:
        """The name of the reading."""
        return self.unit.split()[1]

    @property
    def is_size(self) -> bool:
        """Whether the number is a batch size."""
        return self.reading == "largest"


@dataclass(frozen=True)
class Compared:
    """A row, what the simulated rank showed, and what this cost."""

    row: Row
    simulated: float | str
    cpu_seconds: float
    host_gib: float

    @property
    def published(self) -> float | str:
        """The published number or word."""
        return OUT_OF_MEMORY if self.row.published is None else self.row.published

    @property
    def error(self) -> float | None:
        """Simulated over published, less one; ``None`` for sizes and where one is a word."""
        published, simulated = self.published, self.simulated
        if self.row.is_size or isinstance(published, str) or isinstance(simulated, str):
            return None
        return simulated / published - 1

    @property
    def is_reached(self) -> bool:
        """Whether the error is within the goal; of words and sizes, whether both are the same."""
        if self.error is not None:
            return abs(self.error) <= self.row.goal_percent / 100
        if self.published == "trains":
            return not isinstance(self.simulated, str)
        return self.published == self.simulated


def rows_of(text: str) -> list[Row]:
    """The rows in the text of the file, and after them its experiments."""
    known = json.loads(text)
    return [Row(**row) for row in [*known["rows"], *known["experiments"]]]


def compared(row: Row, found: Mapping[str, Any]) -> Compared:
    """Compare a row with what its process found.

    Args:
        row: the row.
        found: bytes of each reading, or an ``error``; with ``cpu_seconds`` and ``host_gib``.
    """
    cost = (found.get("cpu_seconds", 0.0), found.get("host_gib", 0.0))
    if found.get("error"):
        return Compared(row, found["error"], *cost)
    value = found[row.reading]
    if not row.is_size:
        value = value / UNIT_BYTES[row.unit.split()[0]]
    return Compared(row, value, *cost)


def stub_variables(row: Row) -> dict[str, str]:
    """The settings of the stub for a row, and of torch's allocator as torchtitan has it."""
    devices = min(row.ranks, DEVICES_OF_A_NODE)
    each_bytes, first_bytes, _ = nccl_bytes(gpu_named(row.gpu), devices, row.ranks // devices)
    variables = {
        **variables_of(row.gpu, row.kind, cudnn=False),
        "CUDA_STUB_DEVICES": str(devices),
        "CUDA_STUB_NCCL_MIB": str(each_bytes / MIB),
        "CUDA_STUB_NCCL_FIRST_MIB": str(first_bytes / MIB),
    }
    if row.kind == "titan":
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if row.kind == "gpt2":
        # Its out-of-memory message, which is the same on one GPU and on two: of 23.65 GiB, 22.76
        # are reserved and 20.31 MiB free.
        variables |= {"CUDA_STUB_CONTEXT_MIB": "890", "CUDA_STUB_NCCL_MIB": "0"}
    return {**variables, **row.device}


def found_on_stub(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Run rows of one device, kind and number of ranks in a process on the stub.

    Returns:
        Of each row what :func:`compared` takes.
    """
    trainings = [(row.kind, row.ranks, row.settings, _first_size(row)) for row in rows]
    variables = {**os.environ, **stub_variables(rows[0]), CHILD: json.dumps(trainings)}
    launcher = str(ROOT / "tests" / "cuda_stub" / "run")
    command = [launcher, sys.executable, "-m", "benchmarks.published_devices"]
    ran = subprocess.run(command, env=variables, check=False, stdout=subprocess.PIPE, text=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    found = [json.loads(line) for line in lines]
    if len(found) < len(trainings):
        missing = {"error": f"the process on the stub ended with {ran.returncode}"}
        found += [missing] * (len(trainings) - len(found))
    return found


def _first_size(row: Row) -> int | None:
    """The size that a row of samples begins with."""
    return max(1, int(row.published or 0)) if row.is_size else None


def run_trainings() -> None:
    """Run the trainings of this process on the stub, and print what each found."""
    # Its imports are shared by the processes of the trainings.
    import benchmarks.published_devices_steps  # noqa: F401

    for kind, ranks, settings, size in json.loads(os.environ[CHILD]):
        if size is None:
            found = _in_fork(kind, ranks, settings)
        else:
            found = _largest(kind, ranks, settings, size)
        print(json.dumps({**found, "settings": settings}), flush=True)


def _largest(kind: str, ranks: int, settings: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The largest size that trains, of those beside this one."""

    def run(samples: int) -> dict[str, Any]:
        return _in_fork(kind, ranks, {**settings, "samples": samples})

    found = run(size)
    if "error" not in found:
        for larger in range(size + 1, size + 1 + MOST_LARGER_SIZES):
            tried = run(larger)
            if "error" in tried:
                break
            size, found = larger, tried
    while size and found.get("error") == OUT_OF_MEMORY:
        size -= 1
        found = run(size) if size else {}
    return {**found, "largest": size}


def _in_fork(kind: str, ranks: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a training finds in a copy of this process, in which CUDA has not started."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with os.fdopen(writer, "w") as file:
            json.dump(_trained(kind, ranks, settings), file)
        sys.stderr.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return {"error": f"the training ended with {os.waitstatus_to_exitcode(status)}"}
    found: dict[str, Any] = json.loads(text)
    return found


def _trained(kind: str, ranks: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train in this process as the first of the ranks, and read the counters."""
    from benchmarks.published_devices_steps import KINDS
    from lightning_batchmem.simulated_gpu.child import set_rank_variables
    from lightning_batchmem.simulated_gpu.one_rank import meet_nobody
    from lightning_batchmem.simulated_gpu.values import Values

    # What Lightning and transformers print is not part of the answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if ranks > 1:
        set_rank_variables(min(ranks, DEVICES_OF_A_NODE), ranks)
        meet_nobody(ranks)
    Values().enter()
    found = peaks_of(partial(KINDS[kind], **settings))
    host_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {**found, "cpu_seconds": time.process_time(), "host_gib": host_gib}


def columns(known: Compared, experiments: Mapping[str, Compared]) -> dict[str, str]:
    """A row of the table."""
    row = known.row
    as_it_was = experiments.get(row.name)
    return {
        "row": row.name,
        "source": row.source,
        "GPU": row.gpu,
        "ranks": str(row.ranks),
        "published": _number(known.published),
        "simulated": _number(known.simulated),
        "unit": row.unit,
        "error %": _error(known),
        "goal %": f"{row.goal_percent:g}" if row.goal_percent else "the same",
        "reached": "yes" if known.is_reached else "no",
        "as it was, error %": _error(as_it_was) if as_it_was else "",
        "CPU s": f"{known.cpu_seconds:.1f}",
        "host GiB": f"{known.host_gib:.1f}",
    }


def _error(known: Compared) -> str:
    if known.error is not None:
        return f"{100 * known.error:+.1f}"
    return "the same" if known.is_reached else "not the same"


def _with_unit(known: Compared) -> str:
    return _error(known) + (" %" if known.error is not None else "")


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.2f}"


def summary(name: str, known: Sequence[Compared]) -> str:
    """How many rows reach their goal, and the largest error."""
    numbers = [each for each in known if each.error is not None]
    others = [each for each in known if each.error is None]
    parts = []
    if numbers:
        errors = {each.row.name: each.error or 0.0 for each in numbers}
        worst = max(errors, key=lambda row: abs(errors[row]))
        reached = sum(each.is_reached for each in numbers)
        parts.append(
            f"{reached} of {len(numbers)} peaks within the goal, largest error"
            f" {errors[worst]:+.1%} ({worst})"
        )
    for word, are_sizes in (("verdicts", False), ("largest sizes", True)):
        chosen = [each for each in others if each.row.is_size == are_sizes]
        if chosen:
            right = sum(each.is_reached for each in chosen)
            parts.append(f"{right} of {len(chosen)} {word} the same")
    return f"{name}: {'; '.join(parts)}"


def notes_of(known: Sequence[Compared], tried: Mapping[str, Compared]) -> list[str]:
    """The summaries: of all rows, of each source, and with rows as they were in their version."""
    notes = [summary("all", known)]
    as_they_were = [tried.get(each.row.name, each) for each in known]
    notes.append(summary("all, with the experiments in the place of their rows", as_they_were))
    for source in dict.fromkeys(each.row.source for each in known):
        notes.append(summary(source, [each for each in known if each.row.source == source]))
    return notes


def explanations(known: Sequence[Compared], tried: Mapping[str, Compared]) -> list[str]:
    """Why rows do not reach their goal."""
    notes = []
    for each in known:
        if each.is_reached:
            continue
        reasons = [each.row.remark] if each.row.remark else []
        if each.row.name in tried:
            as_it_was = tried[each.row.name]
            reasons.append(f"{as_it_was.row.experiment}: {_with_unit(as_it_was)}")
        reason = "; ".join(reasons) or "not explained"
        notes.append(f"{each.row.name}, {_with_unit(each)}: {reason}")
    return notes


def text_of(known: Sequence[Compared], experiments: Sequence[Compared]) -> str:
    """The page."""
    tried = {each.row.name: each for each in experiments}
    table = markdown([columns(each, tried) for each in known], notes_of(known, tried))
    parts = [machine(), table]
    if reasons := explanations(known, tried):
        parts.append("## Rows outside of their goal\n\n" + _list(reasons))
    sources = json.loads(ROWS.read_text())["sources"]
    used = dict.fromkeys(each.row.source for each in known)
    parts.append("## Sources\n\n" + _list([f"{name}: {sources[name]}" for name in used]))
    assumed: dict[str, list[str]] = {}
    for each in known:
        assumed.setdefault(each.row.assumes, []).append(each.row.name)
    lines = [f"{text}: {', '.join(names)}" for text, names in assumed.items() if text]
    parts.append("## What is assumed\n\n" + _list(lines))
    return "\n\n".join(parts)


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def chosen_rows(rows: Sequence[Row], words: Sequence[str]) -> list[Row]:
    """The rows whose names have one of these words; all without words."""
    return [row for row in rows if not words or any(word in row.name for word in words)]


def main() -> None:
    if CHILD in os.environ:
        run_trainings()
        return
    parser: argparse.ArgumentParser = command_line(__doc__, writes=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    chosen = parser.parse_args()
    rows = chosen_rows(rows_of(ROWS.read_text()), chosen.only)
    known: list[Compared] = []

    def together(row: Row) -> tuple[Any, ...]:
        return row.gpu, row.kind, row.ranks, row.device

    for _, group in groupby(rows, key=together):
        ran = list(group)
        for row, found in zip(ran, found_on_stub(ran), strict=True):
            known.append(compared(row, found))
            print(columns(known[-1], {}), file=sys.stderr, flush=True)
    experiments = [each for each in known if each.row.experiment]
    text = text_of([each for each in known if not each.row.experiment], experiments)
    print(text)
    if chosen.write:
        write_page(RESULTS / "published_devices.md", text)


if __name__ == "__main__":
    main()
