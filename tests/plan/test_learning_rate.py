from __future__ import annotations

import doctest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_batchmem.plan import learning_rate
from lightning_batchmem.plan.scaling import learning_rate_note, scaled_learning_rate

GOYAL = "Goyal et al. 2017, arXiv 1706.02677"
MALLADI = "Malladi et al. 2022, arXiv 2205.10287"


def test_example_of_the_docstring() -> None:
    assert doctest.testmod(learning_rate) == (0, 1)  # failed, attempted


@pytest.mark.parametrize(
    ("scaling", "effective", "base", "expected"),
    [("linear", 256, 32, 0.8), ("linear", 32, 256, 0.0125), ("sqrt", 128, 32, 0.2), ("sqrt", 8, 32, 0.05)],
)
def test_scaled_learning_rate(scaling: Any, effective: int, base: int, expected: float) -> None:
    scaled = scaled_learning_rate(0.1, scaling=scaling, effective_batch_size=effective, base_batch_size=base)
    assert scaled == pytest.approx(expected, rel=1e-12)


@given(st.floats(1e-8, 10.0), st.integers(1, 10**6), st.integers(1, 10**6))
def test_linear_is_the_square_root_twice_and_a_rule_can_be_undone(rate: float, first: int, second: int) -> None:
    def scaled(rate: float, scaling: Any, to: int, base: int) -> float:
        return scaled_learning_rate(rate, scaling=scaling, effective_batch_size=to, base_batch_size=base)

    twice = scaled(scaled(rate, "sqrt", first, second), "sqrt", first, second)
    assert twice == pytest.approx(scaled(rate, "linear", first, second))
    assert scaled(twice, "linear", second, first) == pytest.approx(rate)
    assert scaled(rate, "sqrt", first, first) == rate


NONE_KNOWN = "and no single rule is known for {}: tune the learning rate by hand"


@pytest.mark.parametrize(
    ("names", "effective", "expected"),
    [
        (["SGD"], 32, ""),
        ([], 64, ""),
        (
            ["SGD", "SGD"],
            256,
            f": the linear rule for SGD ({GOYAL}) multiplies the learning rate by 8; to apply it, pass"
            ' lr_scaling="linear", base_batch_size=32',
        ),
        (
            ["AdamW"],
            16,
            f": the square root rule for AdamW ({MALLADI}) multiplies the learning rate by 0.7071; to apply it, pass"
            ' lr_scaling="sqrt", base_batch_size=32',
        ),
        (
            ["Adam", "RMSprop"],
            320_000,
            f": the square root rule for Adam and RMSprop ({MALLADI}) multiplies the learning rate by 100, which is"
            ' untested beyond a factor of 8; to apply it, pass lr_scaling="sqrt", base_batch_size=32',
        ),
        (["SGD"], 3, f": the linear rule for SGD ({GOYAL}) multiplies the learning rate by 0.09375, which is untested"),
        (["Lion"], 64, f", {NONE_KNOWN.format('Lion')}"),
        (["SGD", "Adam"], 64, f", {NONE_KNOWN.format('SGD and Adam')}"),
        (["NAdam", "Adamax"], 64, f", {NONE_KNOWN.format('NAdam and Adamax')}"),
    ],
)
def test_note(names: list[str], effective: int, expected: str) -> None:
    note = learning_rate_note(names, effective_batch_size=effective, base_batch_size=32)
    assert note.startswith(expected and f"samples per optimizer step went from 32 to {effective:,}{expected}")
    assert bool(note) == bool(expected)
    assert ("untested" in note) == (bool(note) and "no single" not in note and not 4 <= effective <= 256)
