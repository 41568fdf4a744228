"""Learning-rate scaling: the rule for an optimizer, and the rate for another effective batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

LearningRateScaling = Literal["linear", "sqrt"]

_TESTED_FACTOR = 8
"""Beyond this ratio of batch sizes a note adds that the rule is untested."""


class _Rule(NamedTuple):
    scaling: LearningRateScaling
    name: str
    source: str


_LINEAR = _Rule("linear", "linear", "Goyal et al. 2017, arXiv 1706.02677")
_SQRT = _Rule("sqrt", "square root", "Malladi et al. 2022, arXiv 2205.10287")

# The papers treat SGD (with momentum too), Adam and RMSprop. AdamW is Adam where it decays nothing, and torch
# multiplies its decay by the learning rate.
_RULES = {"SGD": _LINEAR, "Adam": _SQRT, "AdamW": _SQRT, "RMSprop": _SQRT}


def scaled_learning_rate(
    learning_rate: float, *, scaling: LearningRateScaling, effective_batch_size: int, base_batch_size: int
) -> float:
    """The learning rate for another effective batch size.

    Example:
        >>> scaled_learning_rate(0.1, scaling="sqrt", effective_batch_size=1024, base_batch_size=256)
        0.2
    """
    return learning_rate * _factor(scaling, effective_batch_size / base_batch_size)


def learning_rate_note(optimizer_names: Sequence[str], *, effective_batch_size: int, base_batch_size: int) -> str:
    """One sentence for a run whose effective batch size changed and whose learning rate did not; else empty."""
    if effective_batch_size == base_batch_size or not optimizer_names:
        return ""
    changed = f"samples per optimizer step went from {base_batch_size:,} to {effective_batch_size:,}"
    names = list(dict.fromkeys(optimizer_names))
    rule = _RULES.get(names[0])
    listed = " and ".join(names)
    if rule is None or any(_RULES.get(name) != rule for name in names):
        return f"{changed}, and no single rule is known for {listed}: tune the learning rate by hand"
    ratio = effective_batch_size / base_batch_size
    untested = f", which is untested beyond a factor of {_TESTED_FACTOR}" if _is_untested(ratio) else ""
    return (
        f"{changed}: the {rule.name} rule for {listed} ({rule.source}) multiplies the learning rate by"
        f" {_factor(rule.scaling, ratio):,.4g}{untested}; to apply it, pass"
        f' lr_scaling="{rule.scaling}", base_batch_size={base_batch_size}'
    )


def _is_untested(ratio: float) -> bool:
    return max(ratio, 1 / ratio) > _TESTED_FACTOR


def _factor(scaling: LearningRateScaling, ratio: float) -> float:
    return ratio if scaling == "linear" else math.sqrt(ratio)
