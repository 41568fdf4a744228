"""The batch size and throughput of one project under several settings.

The file is not called ``compare.py``, because a function has that name.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from lightning_batchmem._lightning.packages import lightning_name
from lightning_batchmem.batch_finder import BatchFinder
from lightning_batchmem.find import find_batch_size
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, Line
from lightning_batchmem.state.snapshot import record_random_states

Make = Callable[[], tuple[Any, Any]]

_VARIANTS = {"plain": {}, "bf16-mixed": {"precision": "bf16-mixed"}}
_TRAINER = {"devices": 1, "max_epochs": 1, "logger": False}
# In columns. It is wider than any table, because rich would break the lines of a wider one.
_TABLE_WIDTH = 10_000


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
        if self.plan is None or self.plan.memory is None:
            return None
        memory = self.plan.memory
        return memory.lines[memory.phase_at(self.plan.batch_size)]

    @property
    def batch_size(self) -> int | None:
        """The largest batch size, in samples; ``None`` when the variant failed."""
        return None if self.plan is None else self.plan.batch_size

    @property
    def samples_per_second(self) -> float | None:
        """Throughput in the rehearsal of the largest size; ``None`` when it was not measured."""
        trials = () if self.plan is None else self.plan.trials
        for trial in reversed(trials):
            if trial.batch_size == self.batch_size and trial.step_seconds:
                return trial.batch_size / trial.step_seconds
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
        measured = [variant for variant in self.variants if variant.samples_per_second is not None]
        return max(measured, key=lambda variant: variant.samples_per_second or 0.0, default=None)

    def __repr__(self) -> str:
        sizes = [f"{variant.name} {variant.batch_size or 'failed'}" for variant in self.variants]
        return f"<Comparison: {', '.join(sizes)}>"

    def __str__(self) -> str:
        return "\n".join([self._table(), *self._sentences()])

    def _repr_markdown_(self) -> str:
        """The table in a notebook."""
        return self.to_markdown()

    def to_markdown(self) -> str:
        """The table in Markdown, with a list of what failed."""
        return "\n".join([self._table(), "", *(f"- {text}" for text in self._sentences())])

    def _table(self) -> str:
        """A Markdown table, whose cells are padded so that it can be read as plain text."""
        table = Table(box=MARKDOWN)
        table.add_column("variant")
        for name in ("fixed MiB", "MiB per sample", "largest size", "samples/s"):
            table.add_column(name, justify="right")
        table.add_column("limited by")
        lines = [variant.memory_line for variant in self.variants]
        columns = [
            [variant.name.replace("|", r"\|") for variant in self.variants],
            _with_ratios([None if line is None else line.intercept / MIB for line in lines], 1),
            _with_ratios([None if line is None else line.slope / MIB for line in lines], 3),
            _with_ratios([variant.batch_size for variant in self.variants], 0),
            _with_ratios([variant.samples_per_second for variant in self.variants], 1),
            [_limit_text(variant) for variant in self.variants],
        ]
        for cells in zip(*columns, strict=True):
            table.add_row(*cells)
        console = Console(width=_TABLE_WIDTH, color_system=None, markup=False, emoji=False)
        with console.capture() as capture:
            console.print(table)
        header, rule, *rows = capture.get().strip().splitlines()
        # rich does not write the colons that align a column of numbers at the right.
        _, first, *numbers, last, _ = rule.split("|")
        rule = "|".join(["", first, *(f"{dashes[:-1]}:" for dashes in numbers), last, ""])
        return "\n".join([header, rule, *rows])

    def _sentences(self) -> list[str]:
        fastest = [] if self.fastest is None else [f"fastest under the limit: {self.fastest.name}"]
        failed = [
            f"{variant.name} failed: {variant.error}" for variant in self.variants if variant.error
        ]
        return [*fastest, *failed]


def _with_ratios(numbers: Sequence[float | None], digits: int) -> list[str]:
    """The numbers as text, all but the first with their ratio to the first."""
    texts = []
    for row, number in enumerate(numbers):
        text = "-" if number is None else f"{number:,.{digits}f}"
        if row > 0 and number is not None and numbers[0]:
            text += f" ({number / numbers[0]:.2f}x)"
        texts.append(text)
    return texts


def _limit_text(variant: Variant) -> str:
    return "failed" if variant.plan is None else variant.plan.limited_by.replace("_", " ")


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
        make: a function without arguments that returns ``(model, data)``; data is a datamodule,
            training loaders or ``None``. It is called for each variant.
        variants: name -> arguments of the Trainer, and optionally ``compile=True`` and
            ``transform``, a function of the model that changes it or returns another: one with
            activation checkpointing, for example. ``None``: plain and bf16-mixed.
        base: arguments of the Trainer for all variants.
        **options: arguments of :class:`~lightning_batchmem.BatchFinder`.

    Returns:
        The results; a variant that failed has its reason.

    Raises:
        ValueError: for an argument out of range, for variants that are no dictionary of
            dictionaries, and for more than one device.

    Example:
        >>> from lightning_batchmem import compare
        >>> print(compare(make, memory_limit="20GiB"))  # doctest: +SKIP
    """
    # BatchFinder raises an error for wrong options.
    BatchFinder(**options)
    variants = _VARIANTS if variants is None else variants
    check_variants(variants)
    settings = {name: {**(base or {}), **variant} for name, variant in variants.items()}
    for name, arguments in settings.items():
        check_one_device(name, arguments)
    results = []
    for number, (name, arguments) in enumerate(settings.items(), start=1):
        sys.stderr.write(f"compare: variant {number} of {len(settings)}: {name}\n")
        with _restored_process():
            results.append(_search(name, make, arguments, options))
    return Comparison(tuple(results))


def check_variants(variants: Any) -> None:
    """Raise a ValueError unless these are variants: name -> arguments of the Trainer."""
    if not isinstance(variants, Mapping):
        raise ValueError(f"variants must be a dictionary, got {type(variants).__name__}")
    for name, arguments in variants.items():
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise ValueError(
                "variants must have a name and a dictionary of arguments each, got"
                f" {name!r}: {arguments!r}"
            )


def check_one_device(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError unless these arguments of the Trainer are those of one device."""
    devices = arguments.get("devices", 1)
    nodes = arguments.get("num_nodes", 1)
    is_one_device = devices in (1, "1") or (isinstance(devices, list) and len(devices) == 1)
    if not is_one_device or nodes != 1:
        raise ValueError(
            f"devices must be one device, got {devices!r} on {nodes} nodes in {name!r}"
        )


def make_trainer(make: Make, arguments: Mapping[str, Any]) -> tuple[Trainer, LightningModule, Any]:
    """Make the model, its Trainer and its data, and change the model as the arguments require."""
    trainer_arguments = {**_TRAINER, **arguments}
    is_compiled = trainer_arguments.pop("compile", None)
    transform = trainer_arguments.pop("transform", None)
    made = make()
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"make must return (model, data), got {type(made).__name__}")
    model, data = made
    if transform is not None:
        changed = transform(model)
        model = model if changed is None else changed
    # A compiled model wraps the module.
    trainer_class = lightning_name(getattr(model, "_orig_mod", model), "trainer.Trainer")
    try:
        trainer = trainer_class(**trainer_arguments)
    # The two packages of Lightning have their own exceptions for wrong arguments.
    except Exception as error:
        raise ValueError(str(error)) from error
    if is_compiled:
        model = torch.compile(model)
    return trainer, model, data


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
def _restored_process() -> Iterator[None]:
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
