"""Simulations of the command line: their words, and what they print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_batchmem.check import HOST, StepMemory
from lightning_batchmem.plan.options import SearchOptions, bytes_in
from lightning_batchmem.simulated_gpu.gpus import CONTEXT_BYTES, gpu_named
from lightning_batchmem.simulated_gpu.launch import Outcome, Program, kernels_of, run
from lightning_batchmem.simulated_gpu.report import table_of, text_of


def with_program_as_list(words: list[str]) -> list[str]:
    """The words of a command line, with the program of ``simulate`` and its arguments as a list.

    These arguments may have the names of options. An option becomes one word with its value, so
    that an unknown one is an error of its own.

    Raises:
        ValueError: if there is no GPU, or no program.
    """
    if words[:1] != ["simulate"]:
        return words
    joined = words[:1]
    remaining = words[1:]
    has_gpus = False
    while remaining:
        word = remaining.pop(0)
        if word.startswith("--"):
            # Every option but --help has a value.
            if remaining and "=" not in word and word != "--help":
                word = f"{word}={remaining.pop(0)}"
        elif word != "-h":
            if has_gpus:
                return [*joined, json.dumps([word, *remaining])]
            has_gpus = True
        joined.append(word)
    if not {"-h", "--help"} & set(joined):
        raise ValueError(
            "simulate must be followed by a GPU and a program, as in `simulate RTX-4090 train.py`;"
            " `simulate --list` prints the GPUs"
        )
    return joined


def given_options(options: SearchOptions) -> dict[str, Any]:
    """The options that differ from the defaults of ``simulate``.

    Where there are none, those of the project's own BatchFinder hold.
    """
    defaults = asdict(SearchOptions(objective="memory", min_steps_per_epoch=None))
    return {name: value for name, value in asdict(options).items() if value != defaults[name]}


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


def simulate(program: Program, gpus: str, context: str, options: Mapping[str, Any]) -> Findings:
    """Search on each GPU, one after another.

    Args:
        program: the program.
        gpus: the names of the GPUs, with commas between them.
        context: the memory that the CUDA context takes, such as ``"300MiB"``.
        options: arguments of BatchFinder.

    Raises:
        ValueError: for a GPU or an option that cannot be simulated.
    """
    if options.get("objective") == "throughput":
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


def memory_on(gpu: str, make: str, trainer: Mapping[str, Any]) -> tuple[StepMemory, list[str]]:
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
    program = Program("memory_test", make, trainer=trainer)
    outcome = run(program, gpu_named(gpu), CONTEXT_BYTES, {})
    device = device_name(gpu)
    if outcome.memory is None:
        raise ValueError(f"{device}: {outcome.error or outcome.nothing_fits}")
    remarks = [f"memory of a step on a {device}; nothing here ran on a GPU"]
    return outcome.memory, remarks + [f"note: {text}" for text in outcome.assumptions]
