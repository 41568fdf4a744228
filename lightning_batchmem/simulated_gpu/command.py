"""Simulations of the command line: their words, and what they find."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_batchmem.check import HOST, MeasuredStep
from lightning_batchmem.plan.objectives import objective_of
from lightning_batchmem.plan.options import SearchOptions, bytes_in
from lightning_batchmem.plan.records import mib
from lightning_batchmem.script import Script
from lightning_batchmem.simulated_gpu.gpus import CONTEXT_BYTES, MOST_DEVICES, gpu_named
from lightning_batchmem.simulated_gpu.launch import Outcome, World, kernels_of, run
from lightning_batchmem.simulated_gpu.text import Table, text_of


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
    is_find = words[0] == "find"
    has_gpus = is_find
    while remaining:
        word = remaining.pop(0)
        if word.startswith("-") and word != "-m":
            # Every option but --help has a value.
            if remaining and "=" not in word and word not in ("-h", "--help"):
                word = f"{word}={remaining.pop(0)}"
        else:
            if is_find and is_function([word]):
                return [*joined, json.dumps([word]), *remaining]
            if has_gpus:
                return [*joined, json.dumps([word, *remaining])]
            has_gpus = True
        joined.append(word)
    # A configuration may name the program of find.
    if not is_find and not {"-h", "--help"} & set(joined):
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
        text: the plan, or what follows on the rows of a table; empty if there was no search.
    """

    outcomes: Sequence[Outcome]
    text: str

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
            f"simulated {outcome.name}: {outcome.error}"
            for outcome in self.outcomes
            if outcome.error
        ]

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


def worlds_of(devices: str | None, nodes: int | None, nccl: str | None) -> list[World]:
    """A world for each number of devices.

    Args:
        devices: numbers of GPUs of a node, with commas between them; ``None``: as the program has
            it.
        nodes: the number of nodes; ``None`` likewise.
        nccl: the memory that NCCL takes of each GPU, such as ``"500MiB"``; ``None``: a default.

    Raises:
        ValueError: for an argument that is wrong.
    """
    if nodes is not None and nodes < 1:
        raise ValueError(f"nodes must be at least 1, got {nodes}")
    nccl_bytes = None if nccl is None else _bytes_of("nccl", nccl)
    if devices is None:
        return [World(None, nodes, nccl_bytes)]
    numbers = [number.strip() for number in devices.split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(f"devices must be numbers such as 8 or 1,2,4,8, got {devices!r:.80}")
    most = max(map(int, numbers))
    if most > MOST_DEVICES:
        raise ValueError(
            f"devices must be at most {MOST_DEVICES}, which are those of a node, got {most}; use"
            " --nodes for more"
        )
    return [World(int(number), nodes, nccl_bytes) for number in numbers]


def simulate(
    program: Script,
    gpus: str,
    context: str,
    options: Mapping[str, Any],
    worlds: Sequence[World],
    show: Callable[[str], object],
) -> Findings:
    """Search on each GPU in each world, one after another.

    Args:
        program: the program.
        gpus: the names of the GPUs, with commas between them.
        context: the memory that the CUDA context takes, such as ``"300MiB"``.
        options: arguments of BatchFinder.
        worlds: the processes that train together.
        show: is called with each row of the table of several searches.

    Raises:
        ValueError: for a GPU or an option that cannot be simulated.
    """
    objective = options.get("objective", "memory")
    if objective_of(SearchOptions(objective=objective)).needs_times:
        raise ValueError("objective must be memory for a simulated GPU, which has no times")
    context_bytes = _bytes_of("context", context)
    nccl_bytes = worlds[0].nccl_bytes or 0
    named = [gpu_named(name.strip()) for name in gpus.split(",")]
    # Otherwise a GPU without kernels would end the command after minutes on others.
    for gpu in named:
        kernels_of(gpu)
        if context_bytes + nccl_bytes >= gpu.memory_bytes:
            nccl = f" and {mib(nccl_bytes)} for NCCL" if nccl_bytes else ""
            raise ValueError(
                f"context must be less than the memory of {gpu.name}, got {context}{nccl}"
            )
    searches = [(gpu, world) for gpu in named for world in worlds]
    if len(searches) == 1:
        outcome = run(program, named[0], context_bytes, options, worlds[0])
        return Findings([outcome], "" if outcome.error else text_of(outcome, context_bytes))
    outcomes: list[Outcome] = []
    for gpu, world in searches:
        outcomes.append(run(program, gpu, context_bytes, options, world, shows_output=False))
        if len(outcomes) == 1:
            table = Table(outcomes[0], [gpu.name for gpu in named])
            show(table.heading)
        show(table.row(outcomes[-1]))
    # The errors alone say why every row has failed.
    has_results = not all(outcome.error for outcome in outcomes)
    return Findings(outcomes, f"\n{table.remarks(outcomes, context_bytes)}" if has_results else "")


def _bytes_of(argument: str, text: str) -> int:
    count_bytes = int(bytes_in(text))
    if count_bytes == 0:
        raise ValueError(f"{argument} must be a size such as 300MiB, got {text!r:.80}")
    return count_bytes


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
