"""The batch size and throughput of one project under several settings.

The file is not called ``compare.py``, because a function has that name.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

# This private module exists in torch 2.5 to 2.13.
from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint_module

from lightning_batchmem._lightning.packages import lightning_name
from lightning_batchmem.batch_finder import BatchFinder
from lightning_batchmem.factory import VARIABLE
from lightning_batchmem.find import find_batch_size
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, Line

Make = Callable[[], tuple[Any, Any]]

_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "checkpointing": {"checkpoint": True},
    "both": {"precision": "bf16-mixed", "checkpoint": True},
}
_BASE = {"devices": 1, "max_epochs": 1, "logger": False}
# This variable is set in the processes of a comparison.
_IN_VARIANT = "LIGHTNING_BATCHMEM_VARIANT"
_COLUMNS = ("variant", "fixed MiB", "MiB per sample", "largest size", "samples/s", "limited by")


@dataclass(frozen=True)
class Variant:
    """The result of one variant.

    Args:
        name: its name.
        plan: the plan of its search; ``None`` when it failed.
        error: why it failed; empty otherwise.
    """

    name: str
    plan: Plan | None
    error: str = ""

    @property
    def memory_line(self) -> Line | None:
        """Live bytes over samples in the phase with the peak; ``None`` without a fit."""
        memory = None if self.plan is None else self.plan.memory
        return None if memory is None else memory.lines[memory.phase_at(self.batch_size or 0)]

    @property
    def batch_size(self) -> int | None:
        """The largest batch size, in samples; ``None`` when the variant failed."""
        return None if self.plan is None else self.plan.batch_size

    @property
    def samples_per_second(self) -> float | None:
        """Throughput in the rehearsal of the largest size; ``None`` when it was not measured."""
        trials = [] if self.plan is None else self.plan.trials
        seconds = [
            t.step_seconds for t in trials if t.batch_size == self.batch_size and t.step_seconds
        ]
        return self.batch_size / seconds[-1] if self.batch_size and seconds else None


@dataclass(frozen=True)
class Comparison:
    """The results of :func:`compare`, in the order of the variants; ``print`` shows a table.

    Args:
        variants: one result for each variant.
        notes: what else a person should know, a sentence each.
    """

    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()

    @property
    def fastest(self) -> Variant | None:
        """The variant with the most samples per second under the limit.

        It is ``None`` when no variant was measured.
        """
        measured = [one for one in self.variants if one.samples_per_second is not None]
        return max(measured, key=lambda one: one.samples_per_second or 0.0, default=None)

    def __str__(self) -> str:
        rows = [_COLUMNS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *self._sentences()])

    def to_markdown(self) -> str:
        """The table in Markdown, with a list of what failed."""
        rows = [_COLUMNS, ("---", *["---:"] * (len(_COLUMNS) - 2), "---"), *self._rows()]
        lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
        return "\n".join([*lines, "", *(f"- {sentence}" for sentence in self._sentences())])

    def _rows(self) -> list[tuple[str, ...]]:
        lines = [one.memory_line for one in self.variants]
        columns: list[list[float | None]] = [
            [None if line is None else line.intercept / MIB for line in lines],
            [None if line is None else line.slope / MIB for line in lines],
            [one.batch_size for one in self.variants],
            [one.samples_per_second for one in self.variants],
        ]
        cells = [
            _cells(values, digits) for values, digits in zip(columns, (1, 3, 0, 1), strict=True)
        ]
        names = [one.name for one in self.variants]
        ends = [
            "failed" if one.plan is None else one.plan.limited_by.replace("_", " ")
            for one in self.variants
        ]
        return list(zip(names, *cells, ends, strict=True))

    def _sentences(self) -> list[str]:
        failed = [f"{one.name} failed: {one.error}" for one in self.variants if one.error]
        fastest = [] if self.fastest is None else [f"fastest under the limit: {self.fastest.name}"]
        return [*fastest, *failed, *self.notes]


def compare(
    make: Make,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    base: Mapping[str, Any] | None = None,
    **options: Any,
) -> Comparison:
    """Compute the batch size of one model under several settings.

    Each setting runs in a new process on one device.

    Args:
        make: a function without arguments that returns ``(model, data)``; data is a datamodule,
            training loaders or ``None``. If a new process cannot import it, as in a notebook, the
            variants run in this process.
        variants: name -> arguments of the Trainer, and optionally ``checkpoint={BlockClass, ...}``
            (activation checkpointing of every module of these classes; ``True``: of the most
            repeated one), ``compile=True`` and ``transform``, a function of the model that changes
            it or returns another. ``None``: plain, bf16-mixed, checkpointing, and both.
        base: arguments of the Trainer for all variants.
        **options: arguments of :class:`~lightning_batchmem.BatchFinder`.

    Returns:
        The results; a variant that failed has its reason.

    Raises:
        ValueError: for an argument out of range, and for more than one device.

    Example:
        >>> from lightning_batchmem import compare
        >>> print(compare(make, memory_limit="20GiB"))  # doctest: +SKIP
    """
    if os.environ.get(_IN_VARIANT):
        raise _ComparesAgainError
    variants = _VARIANTS if variants is None else variants
    # BatchFinder raises an error for wrong options.
    BatchFinder(**options)
    for name, variant in variants.items():
        arguments = {**_BASE, **(base or {}), **variant}
        devices = arguments["devices"]
        nodes = arguments.get("num_nodes", 1)
        is_one_device = devices in (1, "1") or (isinstance(devices, list) and len(devices) == 1)
        if not is_one_device or nodes != 1:
            raise ValueError(
                f"devices must be one device, got {devices!r} on {nodes} nodes in {name!r}"
            )
    console = Console(stderr=True)
    results = []
    why_here = ""
    for number, (name, variant) in enumerate(variants.items(), start=1):
        console.print(
            f"compare: variant {number} of {len(variants)}: {name}", highlight=False, markup=False
        )
        work = (make, variant, base or {}, options)
        result = {"not_importable": why_here} if why_here else _in_new_process(work)
        if "not_importable" in result:
            if not why_here:
                why_here = result["not_importable"]
                console.print(_here_text(why_here), highlight=False, markup=False)
            result = _run(*work)
        plan = Plan.from_json(json.dumps(result["plan"])) if "plan" in result else None
        results.append(Variant(name, plan, result.get("error", "")))
    return Comparison(tuple(results), (_here_text(why_here),) if why_here else ())


class _ComparesAgainError(BaseException):
    """Ends a script that runs again, without a guard, in the process of a variant.

    It is no ``Exception``, so ``except Exception`` in the script does not catch it.
    """


def _here_text(why: str) -> str:
    return (
        "The variants ran in this process, one after another, because a new one cannot import them:"
        f" {why}."
    )


def _run(make: Make, *settings: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of one variant, or why it failed."""
    try:
        return {"plan": json.loads(make_and_find(make, *settings).to_json())}
    # A variant that fails is a row of the table, whatever the reason.
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def make_and_find(
    make: Make, variant: Mapping[str, Any], base: Mapping[str, Any], options: Mapping[str, Any]
) -> Plan:
    """Make the model and its Trainer, change both as the variant requires, and search."""
    arguments = {**_BASE, **base, **variant}
    blocks = arguments.pop("checkpoint", None)
    is_compiled = arguments.pop("compile", None)
    transform = arguments.pop("transform", None)
    made = make()
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"make must return (model, data), got {type(made).__name__}")
    model, data = made
    if transform is not None:
        model = transform(model) or model
    trainer = lightning_name(model, "trainer.Trainer")(**arguments)
    if blocks:
        _checkpoint_blocks(model, blocks)
    if is_compiled:
        model = torch.compile(model)
    return find_batch_size(trainer, model, train_dataloaders=data, **options)


def _checkpoint_blocks(model: nn.Module, blocks: Any) -> None:
    classes = (_most_repeated(model),) if blocks is True else tuple(blocks)
    found = [module for module in model.modules() if isinstance(module, classes)]
    if not found:
        names = ", ".join(one.__name__ for one in classes)
        raise ValueError(
            f"checkpoint must name classes of modules in the model, got {names}, which it does not"
            " have"
        )
    for module in found:
        checkpoint_module(module)


def _most_repeated(model: nn.Module) -> type[nn.Module]:
    """The class of modules with children that the model contains most often.

    Of several such classes it is the one with the most parameters.
    """
    count: dict[type[nn.Module], list[int]] = {}
    for module in model.modules():
        if any(module.children()) and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            count.setdefault(type(module), []).append(sum(p.numel() for p in module.parameters()))
    repeated = {kind: sizes for kind, sizes in count.items() if len(sizes) > 1}
    if not repeated:
        raise ValueError(
            "checkpoint must name classes of blocks, got a model that has no block twice"
        )
    # A Sequential often groups blocks, so it is chosen only where no other class is repeated.
    own = {kind: sizes for kind, sizes in repeated.items() if kind is not nn.Sequential}
    return max(own or repeated, key=lambda kind: (len(repeated[kind]), sum(repeated[kind])))


def _in_new_process(work: tuple[Any, ...]) -> dict[str, Any]:
    """The result of :func:`_run` in a new process.

    If that process cannot import ``make`` or the variant, the result has the reason.
    """
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    try:
        payload = pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return {"not_importable": str(error)}
    needs_script = b"__main__" in payload
    if needs_script and (script is None or not Path(script).is_file()):
        return {"not_importable": "they are defined in a notebook or an interactive session"}
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "request"
        answer = Path(folder) / "answer"
        request.write_bytes(
            pickle.dumps((needs_script and script, main.__package__, sys.argv, payload))
        )
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        environment |= {
            _IN_VARIANT: "1",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        program = f"from {__name__} import _answer; _answer({str(request)!r}, {str(answer)!r})"
        # The program is this interpreter, and no shell is involved.
        process = subprocess.run([sys.executable, "-c", program], env=environment)  # noqa: S603
        if answer.exists():
            result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return result
    killed = ""
    if process.returncode == -9:
        killed = ", killed perhaps because the host's memory was full"
    return {"error": f"its process ended with exit code {process.returncode}{killed}"}


def _answer(request: str, answer: str) -> None:
    """Run in the new process: read the request of :func:`_in_new_process`, and write the result."""
    # The file was written by a process of the same user.
    script, package, arguments, payload = pickle.loads(Path(request).read_bytes())  # noqa: S301
    for name in ("lightning.pytorch", "pytorch_lightning"):
        # Lightning would otherwise print the same lines about devices for each variant.
        logging.getLogger(name).setLevel(logging.WARNING)
    sys.argv = arguments
    try:
        if script:
            _load_script(script, package)
        # The payload is from the same file.
        work = pickle.loads(payload)  # noqa: S301
    # A script may raise any error when it runs again.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        result = {"not_importable": f"{type(error).__name__}: {error}"}
    else:
        result = _run(*work)
    Path(answer).write_text(json.dumps(result), encoding="utf-8")


def _load_script(script: str, package: str | None) -> None:
    """Run the script up to its call of :func:`compare`.

    A script with the guard ``if __name__ == "__main__"`` runs without the code under it.
    """
    # The module has the name that multiprocessing gives it.
    main = types.ModuleType("__mp_main__")
    main.__file__ = script
    main.__package__ = package
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    with suppress(_ComparesAgainError):
        # The code is the user's own script, which already runs in the first process.
        exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))  # noqa: S102


def _cells(values: list[float | None], digits: int) -> list[str]:
    """The values, each but the first with its ratio to the first."""
    texts = ["-" if value is None else f"{value:,.{digits}f}" for value in values]
    first = values[0] if values else None
    ratios = ["" if not first or value is None else f" ({value / first:.2f}x)" for value in values]
    return [text + ratio for text, ratio in zip(texts, ["", *ratios[1:]], strict=False)]
