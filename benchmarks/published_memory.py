"""Do simulated GPUs need the memory that others measured on real ones? One table.

Each row of ``published/memory.json`` is a peak that others published together with its settings:
fine-tunings of LitGPT, steps of Lightning and torch, one rank of FSDP2, and benches of milabench.
The same steps run here on the stub of the CUDA runtime (``lightning_batchmem/simulated_gpu``), in a
process for each row. Rows were chosen by what is published, before they were run. The error is
simulated over published, less one. ``None`` as a published number means that memory ran out.

milabench published the memory of the device, which contains the CUDA context. So the *difference*
of two of its sizes is compared: from the smallest above 1 to the largest that takes at most 0.9 of
the card, where cached blocks still have room. Benches with tf32 repeat those with fp32 and fp16.

Versions differ from those of the measurements. A row whose error is above 5 % is explained by a
remark, or by an experiment: the same row with one thing as it was in the version that was measured.
Experiments have a table of their own, and do not count in the summaries.

An environment with a CUDA build of torch and what the rows import (Linux, x86-64):

    pip install -c constraints-cuda.txt -e ".[test]" torchvision transformers==4.49.0
    pip install --no-deps litgpt==0.5.13
    # the whole table; 25 minutes beside other work on two cores
    python -m benchmarks.published_memory
    # the rows whose names have one of these words; with cuDNN on the stub
    python -m benchmarks.published_memory --only bert "LoRA 1" --cudnn
    # write benchmarks/results/published/published_memory.md; with cuDNN: published_memory_cudnn.md
    python -m benchmarks.published_memory --write
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch

from benchmarks.common import ROOT, command_line, machine, markdown, one_line, write_page
from benchmarks.published_law import MILABENCH, memory_by_size, quantile
from lightning_batchmem.simulated_gpu.gpus import CONTEXT_BYTES, gpu_named
from lightning_batchmem.simulated_gpu.launch import kernels_of

ROWS = ROOT / "benchmarks" / "published" / "memory.json"
RESULTS = ROOT / "benchmarks" / "results" / "published"

MIB = 2**20
FULLEST_SHARE = 0.9
"""Of two sizes of milabench, the larger one takes at most this share of the highest reading."""
LARGE_ERROR = 0.05

CHILD = "PUBLISHED_MEMORY_CHILD"
"""Environment variable of the process on the stub: the rows to run there, as JSON."""

UNIT_BYTES = {"GB": 1e9, "GiB": 2**30, "MiB": MIB}

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Row:
    """A peak that others published.

    Args:
        name: name of the row.
        source: a key of the sources in the file.
        gpu: the GPU to simulate, as ``simulate --list`` names it.
        kind: the function of ``published_steps``.
        published: the number; ``None``: memory ran out; ``"trains"``: only that is known;
            ``"difference"``: it is that of two sizes of milabench.
        unit: unit of the number, and which reading of the allocator it is.
        settings: arguments of the function; ``bench`` names the bench of milabench.
        remark: why the published number cannot be compared.
        experiment: what is as it was in the measured version.
    """

    name: str
    source: str
    gpu: str
    kind: str
    published: float | str | None
    unit: str
    settings: Mapping[str, Any]
    remark: str = ""
    experiment: str = ""


@dataclass(frozen=True)
class Compared:
    """A row, and what the simulated GPU showed: a number in its unit, or a word."""

    row: Row
    published: float | str
    simulated: float | str

    @property
    def error(self) -> float | None:
        """Simulated over published, less one; ``None`` where one of them is a word."""
        if isinstance(self.published, str) or isinstance(self.simulated, str):
            return None
        return self.simulated / self.published - 1

    @property
    def is_right(self) -> bool:
        """Whether a row of words has the same word."""
        if self.published == "trains":
            return not isinstance(self.simulated, str)
        return self.published == self.simulated

    @property
    def is_far_off(self) -> bool:
        """Whether the row has to be explained."""
        return not self.is_right if self.error is None else abs(self.error) > LARGE_ERROR


def rows_of(text: str) -> list[Row]:
    """The rows in the text of the file, and after them its experiments."""
    known = json.loads(text)
    return [Row(**row) for row in [*known["rows"], *known["experiments"]]]


def sizes_of(measurements: Mapping[int, float], card_mib: float) -> tuple[int, int]:
    """The smallest size above 1, and the largest that leaves room on the card."""
    sizes = [
        size
        for size, memory_mib in measurements.items()
        if size > 1 and memory_mib <= FULLEST_SHARE * card_mib
    ]
    return min(sizes), max(sizes)


def milabench_sizes(row: Row) -> dict[int, float]:
    """The two sizes of a row of milabench, and the MiB that were measured at them."""
    benches = json.loads(MILABENCH.read_text())["cards"][row.gpu]
    card_mib = max(memory_mib for points in benches.values() for _, memory_mib, _ in points)
    measured = memory_by_size(benches[row.settings["bench"]])
    return {size: measured[size] for size in sizes_of(measured, card_mib)}


def trainings_of(row: Row) -> list[dict[str, Any]]:
    """The arguments of each training that a row needs: two for a difference."""
    settings = {name: value for name, value in row.settings.items() if name != "bench"}
    if row.published != "difference":
        return [settings]
    return [{**settings, "samples": size} for size in milabench_sizes(row)]


def compared(row: Row, peaks: Sequence[Mapping[str, Any]]) -> Compared:
    """Compare a row with the peaks of its trainings.

    Args:
        row: the row.
        peaks: of each training ``allocated`` and ``reserved`` bytes, or an ``error``.
    """
    published: float | str = OUT_OF_MEMORY if row.published is None else row.published
    if row.published == "difference":
        smaller_mib, larger_mib = milabench_sizes(row).values()
        published = larger_mib - smaller_mib
    errors = [peak["error"] for peak in peaks if peak.get("error")]
    if errors:
        return Compared(row, published, errors[0])
    # Such as "GB allocated", or "MiB reserved + 1343" with the context.
    unit, reading, *added = row.unit.replace("+ ", "").split()
    values = [peak[reading] / UNIT_BYTES[unit] for peak in peaks]
    simulated = values[-1] - (values[0] if len(values) > 1 else 0.0) + sum(map(float, added))
    return Compared(row, published, simulated)


def variables_of(gpu_name: str, kind: str, *, cudnn: bool) -> dict[str, str]:
    """The settings of the stub for a GPU, and of torch's allocator for a kind of training."""
    gpu = gpu_named(gpu_name)
    _, architecture = kernels_of(gpu)
    major, minor = gpu.capability
    variables = {
        "CUDA_STUB_BYTES": str(gpu.memory_bytes),
        "CUDA_STUB_CAPABILITY": f"{major}.{minor}",
        "CUDA_STUB_CONTEXT_MIB": str(CONTEXT_BYTES / MIB),
        "CUDA_STUB_KERNELS": str(architecture),
        "CUDA_STUB_NAME": f"simulated {gpu.name}",
        "CUDA_STUB_CUDNN": "1" if cudnn else "0",
        "OMP_NUM_THREADS": "1",
    }
    if gpu.multiprocessors is not None:
        variables["CUDA_STUB_SMS"] = str(gpu.multiprocessors)
    if gpu.l2_cache_bytes is not None:
        variables["CUDA_STUB_L2_MIB"] = str(gpu.l2_cache_bytes / MIB)
    # torchtitan sets this.
    if kind == "shard":
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return variables


def peaks_on_stub(rows: Sequence[Row], *, cudnn: bool) -> list[list[dict[str, Any]]]:
    """Run rows of one GPU and kind in a process on the stub.

    Returns:
        Of each row its peaks, as :func:`compared` takes them.
    """
    trainings = [(row.kind, settings) for row in rows for settings in trainings_of(row)]
    variables = {
        **os.environ,
        **variables_of(rows[0].gpu, rows[0].kind, cudnn=cudnn),
        CHILD: json.dumps(trainings),
    }
    launcher = str(ROOT / "tests" / "cuda_stub" / "run")
    command = [launcher, sys.executable, "-m", "benchmarks.published_memory"]
    ran = subprocess.run(command, env=variables, check=False, stdout=subprocess.PIPE, text=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    peaks = [json.loads(line) for line in lines]
    if len(peaks) < len(trainings):
        missing = {"error": f"the process on the stub ended with {ran.returncode}"}
        peaks += [missing] * (len(trainings) - len(peaks))
    ordered = iter(peaks)
    return [[next(ordered) for _ in trainings_of(row)] for row in rows]


def run_trainings() -> None:
    """Run the trainings of this process on the stub, and print the peaks of each.

    Each runs in a process of its own, which shares the imports.
    """
    from benchmarks.published_steps import KINDS
    from lightning_batchmem.simulated_gpu.values import Values

    for kind, settings in json.loads(os.environ[CHILD]):
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            if status:
                error = f"the training ended with {os.waitstatus_to_exitcode(status)}"
                print(json.dumps({"error": error}), flush=True)
            continue
        values = Values()
        # What a rank sends has no values here, and FSDP2 has its own dispatch.
        if kind != "shard":
            values.enter()
        peaks = peaks_of(partial(KINDS[kind], **settings))
        print(json.dumps({**peaks, "settings": settings}), flush=True)
        os._exit(0)


def peaks_of(train: Callable[[], Mapping[str, Any] | None]) -> dict[str, Any]:
    """The peaks of a training in this process, with what it returns, or why there are none."""
    try:
        more = train() or {}
    except torch.OutOfMemoryError:
        return {"error": OUT_OF_MEMORY}
    # A row that ends with an error is a row of the table.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return {"error": one_line(error)}
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        **more,
    }


def columns(known: Compared) -> dict[str, str]:
    """A row of the table."""
    error = known.error
    word = "the same" if known.is_right else "not the same"
    return {
        "row": known.row.name,
        "source": known.row.source,
        "GPU": known.row.gpu,
        "published": _number(known.published),
        "simulated": _number(known.simulated),
        "unit": known.row.unit + (", difference" if known.row.published == "difference" else ""),
        "error %": word if error is None else f"{100 * error:+.1f}",
    }


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def summary(name: str, known: Sequence[Compared]) -> str:
    """Median, 90th percentile and largest of the absolute errors, and the words that are right."""
    errors = {each.row.name: each.error for each in known if each.error is not None}
    words = [each for each in known if each.error is None]
    right = sum(each.is_right for each in words)
    text = f"{name}: {len(errors)} numbers"
    if errors:
        absolute = [abs(error) for error in errors.values()]
        largest = max(errors, key=lambda row: abs(errors[row]))
        text += (
            f", absolute error median {statistics.median(absolute):.1%}, 90th percentile"
            f" {quantile(absolute, 0.9):.1%}, largest {errors[largest]:+.1%} ({largest});"
            f" {sum(error < 0 for error in errors.values())} too low, above {LARGE_ERROR:.0%}:"
            f" {sum(error > LARGE_ERROR for error in absolute)}"
        )
    if words:
        text += f"; {right} of {len(words)} verdicts (trains, or memory runs out) are the same"
    return text


def notes_of(known: Sequence[Compared]) -> list[str]:
    """The summaries: of all rows, of those with and without convolutions, and of each source."""
    images = [each for each in known if each.row.kind == "milabench_images"]
    others = [each for each in known if each.row.kind != "milabench_images"]
    groups = {"all": known, "without convolutional networks": others}
    if images:
        groups["convolutional networks"] = images
    for source in dict.fromkeys(each.row.source for each in known):
        groups[source] = [each for each in known if each.row.source == source]
    return [summary(name, group) for name, group in groups.items()]


def explanations(known: Sequence[Compared], experiments: Sequence[Compared]) -> list[str]:
    """What explains the rows that are far off."""
    tried = {each.row.name: each for each in experiments}
    notes = []
    for each in known:
        name = each.row.name
        if not each.is_far_off:
            continue
        reason = each.row.remark or "not explained"
        if name in tried:
            reason = f"{tried[name].row.experiment}: {columns(tried[name])['error %']} %"
        notes.append(f"{name}, {columns(each)['error %']} %: {reason}")
    return notes


def table_of_experiments(known: Sequence[Compared]) -> str:
    """The table of the experiments."""
    rows = []
    for each in known:
        shown = columns(each)
        names = ("row", "published", "simulated", "unit", "error %")
        rows.append({**{name: shown[name] for name in names}, "as it was": each.row.experiment})
    return f"## Experiments\n\n{markdown(rows)}"


def main() -> None:
    if os.environ.get(CHILD):
        run_trainings()
        return
    parser = command_line(__doc__, writes=True)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="parts of names")
    parser.add_argument(
        "--cudnn",
        action=argparse.BooleanOptionalAction,
        default=os.environ.get("CUDA_STUB_CUDNN") == "1",
        help="cuDNN on the stub; default: as CUDA_STUB_CUDNN says",
    )
    chosen = parser.parse_args()
    text = ROWS.read_text()
    rows = [row for row in rows_of(text) if any(word in row.name for word in chosen.only)]
    known = []
    for _, group in groupby(rows, key=lambda row: (row.gpu, row.kind)):
        together = list(group)
        for row, peaks in zip(together, peaks_on_stub(together, cudnn=chosen.cudnn), strict=True):
            known.append(compared(row, peaks))
            print(columns(known[-1]), file=sys.stderr, flush=True)
    versions = []
    for package in ("litgpt", "transformers", "torchvision"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    head = f"{machine()}, {', '.join(versions)}, cuDNN {'on' if chosen.cudnn else 'off'}"
    experiments = [each for each in known if each.row.experiment]
    judged = [each for each in known if not each.row.experiment]
    sources = [f"{name}: {source}" for name, source in json.loads(text)["sources"].items()]
    parts = [head, markdown([columns(each) for each in judged], notes_of(judged))]
    if far_off := explanations(judged, experiments):
        parts.append("\n".join(["## Errors above 5 %", "", *[f"- {note}" for note in far_off]]))
    if experiments:
        parts.append(table_of_experiments(experiments))
    parts.append("\n".join(["## Sources", "", *[f"- {source}" for source in sources]]))
    page = "\n\n".join(parts)
    print(page)
    if chosen.write:
        name = "published_memory_cudnn.md" if chosen.cudnn else "published_memory.md"
        write_page(RESULTS / name, page)


if __name__ == "__main__":
    main()
