"""The batch size and throughput of one project under several settings.

The file is not called ``compare.py``, because a function has that name.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn import Module

from lightning_batchmem._lightning.trainer_state import in_every_package, lightning_name
from lightning_batchmem.batch_finder import BatchFinder
from lightning_batchmem.find import find_batch_size
from lightning_batchmem.plan.options import object_named
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.printing import table_text
from lightning_batchmem.plan.records import MIB, Line
from lightning_batchmem.state.snapshot import record_random_states

Make = Callable[[], Any]
"""A function that returns a module, or a module and its data."""

_VARIANTS = {"plain": {}, "bf16-mixed": {"precision": "bf16-mixed"}}
_TRAINER = {"devices": 1, "max_epochs": 1, "logger": False}
_HEADINGS = ("variant", "limited by", "fixed MiB", "MiB per sample", "largest size", "samples/s")
# The decimals of the last four of these columns.
_DECIMALS = (1, 3, 0, 1)


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
        """What tensors take over samples, in the phase with the peak; ``None`` without a fit."""
        if self.plan is None or self.plan.memory is None:
            return None
        memory = self.plan.memory
        return memory.lines[memory.phase_at(self.plan.batch_size)]

    @property
    def batch_size(self) -> int | None:
        """The largest batch size, in samples; ``None`` when the variant failed."""
        return None if self.plan is None else self.plan.batch_size

    @property
    def samples_per_s(self) -> float | None:
        """Throughput in the rehearsal of the largest size; ``None`` when it was not measured."""
        trials = () if self.plan is None else self.plan.trials
        for trial in reversed(trials):
            if trial.batch_size == self.batch_size and trial.samples_per_s:
                return trial.samples_per_s
        return None


@dataclass(frozen=True)
class Comparison:
    """The results of :func:`compare`, in the order of the variants; ``print`` shows a table.

    Args:
        variants: one result for each variant.
    """

    variants: tuple[Variant, ...]

    @property
    def fastest(self) -> Variant | None:
        """The variant with the most samples per second under the limit.

        It is ``None`` when no variant was measured.
        """
        measured = [variant for variant in self.variants if variant.samples_per_s is not None]
        return max(measured, key=lambda variant: variant.samples_per_s or 0.0, default=None)

    def __repr__(self) -> str:
        sizes = [f"{variant.name} {variant.batch_size or 'failed'}" for variant in self.variants]
        return f"<Comparison: {', '.join(sizes)}>"

    def __str__(self) -> str:
        """A table and a list of what failed, in Markdown."""
        rows = []
        first: list[float | None] = [None] * len(_DECIMALS)
        for variant in self.variants:
            numbers = _numbers(variant)
            cells = map(_with_ratio, numbers, first, _DECIMALS)
            limited_by = "failed" if variant.plan is None else variant.plan.limited_by
            rows.append([variant.name, limited_by, *cells])
            if len(rows) == 1:
                first = numbers
        lines = [table_text(_HEADINGS, rows, left=2), ""]
        if self.fastest is not None:
            lines.append(f"- fastest under the limit: {self.fastest.name}")
        lines += [f"- {one.name} failed: {one.error}" for one in self.variants if one.error]
        return "\n".join(lines)

    def _repr_markdown_(self) -> str:
        """The table in a notebook."""
        return str(self)


def _numbers(variant: Variant) -> list[float | None]:
    line = variant.memory_line
    of_line = [None, None] if line is None else [line.intercept / MIB, line.slope / MIB]
    return [*of_line, variant.batch_size, variant.samples_per_s]


def _with_ratio(number: float | None, first: float | None, decimals: int) -> str:
    """The number, and its ratio to the first variant's."""
    if number is None:
        return "-"
    text = f"{number:,.{decimals}f}"
    return f"{text} ({number / first:.2f}x)" if first else text


def compare(
    make: Make,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    base: Mapping[str, Any] | None = None,
    **options: Any,
) -> Comparison:
    """Compute the batch size of one model under several settings.

    The variants are searched in this process on one device, one after another. Nothing is trained,
    and each variant starts with the random states that the process has now.

    Args:
        make: a function without arguments that returns a module, or ``(module, data)``; data is a
            datamodule, training loaders or ``None``. It is called for each variant.
        variants: name -> arguments of the Trainer, and optionally ``compile=True`` and
            ``transform``, a function of the module that changes it or returns another: one with
            activation checkpointing, for example. ``None``: plain and bf16-mixed.
        base: arguments of the Trainer for all variants.
        **options: arguments of :class:`~lightning_batchmem.BatchFinder`.

    Returns:
        The results; a variant that failed has its reason.

    Raises:
        ValueError: for an argument out of range, for variants that are not a dictionary of
            dictionaries, and for more than one device.

    Example:
        >>> from lightning_batchmem import compare
        >>> print(compare(make, memory_limit="20GiB"))  # doctest: +SKIP
    """
    check_make(make)
    # Variants are compared by what fits.
    options = {"objective": "memory", **options}
    # BatchFinder raises an error for wrong options.
    BatchFinder(**options)
    settings = _settings(_VARIANTS if variants is None else variants, base or {})
    results = []
    for number, (name, arguments) in enumerate(settings.items(), start=1):
        sys.stderr.write(f"compare: variant {number} of {len(settings)}: {name}\n")
        with restored_process():
            results.append(_search(name, make, arguments, options))
    return Comparison(tuple(results))


def _settings(variants: object, base: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments of the Trainer for each variant."""
    if not isinstance(variants, Mapping):
        raise ValueError(f"variants must be a dictionary, got {type(variants).__name__}")
    settings = {}
    for name, arguments in variants.items():
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise ValueError(
                "variants must have a name and a dictionary of arguments each, got"
                f" {name!r}: {arguments!r}"
            )
        settings[name] = {**base, **arguments}
        check_one_device(name, settings[name])
    return settings


def function_named(target: str) -> Make:
    """The function ``make`` with the name ``module:name``."""
    make: Make = object_named(target)
    check_make(make)
    return make


def check_make(make: Make) -> None:
    """Raise a ValueError unless this is a function without arguments."""
    if isinstance(make, Module) or not callable(make):
        raise ValueError(
            "make must be a function that returns the module, such as lambda: MyModule(), got an"
            f" object of {type(make).__name__}"
        )
    try:
        # A decorator may pass arguments of its own.
        inspect.signature(make, follow_wrapped=False).bind()
    except TypeError as error:
        raise ValueError(f"make must be a function without arguments: {error}") from error


def is_one_device(devices: object) -> bool:
    """Whether this argument of a Trainer names one device."""
    return devices in (1, "1") or (isinstance(devices, list) and len(devices) == 1)


def check_one_device(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError unless these arguments of the Trainer mean one device."""
    devices = arguments.get("devices", 1)
    nodes = arguments.get("num_nodes", 1)
    if not is_one_device(devices) or nodes != 1:
        raise ValueError(
            f"devices must be one device, got {devices!r} on {nodes} nodes in {name!r}"
        )


def make_trainer(make: Make, arguments: Mapping[str, Any]) -> tuple[Trainer, LightningModule, Any]:
    """Make the module, its Trainer and its data, and change the module as the arguments require.

    Raises:
        ValueError: for something else than a module and data, and for wrong arguments.
    """
    trainer_arguments = {**_TRAINER, **arguments}
    is_compiled = trainer_arguments.pop("compile", False)
    transform = trainer_arguments.pop("transform", None)
    model, data = _model_and_data(make())
    if transform is not None:
        changed = transform(model)
        model = model if changed is None else changed
    trainer_class = lightning_name(getattr(model, "_orig_mod", model), "trainer.Trainer")
    try:
        trainer = trainer_class(**trainer_arguments)
    # The two packages of Lightning have their own exceptions for wrong arguments.
    except Exception as error:
        raise ValueError(str(error)) from error
    if is_compiled:
        model = torch.compile(model)
    return trainer, model, data


def _model_and_data(made: Any) -> tuple[Any, Any]:
    """What ``make`` has returned, with ``None`` as data if it is a module alone."""
    parts = made if isinstance(made, tuple) and made else (made,)
    # A compiled model wraps the module.
    module = getattr(parts[0], "_orig_mod", parts[0]) if len(parts) in (1, 2) else None
    is_trainer = isinstance(parts[-1], in_every_package("trainer.Trainer"))
    if is_trainer or not isinstance(module, in_every_package("core.LightningModule")):
        got = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"make must return a LightningModule, or (module, data), got {got}")
    return parts[0], parts[1] if len(parts) == 2 else None


def _search(
    name: str, make: Make, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> Variant:
    try:
        trainer, model, data = make_trainer(make, arguments)
        plan = find_batch_size(trainer, model, train_dataloaders=data, **options)
    # A variant that fails is a row of the table, whatever the reason.
    except Exception as error:  # noqa: BLE001
        return Variant(name, None, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return Variant(name, plan)


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore what a Trainer changes outside itself, and free the memory of a variant."""
    restore_random_states = record_random_states()
    # Strategies of several devices set variables and start a process group.
    environment = dict(os.environ)
    had_process_group = torch.distributed.is_initialized()
    # Arguments of the Trainer set these flags of torch.
    is_benchmarking = torch.backends.cudnn.benchmark
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        # A Trainer and its model refer to each other.
        gc.collect()
        torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
        torch.backends.cudnn.benchmark = is_benchmarking
        if torch.distributed.is_initialized() and not had_process_group:
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        restore_random_states()
