"""The batch size and throughput of one project under several settings.

The file is not called ``compare.py``, because a function has that name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from lightning_batchmem.batch_finder import BatchFinder
from lightning_batchmem.new_process import (
    NotImportableError,
    call_in_new_process,
    end_repeated_script,
)
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, Line
from lightning_batchmem.variant import Make, check_one_device, make_and_find

_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "checkpointing": {"checkpoint": True},
    "both": {"precision": "bf16-mixed", "checkpoint": True},
}
# In columns. It is wider than any table, because rich would break the lines of a wider one.
_TABLE_WIDTH = 10_000


@dataclass(frozen=True)
class Variant:
    """The result of one variant.

    Args:
        name: its name.
        plan: the plan of its search; ``None`` when it failed.
        error: why it failed; empty otherwise.
        checkpointed: the blocks that were chosen for activation checkpointing, for example ``"4 of
            6 Block"``; empty if none were chosen.
    """

    name: str
    plan: Plan | None
    error: str = ""
    checkpointed: str = ""

    @property
    def label(self) -> str:
        """The name, and the blocks that were chosen."""
        return f"{self.name} ({self.checkpointed})" if self.checkpointed else self.name

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
        notes: what else a person should know, a sentence each.
    """

    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()

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
            [variant.label.replace("|", r"\|") for variant in self.variants],
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
        return [*fastest, *failed, *self.notes]


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

    Each setting runs in a new process on one device.

    Args:
        make: a function without arguments that returns ``(model, data)``; data is a datamodule,
            training loaders or ``None``. If a new process cannot import it, as in a notebook, the
            variants run in this process.
        variants: name -> arguments of the Trainer, and optionally ``checkpoint={BlockClass, ...}``
            (activation checkpointing of every module of these classes; ``True``: of the repeated
            blocks with the largest activations, which one step shows; ``"auto"`` with ``fit=256``:
            of the fewest of these blocks with which 256 samples are predicted to fit, after a
            search of at most 8 samples), ``compile=True`` and
            ``transform``, a function of the model that changes it or returns another. ``None``:
            plain, bf16-mixed, checkpointing, and both.
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
    end_repeated_script()
    # BatchFinder raises an error for wrong options.
    BatchFinder(**options)
    variants = _VARIANTS if variants is None else variants
    check_variants(variants)
    settings = {name: {**(base or {}), **variant} for name, variant in variants.items()}
    for name, arguments in settings.items():
        check_one_device(name, arguments)
    console = Console(stderr=True, highlight=False, markup=False)
    results = []
    notes: list[str] = []
    for number, (name, arguments) in enumerate(settings.items(), start=1):
        console.print(f"compare: variant {number} of {len(settings)}: {name}")
        work = (name, make, arguments, options)
        if not notes:
            try:
                result = call_in_new_process(_search_variant, *work)
            except ChildProcessError as error:
                result = Variant(name, None, str(error))
            except NotImportableError as error:
                notes.append(
                    "The variants ran in this process, one after another, because a new one cannot"
                    f" import them: {error}."
                )
                console.print(notes[-1])
        if notes:
            result = _search_variant(*work)
        results.append(result)
    return Comparison(tuple(results), tuple(notes))


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


def _search_variant(
    name: str, make: Make, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> Variant:
    try:
        found = make_and_find(make, arguments, options)
    # A variant that fails is a row of the table, whatever the reason.
    except Exception as error:  # noqa: BLE001
        return Variant(name, None, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return Variant(name, found.plan, checkpointed=found.checkpointed)
