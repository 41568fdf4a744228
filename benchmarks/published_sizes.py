"""Do the sizes of a simulated RTX 3090 equal those that timm published? One table.

timm published the batch size with which each of its models trained on an RTX 3090: the first of
512, 384, 256, 192, ... that did. ``published_list`` has the rule by which models were chosen, and
``benchmarks/published`` the figures. Each model runs on the stub of the CUDA runtime, on which this
command starts a process for each row:

- ``ladder`` is the first of the same sizes that trains there, with the same step. It should equal
  the published size.
- ``search`` is the size that ``find_batch_size_of_loop`` finds with this step, by default within
  95 % of the free memory. The published ladder leaves a bracket for it: from the published size up
  to, and without, the rung above.

The settings of a row are in the head of its columns:

- cuDNN: ``off`` (kernels of PyTorch itself), ``heuristics`` (cuDNN without a device, which is
  asked for plans), ``benchmark`` (all plans of cuDNN are tried, as for the published sizes).
- the context in MiB: 1300 for CUDA 11.3, and 426 for today (see :data:`CONTEXTS`).

The step is that of ``benchmark.py`` in huggingface/pytorch-image-models at commit aa4b5850, with
what differed in torch 1.12: gradients are set to zero and not released, SGD is a loop over the
weights, and there is no fused attention.

    # the whole table of one setting; an environment with a CUDA build of torch, timm 1.0.31 and
    # torchvision; a quarter of an hour on one core
    python -m benchmarks.published_sizes --cudnn off --contexts 1300 426
    # some of its rows
    python -m benchmarks.published_sizes --only vgg16 pit_s_224
    # all plans of cuDNN, for every eighth model
    python -m benchmarks.published_sizes --cudnn benchmark --every-eighth
    # experiments for rows that miss: also the largest size that trains, within 1 %; and the search
    # on a larger device, 95 % of whose free memory is the free memory of the RTX 3090
    python -m benchmarks.published_sizes --only vgg16 --parts largest search-all
    # also to benchmarks/results/published, after each row; rows that are there already are kept
    python -m benchmarks.published_sizes --write --missing
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import itertools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import (
    CHILD_VARIABLE,
    ROOT,
    command_line,
    machine,
    markdown,
    one_line,
    read_rows,
    write_page,
    write_rows,
)
from benchmarks.published_list import FOLDER, Chosen, ladder, read_chosen, size_above
from benchmarks.search import largest_that
from lightning_batchmem import find_batch_size_of_loop
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Trial
from lightning_batchmem.simulated_gpu.gpus import CONTEXT_BYTES, CONTEXT_SOURCE, gpu_named
from lightning_batchmem.simulated_gpu.launch import kernels_of
from lightning_batchmem.state.saved_storages import SavedStorages

MIB = 2**20

GPU = gpu_named("RTX-3090")

CONTEXTS = {
    1300: "CUDA 11.3: before CUDA 11.7 all kernels were loaded at once, which took more than"
    " 1,000 MB (pytorch/pytorch#107667)",
    CONTEXT_BYTES // MIB: f"today's default of simulate ({CONTEXT_SOURCE})",
}
"""MiB of the context -> what they stand for."""

CUDNN_MODES = ("off", "heuristics", "benchmark")

LIMIT_SHARE = SearchPolicy().rehearsal.limit_share

STEPS = 3
"""Steps of a size; the first has no momentum, and the others allocate the same."""

RESULTS_PATH = ROOT / "benchmarks" / "results" / "published" / "published_sizes.json"

MISSES_PATH = FOLDER / "timm_misses.json"
"""Model -> why a size of it misses, where an experiment outside of the table shows it."""

CHOSEN = {one.model: one for one in read_chosen()}

PARTS = ("ladder", "search", "largest", "search-all")

EVERY_EIGHTH = list(CHOSEN)[4::8]
"""The models for cuDNN's benchmark mode, which takes minutes for each."""

FORK = multiprocessing.get_context("fork")

OUTCOMES = {"ok": "", "out_of_memory": "!", "allocator_retry": "~"}
"""Outcome of a trial -> its mark in the list of what a search tried."""


@dataclass(frozen=True)
class Setting:
    """What the sizes of a row depend on, apart from the model."""

    cudnn: str
    context_mib: int


class Training:
    """A model and its optimizer on the device, as the published script makes them."""

    def __init__(self, on_host: nn.Module, image: int) -> None:
        from timm.optim import create_optimizer_v2

        self.image = image
        self.model = copy.deepcopy(on_host).to("cuda").train()
        self.optimizer = create_optimizer_v2(self.model, opt="sgd", lr=1e-4, foreach=False)
        self.loss = nn.CrossEntropyLoss()

    def images(self, count: int) -> Tensor:
        """Random images, of shape ``(count, 3, height, width)``."""
        return torch.randn(count, 3, self.image, self.image, device="cuda")

    def step(self, images: Tensor) -> None:
        # The default of torch 1.12; that of 2.0 and later releases the gradients.
        self.optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.float16):
            output = self.model(images)
            if isinstance(output, tuple):
                output = output[0]
            target = torch.empty(len(images), device="cuda", dtype=torch.long).random_(1000)
            self.loss(output, target).backward()
        self.optimizer.step()


def run_ladder(on_host: nn.Module, image: int) -> dict[str, Any]:
    """The first rung that trains, or 0, and its memory.

    As in the published script, any ``RuntimeError`` leads to the next rung, and the training of a
    rung is alive until that of the next one is made. ``other_errors`` has those that are no lack of
    memory.
    """
    other_errors = []
    training = None
    for size in ladder():
        try:
            torch.cuda.empty_cache()
            training = Training(on_host, image)
            images = training.images(size)
            torch.cuda.reset_peak_memory_stats()
            for _ in range(STEPS):
                training.step(images)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                other_errors.append(f"{size}: {one_line(error)}")
            continue
        return {
            "ladder": size,
            "peak_mib": torch.cuda.max_memory_allocated() // MIB,
            "reserved_mib": torch.cuda.max_memory_reserved() // MIB,
            "other_errors": other_errors,
        }
    return {"ladder": 0, "other_errors": other_errors}


def trains(on_host: nn.Module, image: int, size: int) -> bool:
    torch.cuda.empty_cache()
    try:
        training = Training(on_host, image)
        images = training.images(size)
        for _ in range(STEPS):
            training.step(images)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def tried(trials: tuple[Trial, ...]) -> str:
    """The sizes of a search in their order: p probe, r rehearsal, ! out of memory, ~ retries."""
    return " ".join(
        f"{trial.batch_size}{trial.kind[0]}{OUTCOMES.get(trial.outcome, '?')}" for trial in trials
    )


def run_search(on_host: nn.Module, image: int) -> dict[str, Any]:
    """The size that the search finds, or its error."""
    gc.collect()
    torch.cuda.empty_cache()
    training = Training(on_host, image)
    # As in simulate: nobody needs the weights after the search.
    SavedStorages.largest_bytes = MIB
    try:
        plan = find_batch_size_of_loop(
            training.step,
            training.images,
            model=training.model,
            optimizer=training.optimizer,
        )
    # A search may end with any error, and the error is its result.
    except Exception as error:  # noqa: BLE001
        return {"search": 0, "search_error": one_line(error)}
    return {"search": plan.batch_size, "tried": tried(plan.trials)}


def run_part(part: str, on_host: nn.Module, chosen: Chosen) -> dict[str, Any]:
    """The values of one part of a row."""
    if part == "ladder":
        return run_ladder(on_host, chosen.image)
    if part == "largest":
        fits = functools.partial(trains, on_host, chosen.image)
        return {part: largest_that(fits, chosen.batch_size, growth=1.3, resolution=0.01)}
    found = run_search(on_host, chosen.image)
    if part == "search":
        return found
    return {"search_all": found["search"], "search_all_error": found.get("search_error")}


def measure(sender: Connection, chosen: Chosen, cudnn: str, parts: list[str]) -> None:
    """Measure a row, or some parts of it, and send the values of each part."""
    # timm is only in the environment of this benchmark.
    import timm

    try:
        torch.backends.cudnn.benchmark = cudnn == "benchmark"
        if torch.backends.cudnn.enabled == (cudnn == "off"):
            raise RuntimeError(f"cuDNN is {'on' if torch.backends.cudnn.enabled else 'off'} here")
        # The arguments are those of the published script.
        on_host = timm.create_model(chosen.model, drop_rate=0.0)
        for part in parts:
            start = time.process_time()
            # A search prints its plan.
            with contextlib.redirect_stdout(io.StringIO()):
                found = run_part(part, on_host, chosen)
            seconds = round(time.process_time() - start, 1)
            sender.send({**found, f"{part.replace('-', '_')}_cpu_seconds": seconds})
    # A model that ends with an error is a row of the table.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        sender.send({"error": one_line(error)})


def measured_in_fork(
    chosen: Chosen, cudnn: str, parts: list[str], limit_seconds: float
) -> dict[str, Any]:
    """Measure in a copy of this process, in which CUDA has not started.

    The copy starts in milliseconds, where a new process would import torch and timm first. It is
    killed after the time limit, and what it has sent before is kept.
    """
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=measure, args=(sender, chosen, cudnn, parts))
    process.start()
    sender.close()
    found: dict[str, Any] = {"error": None}
    end = time.monotonic() + limit_seconds
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            found |= receiver.recv()
        found["error"] = f"no end after {limit_seconds:g} s"
        process.kill()
    except EOFError:
        process.join()
        if process.exitcode:
            found["error"] = f"the process ended with {process.exitcode}"
    process.join()
    return found


def device_bytes(setting: Setting, parts: list[str]) -> int:
    """The memory of the device: that of the GPU, or the larger one for the part "search-all"."""
    if "search-all" not in parts:
        return GPU.memory_bytes
    context_bytes = setting.context_mib * MIB
    return context_bytes + math.ceil((GPU.memory_bytes - context_bytes) / LIMIT_SHARE)


def stub_variables(setting: Setting, parts: list[str]) -> dict[str, str]:
    """The variables of a process on the simulated GPU."""
    assert GPU.multiprocessors is not None
    assert GPU.l2_cache_bytes is not None
    major, minor = GPU.capability
    return {
        "CUDA_STUB_BYTES": str(device_bytes(setting, parts)),
        "CUDA_STUB_CAPABILITY": f"{major}.{minor}",
        "CUDA_STUB_KERNELS": str(kernels_of(GPU)[1]),
        "CUDA_STUB_SMS": str(GPU.multiprocessors),
        "CUDA_STUB_L2_MIB": str(GPU.l2_cache_bytes / MIB),
        "CUDA_STUB_NAME": f"simulated {GPU.name}",
        "CUDA_STUB_CONTEXT_MIB": str(setting.context_mib),
        "CUDA_STUB_CUDNN": "0" if setting.cudnn == "off" else "1",
        # A process that has looked for devices can be forked.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        # torch 1.12 has no fused attention.
        "TIMM_FUSED_ATTN": "0",
    }


def measured_on_stub(
    setting: Setting, parts: list[str], models: list[str], limit_seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The models and the values of these parts, as a process on the simulated GPU measures them.

    Raises:
        RuntimeError: if this process ends with an error.
    """
    launcher = str(ROOT / "tests" / "cuda_stub" / "run")
    command = [launcher, sys.executable, "-m", "benchmarks.published_sizes"]
    command += ["--only", *models, "--cudnn", setting.cudnn, "--parts", *parts]
    command += ["--seconds", str(limit_seconds)]
    variables = {**os.environ, **stub_variables(setting, parts), CHILD_VARIABLE: "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        for line in process.stdout:
            model, found = json.loads(line)
            yield model, found
    if process.returncode:
        raise RuntimeError(f"the process on the stub ended with {process.returncode}")


def ladder_verdict(published: int, found: int) -> str:
    """How the rung that trained lies to the published one; 0 is no rung."""
    if found == published:
        return "equal"
    if found == 0:
        return "without a size"
    # The rungs fall.
    rungs = list(ladder())
    higher_by = rungs.index(published) - rungs.index(found)
    count = abs(higher_by)
    return f"{count} rung{'s' * (count > 1)} {'higher' if higher_by > 0 else 'lower'}"


def search_verdict(published: int, found: int) -> str:
    """How the size of a search lies to the bracket that the published ladder leaves."""
    if found < published:
        return "below"
    return "inside" if found < size_above(published) else "above"


def kept_rows(path: Path) -> dict[tuple[str, Setting], dict[str, Any]]:
    """The rows of earlier runs, by model and setting."""
    return {
        (row["model"], Setting(row["cudnn"], row["context_mib"])): row for row in read_rows(path)
    }


def setting_text(row: dict[str, Any]) -> str:
    return f"{row['cudnn']} {row['context_mib']}"


def misses(row: dict[str, Any]) -> list[str]:
    """What of a row is not as published, in words; empty if all is."""
    published = row["published"]
    found = []
    if "ladder" in row and row["ladder"] != published:
        found.append(f"ladder {ladder_verdict(published, row['ladder'])}")
    if "search" in row and (verdict := search_verdict(published, row["search"])) != "inside":
        found.append(f"search {verdict}")
    return found


def columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the printed table, from the rows of one model in several settings."""
    first = rows[0]
    above = size_above(first["published"])
    cells = {
        "model": first["model"],
        "image": first["image"],
        "published": first["published"],
        "rung above": above,
    }
    for row in rows:
        setting = setting_text(row)
        if "ladder" in row:
            verdict = ladder_verdict(row["published"], row["ladder"])
            cells[f"ladder, {setting}"] = f"{row['ladder']} {verdict}"
            cells[f"peak MiB, {setting}"] = row.get("peak_mib")
        else:
            cells[f"ladder, {setting}"] = row["error"]
        if "largest" in row:
            cells[f"largest, {setting}"] = row["largest"]
        if "search_all" in row:
            cells[f"search with all memory, {setting}"] = row["search_all"]
        if "search" in row:
            verdict = search_verdict(row["published"], row["search"])
            cells[f"search, {setting}"] = f"{row['search']} {verdict}"
    return cells


def summary(setting: Setting, rows: list[dict[str, Any]]) -> str:
    """The rows of one setting together, in one line."""
    ladders = [ladder_verdict(row["published"], row["ladder"]) for row in rows if "ladder" in row]
    searches = [search_verdict(row["published"], row["search"]) for row in rows if "search" in row]
    counts = {verdict: ladders.count(verdict) for verdict in sorted(set(ladders) - {"equal"})}
    others = "".join(
        f", {count} {'is' if count == 1 else 'are'} {verdict}" for verdict, count in counts.items()
    )
    errors = sum(bool(row.get("error") or row.get("search_error")) for row in rows)
    return (
        f"cuDNN {setting.cudnn}, context {setting.context_mib} MiB: ladder {ladders.count('equal')}"
        f" of {len(ladders)} equal{others}; search {searches.count('inside')} of {len(searches)} in"
        f" the bracket, {searches.count('below')} below, {searches.count('above')} above; {errors}"
        " rows with an error"
    )


def cause_of(rows: list[dict[str, Any]], causes: dict[str, str]) -> str:
    """Why the rows of one model miss, as far as an experiment shows it."""
    model = rows[0]["model"]
    published = rows[0]["published"]
    found = [causes[model]] if model in causes else []
    ladders = {setting_text(row): row["ladder"] for row in rows if "ladder" in row}
    equal = [setting for setting, size in ladders.items() if size == published]
    if 0 < len(equal) < len(ladders):
        found.append(f"the ladder is equal with {' and '.join(equal)}")
    for row in rows:
        if "search below" in misses(row) and "search_all" in row:
            verdict = search_verdict(published, row["search_all"])
            found.append(
                f"without the {1 - LIMIT_SHARE:.0%} that a search leaves free it finds"
                f" {row['search_all']}, {verdict}"
            )
    return "; ".join(found) or "cause not found"


def notes_on(rows: list[dict[str, Any]]) -> list[str]:
    """What rows miss and why, and errors."""
    causes = json.loads(MISSES_PATH.read_text(encoding="utf-8")) if MISSES_PATH.exists() else {}
    by_model: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_model.setdefault(row["model"], []).append(row)
    notes = []
    for model, group in by_model.items():
        missed = [f"{setting_text(row)}: {', '.join(misses(row))}" for row in group if misses(row)]
        if missed:
            notes.append(f"{model} ({'; '.join(missed)}): {cause_of(group, causes)}.")
    for row in rows:
        errors = [row.get("error"), row.get("search_error"), *row.get("other_errors", [])]
        notes += [f"{row['model']}, {setting_text(row)}: {error}" for error in errors if error]
    return notes


def text_of(rows: list[dict[str, Any]]) -> str:
    """The table and its notes."""
    by_setting: dict[Setting, list[dict[str, Any]]] = {}
    by_model: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_setting.setdefault(Setting(row["cudnn"], row["context_mib"]), []).append(row)
        by_model.setdefault(row["model"], []).append(row)
    contexts = [f"Context of {mib} MiB: {source}" for mib, source in CONTEXTS.items()]
    notes = [summary(setting, group) for setting, group in by_setting.items()]
    table = markdown(
        [columns(group) for group in by_model.values()], [*notes, *contexts, *notes_on(rows)]
    )
    device = f"{GPU.name} with {GPU.memory_bytes:,} bytes"
    return f"{machine()}, timm {version('timm')}, {device}\n\n{table}"


def described(model: str, setting: Setting) -> dict[str, Any]:
    """The values of a row that are known before it is run."""
    chosen = CHOSEN[model]
    return {
        "model": model,
        "family": chosen.family,
        "image": chosen.image,
        "published": chosen.batch_size,
        "cudnn": setting.cudnn,
        "context_mib": setting.context_mib,
    }


def is_missing(row: dict[str, Any], parts: list[str]) -> bool:
    """Whether a row lacks one of these parts."""
    return any(part.replace("-", "_") not in row for part in parts)


def sorted_rows(rows: dict[tuple[str, Setting], dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in the order of the settings and of the chosen models."""
    order = {model: position for position, model in enumerate(CHOSEN)}

    def place(key: tuple[str, Setting]) -> tuple[int, int, int]:
        model, setting = key
        return order[model], CUDNN_MODES.index(setting.cudnn), -setting.context_mib

    return [rows[key] for key in sorted(rows, key=place)]


def write(rows: list[dict[str, Any]]) -> None:
    write_rows(RESULTS_PATH, rows)
    write_page(RESULTS_PATH.with_suffix(".md"), text_of(rows))


def main() -> None:
    parser = command_line(__doc__, CHOSEN, writes=True)
    parser.add_argument("--cudnn", nargs="+", default=["off"], choices=CUDNN_MODES)
    parser.add_argument(
        "--contexts", nargs="+", type=int, default=list(CONTEXTS), choices=CONTEXTS, metavar="MIB"
    )
    parser.add_argument("--every-eighth", action="store_true", help="six models, by position")
    parser.add_argument("--parts", nargs="+", default=["ladder", "search"], choices=PARTS)
    parser.add_argument("--seconds", type=float, default=600, help="time limit of a row")
    parser.add_argument("--missing", action="store_true", help="keep what is in benchmarks/results")
    chosen = parser.parse_args()
    models = EVERY_EIGHTH if chosen.every_eighth else chosen.only
    if CHILD_VARIABLE in os.environ:
        # Its copies need not import it.
        import timm  # noqa: F401

        for model in models:
            found = measured_in_fork(CHOSEN[model], chosen.cudnn[0], chosen.parts, chosen.seconds)
            print(json.dumps([model, found]), flush=True)
        return
    written = kept_rows(RESULTS_PATH)
    rows = {key: dict(row) for key, row in written.items()} if chosen.missing else {}
    settings = [Setting(mode, mib) for mode in chosen.cudnn for mib in chosen.contexts]
    asked = [(model, setting) for setting in settings for model in models]
    # "search-all" has another device.
    on_gpu = [part for part in chosen.parts if part != "search-all"]
    groups = [parts for parts in (on_gpu, ["search-all"]) if set(parts) & set(chosen.parts)]
    for setting, parts in itertools.product(settings, groups):
        missing = [model for model in models if is_missing(rows.get((model, setting), {}), parts)]
        if not missing:
            continue
        for model, found in measured_on_stub(setting, parts, missing, chosen.seconds):
            key = (model, setting)
            rows[key] = {**described(model, setting), **rows.get(key, {}), **found}
            print(rows[key], file=sys.stderr, flush=True)
            if chosen.write:
                written[key] = rows[key]
                write(sorted_rows(written))
    if chosen.write:
        # The causes may be new.
        write(sorted_rows(written))
    print(text_of(sorted_rows({key: rows[key] for key in asked})))


if __name__ == "__main__":
    main()
