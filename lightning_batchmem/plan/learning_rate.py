"""What follows from the size: the micro batch that keeps a target, and the learning rate of another effective batch.

Pure: nothing here imports torch or Lightning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from lightning_batchmem.plan.memory_limit import check_positive

LearningRateScaling = Literal["linear", "sqrt"]

_WRITTEN: dict[LearningRateScaling, str] = {"linear": "linear", "sqrt": "square root"}


@dataclass(frozen=True)
class MicroBatch:
    """How an optimizer step is divided.

    Args:
        batch_size: samples in each micro batch, on each rank.
        accumulate_grad_batches: micro batches for each optimizer step.
        effective_batch_size: samples for each optimizer step, over all ranks.
        rounding: one sentence on what was asked for and what it became; empty when they are the same.
    """

    batch_size: int
    accumulate_grad_batches: int
    effective_batch_size: int
    rounding: str = ""


@dataclass(frozen=True)
class LearningRateRule:
    """What the literature does to the learning rate when the effective batch changes.

    Args:
        scaling: ``"linear"`` multiplies by the ratio of the batches, ``"sqrt"`` by its square root.
        source: authors, year and number of the paper.
        remark: one sentence on what the paper does besides, or does not say.
    """

    scaling: LearningRateScaling
    source: str
    remark: str


_GOYAL = LearningRateRule(
    "linear",
    "Goyal et al. 2017, arXiv 1706.02677",
    "The paper warms the rate up over the first epochs, which is left to the user.",
)

_MALLADI = LearningRateRule(
    "sqrt",
    "Malladi et al. 2022, arXiv 2205.10287",
    "The paper derives it for Adam and RMSprop without decoupled weight decay, and scales the constants of the moving"
    " averages and eps too, which is left to the user.",
)

# AdamW is Adam where it decays nothing; torch multiplies its decay by the learning rate, and so scales it along.
_RULES = {"SGD": _GOYAL, "Adam": _MALLADI, "AdamW": _MALLADI, "RMSprop": _MALLADI}
"""By the class name of the optimizer. Source: the two papers, on SGD (with momentum too), and on Adam and RMSprop."""


def micro_batch(target_batch_size: int, *, largest: int, ranks: int = 1, multiple_of: int | None = None) -> MicroBatch:
    """Divide an optimizer step into micro batches that fit, without changing its number of samples where that is cheap.

    Few large micro batches are better than many small ones; up to twice as many as are needed are accepted where
    that hits the target exactly. Otherwise as few as possible, of the size that comes nearest to the target.

    Args:
        target_batch_size: samples for each optimizer step, over all ranks.
        largest: the largest micro batch that fits, in samples for each rank.
        ranks: number of processes that train together.
        multiple_of: the micro batch is a multiple of it; ``None``: any size will do.

    Raises:
        ValueError: when an argument is not a positive whole number, or the target is less than the smallest step.

    Example:
        >>> micro_batch(1024, largest=300)
        MicroBatch(batch_size=256, accumulate_grad_batches=4, effective_batch_size=1024, rounding='')
    """
    check_positive("target_batch_size", target_batch_size)
    check_positive("largest", largest)
    check_positive("ranks", ranks)
    check_positive("multiple_of", multiple_of)
    unit = multiple_of or 1
    if largest < unit:
        raise ValueError(f"multiple_of must be at most the largest size that fits, {largest}, got {multiple_of}")
    if target_batch_size < ranks * unit:
        each = f"{unit} sample{'s' if unit > 1 else ''} for each of {ranks} rank{'s' if ranks > 1 else ''}"
        raise ValueError(f"target_batch_size must be at least {ranks * unit}, {each}, got {target_batch_size}")
    fewest = math.ceil(target_batch_size / (ranks * (largest // unit * unit)))
    exact = (k for k in range(fewest, 2 * fewest + 1) if target_batch_size % (k * ranks * unit) == 0)
    accumulate = next(exact, fewest)
    # To the nearest, half a unit up. Never above `largest`: at `fewest` the share is at most the largest multiple.
    step_unit = accumulate * ranks * unit
    batch_size = unit * ((2 * target_batch_size + step_unit) // (2 * step_unit))
    effective = batch_size * accumulate * ranks
    rounding = ""
    if effective != target_batch_size:
        on_ranks = f" on each of {ranks} ranks" if ranks > 1 else ""
        rounding = (
            f"{effective:,} samples per optimizer step instead of {target_batch_size:,}:"
            f" {accumulate:,} x {batch_size:,}{on_ranks}"
        )
    return MicroBatch(batch_size, accumulate, effective, rounding)


def scaled_learning_rate(
    learning_rate: float, *, rule: LearningRateScaling, effective_batch_size: int, base_batch_size: int
) -> float:
    """The learning rate for another effective batch.

    Args:
        learning_rate: the rate that was chosen for ``base_batch_size``.
        rule: ``"linear"`` or ``"sqrt"``; :func:`rule_for` has the sources.
        effective_batch_size: samples for each optimizer step from now on, over all ranks.
        base_batch_size: samples for each optimizer step that ``learning_rate`` was meant for, over all ranks.

    Raises:
        ValueError: for an unknown rule, a rate that is not a number of at least 0, or a size below 1.

    Example:
        >>> scaled_learning_rate(0.1, rule="sqrt", effective_batch_size=1024, base_batch_size=256)
        0.2
    """
    if not isinstance(learning_rate, Real) or isinstance(learning_rate, bool) or not 0 <= learning_rate < math.inf:
        raise ValueError(f"learning_rate must be a finite number of at least 0, got {learning_rate!r}")
    check_positive("effective_batch_size", effective_batch_size)
    check_positive("base_batch_size", base_batch_size)
    if rule not in _WRITTEN:
        raise ValueError(f'rule must be "linear" or "sqrt", got {rule!r}')
    return float(learning_rate) * _factor(rule, effective_batch_size / base_batch_size)


def rule_for(optimizer_name: str) -> LearningRateRule | None:
    """The rule that the literature gives for an optimizer; ``None`` where we know of none.

    Args:
        optimizer_name: name of the optimizer's class, such as ``"AdamW"``.

    Example:
        >>> rule_for("SGD").scaling, rule_for("Lion")
        ('linear', None)
    """
    return _RULES.get(optimizer_name)


def advice(
    optimizer_names: Sequence[str],
    *,
    effective_batch_size: int,
    base_batch_size: int,
    learning_rate: float | None = None,
) -> str:
    """What to tell a user whose effective batch changed, and who asked for no rule.

    Args:
        optimizer_names: names of the optimizers' classes; repetitions count once.
        effective_batch_size: samples for each optimizer step from now on, over all ranks.
        base_batch_size: samples for each optimizer step before.
        learning_rate: the rate of the module where it is known, to show what it would become.

    Returns:
        One or two sentences; empty when the effective batch did not change, or there is no optimizer.

    Raises:
        ValueError: for a size below 1.
    """
    check_positive("effective_batch_size", effective_batch_size)
    check_positive("base_batch_size", base_batch_size)
    if effective_batch_size == base_batch_size or not optimizer_names:
        return ""
    names_by_rule: dict[LearningRateRule | None, list[str]] = {}
    for name in dict.fromkeys(optimizer_names):
        names_by_rule.setdefault(rule_for(name), []).append(name)
    ratio = effective_batch_size / base_batch_size
    clauses = [_clause(rule, names, learning_rate, ratio) for rule, names in names_by_rule.items()]
    text = f"samples per optimizer step went from {base_batch_size:,} to {effective_batch_size:,}: {'; '.join(clauses)}"
    only = next(iter(names_by_rule)) if len(names_by_rule) == 1 else None
    if only is None:  # no single rule that the finder could apply
        return f"{text}."
    call = f'BatchFinder(lr_scaling="{only.scaling}", base_batch_size={base_batch_size})'
    return f"{text}, as {call} does. {only.remark}"


def _clause(rule: LearningRateRule | None, names: Sequence[str], learning_rate: float | None, ratio: float) -> str:
    optimizers = " and ".join(names)
    if rule is None:
        return f"for {optimizers} we know of no rule, so the learning rate is yours to tune"
    factor = _factor(rule.scaling, ratio)
    written = f"{factor:.4g}" if factor < 1000 else f"{factor:,.0f}"
    becomes = "" if learning_rate is None else f" ({learning_rate:.3g} to {learning_rate * factor:.3g})"
    return (
        f"for {optimizers} the {_WRITTEN[rule.scaling]} rule ({rule.source})"
        f" multiplies the learning rate by {written}{becomes}"
    )


def _factor(scaling: LearningRateScaling, ratio: float) -> float:
    return ratio if scaling == "linear" else math.sqrt(ratio)
