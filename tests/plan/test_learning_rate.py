from __future__ import annotations

import doctest
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import lightning_batchmem.plan.learning_rate as effective_module
from lightning_batchmem.plan.learning_rate import MicroBatch, advice, micro_batch, rule_for, scaled_learning_rate

GOYAL = "Goyal et al. 2017, arXiv 1706.02677"
MALLADI = "Malladi et al. 2022, arXiv 2205.10287"


def test_examples_in_the_docstrings() -> None:
    result = doctest.testmod(effective_module)
    assert result.attempted >= 3
    assert not result.failed


@pytest.mark.parametrize(
    ("target", "arguments", "expected"),
    [
        (1024, {"largest": 300}, MicroBatch(256, 4, 1024)),
        (1024, {"largest": 1024}, MicroBatch(1024, 1, 1024)),
        (1024, {"largest": 5000}, MicroBatch(1024, 1, 1024)),
        (1024, {"largest": 1023}, MicroBatch(512, 2, 1024)),
        (1000, {"largest": 300}, MicroBatch(250, 4, 1000)),
        # 4 are needed, 5 hit the target
        (1005, {"largest": 300}, MicroBatch(201, 5, 1005)),
        # 4 are needed, 6 hit it
        (1002, {"largest": 333}, MicroBatch(167, 6, 1002)),
        (1024, {"largest": 100, "ranks": 4}, MicroBatch(64, 4, 1024)),
        (1024, {"largest": 300, "multiple_of": 128}, MicroBatch(256, 4, 1024)),
        # 4 x 250 is no multiple of 8, 5 x 200 is
        (1000, {"largest": 300, "multiple_of": 8}, MicroBatch(200, 5, 1000)),
        # 255 is no multiple of 4, 252 is: 5 are needed, not 4
        (1020, {"largest": 255, "multiple_of": 4}, MicroBatch(204, 5, 1020)),
        (np.int64(1024), {"largest": np.int64(300)}, MicroBatch(256, 4, 1024)),
        # a prime: the fewest, and the nearest size
        (
            1009,
            {"largest": 256},
            MicroBatch(252, 4, 1008, "1,008 samples per optimizer step instead of 1,009: 4 x 252"),
        ),
        (
            1010,
            {"largest": 256, "ranks": 4},
            MicroBatch(253, 1, 1012, "1,012 samples per optimizer step instead of 1,010: 1 x 253 on each of 4 ranks"),
        ),
        (
            1000,
            {"largest": 100, "multiple_of": 64},
            MicroBatch(64, 16, 1024, "1,024 samples per optimizer step instead of 1,000: 16 x 64"),
        ),
        # 19 x 53 would hit it, but 2 are enough
        (
            1007,
            {"largest": 600},
            MicroBatch(504, 2, 1008, "1,008 samples per optimizer step instead of 1,007: 2 x 504"),
        ),
        # half a unit is rounded up
        (
            12,
            {"largest": 16, "multiple_of": 8},
            MicroBatch(16, 1, 16, "16 samples per optimizer step instead of 12: 1 x 16"),
        ),
    ],
)
def test_micro_batch(target: int, arguments: dict[str, int], expected: MicroBatch) -> None:
    assert micro_batch(target, **arguments) == expected


@given(
    target=st.integers(1, 20_000),
    largest=st.integers(1, 3000),
    ranks=st.integers(1, 9),
    multiple_of=st.none() | st.integers(1, 64),
)
def test_micro_batch_keeps_its_word(target: int, largest: int, ranks: int, multiple_of: int | None) -> None:
    unit = multiple_of or 1
    assume(largest >= unit and target >= ranks * unit)
    found = micro_batch(target, largest=largest, ranks=ranks, multiple_of=multiple_of)
    steps = found.accumulate_grad_batches
    assert 1 <= found.batch_size <= largest
    assert found.batch_size % unit == 0
    assert found.effective_batch_size == found.batch_size * steps * ranks
    usable = max(size for size in range(1, largest + 1) if size % unit == 0)
    fewest = next(k for k in range(1, target + 1) if k * ranks * usable >= target)
    exact = [
        (k, size)
        for k in range(fewest, 2 * fewest + 1)
        for size in {target // (k * ranks)}
        if size * k * ranks == target and size % unit == 0
    ]
    if exact:
        assert (steps, found.batch_size, found.rounding) == (*exact[0], "")
        return
    assert steps == fewest
    errors = {size: abs(size * fewest * ranks - target) for size in range(unit, largest + 1, unit)}
    assert abs(found.effective_batch_size - target) == min(errors.values()) <= fewest * ranks * unit / 2
    assert found.effective_batch_size != target
    assert (
        f"{found.effective_batch_size:,} samples per optimizer step instead of {target:,}: {steps:,} x"
        in found.rounding
    )


@given(st.integers(1, 500), st.integers(1, 16), st.integers(1, 8))
def test_what_the_finder_chose_itself_is_kept(batch_size: int, steps: int, ranks: int) -> None:
    found = micro_batch(batch_size * steps * ranks, largest=batch_size, ranks=ranks)
    assert (found.batch_size, found.accumulate_grad_batches, found.rounding) == (batch_size, steps, "")


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        (4, {"largest": 8, "ranks": 8}, "target_batch_size must be at least 8, 1 sample for each of 8 ranks, got 4"),
        (
            24,
            {"largest": 64, "ranks": 4, "multiple_of": 8},
            "target_batch_size must be at least 32, 8 samples for each of 4 ranks, got 24",
        ),
        (
            7,
            {"largest": 64, "multiple_of": 8},
            "target_batch_size must be at least 8, 8 samples for each of 1 rank, got 7",
        ),
        (64, {"largest": 7, "multiple_of": 8}, "multiple_of must be at most the largest size that fits, 7, got 8"),
        (0, {"largest": 8}, "target_batch_size must be a whole number of at least 1, got 0"),
        (64.0, {"largest": 8}, "target_batch_size must be a whole number of at least 1, got 64.0"),
        (64, {"largest": 0}, "largest must be a whole number of at least 1, got 0"),
        (64, {"largest": 8, "ranks": True}, "ranks must be a whole number of at least 1, got True"),
        (64, {"largest": 8, "multiple_of": -1}, "multiple_of must be a whole number of at least 1, got -1"),
    ],
)
def test_micro_batch_names_the_argument(target: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        micro_batch(target, **arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("rule", "effective", "base", "expected"),
    [("linear", 256, 32, 0.8), ("linear", 32, 256, 0.0125), ("sqrt", 128, 32, 0.2), ("sqrt", 8, 32, 0.05)],
)
def test_scaled_learning_rate(rule: Any, effective: int, base: int, expected: float) -> None:
    scaled = scaled_learning_rate(0.1, rule=rule, effective_batch_size=effective, base_batch_size=base)
    assert scaled == pytest.approx(expected, rel=1e-12)


def test_a_learning_rate_of_numpys_becomes_a_float_of_pythons() -> None:
    scaled = scaled_learning_rate(np.float32(0.5), rule="linear", effective_batch_size=3, base_batch_size=1)  # type: ignore[arg-type]
    assert (scaled, type(scaled)) == (1.5, float)


@given(st.floats(1e-8, 10.0), st.integers(1, 10**6), st.integers(1, 10**6))
def test_rules_undo_themselves_and_the_linear_one_is_the_square_root_twice(
    rate: float, first: int, second: int
) -> None:
    for rule in ("linear", "sqrt"):
        there = scaled_learning_rate(rate, rule=rule, effective_batch_size=first, base_batch_size=second)  # type: ignore[arg-type]
        back = scaled_learning_rate(there, rule=rule, effective_batch_size=second, base_batch_size=first)  # type: ignore[arg-type]
        assert back == pytest.approx(rate)
    once = scaled_learning_rate(rate, rule="sqrt", effective_batch_size=first, base_batch_size=second)
    twice = scaled_learning_rate(once, rule="sqrt", effective_batch_size=first, base_batch_size=second)
    linear = scaled_learning_rate(rate, rule="linear", effective_batch_size=first, base_batch_size=second)
    assert twice == pytest.approx(linear)
    assert scaled_learning_rate(rate, rule="sqrt", effective_batch_size=first, base_batch_size=first) == rate


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf, True, None, "0.1", torch.tensor(0.1)])
def test_a_learning_rate_that_makes_no_sense(rate: Any) -> None:
    with pytest.raises(ValueError, match="learning_rate must be a finite number of at least 0, got"):
        scaled_learning_rate(rate, rule="linear", effective_batch_size=2, base_batch_size=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "cubic"}, r"rule must be \"linear\" or \"sqrt\", got 'cubic'"),
        ({"effective_batch_size": 0}, "effective_batch_size must be a whole number of at least 1, got 0"),
        ({"base_batch_size": 1.5}, r"base_batch_size must be a whole number of at least 1, got 1\.5"),
    ],
)
def test_scaled_learning_rate_names_the_argument(arguments: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"rule": "sqrt", "effective_batch_size": 2, "base_batch_size": 1}
    with pytest.raises(ValueError, match=message):
        scaled_learning_rate(0.1, **{**right, **arguments})


def test_rules_are_claimed_for_what_the_papers_treat_only() -> None:
    by_scaling: dict[str, set[str]] = {}
    for name in [name for name, kind in vars(torch.optim).items() if isinstance(kind, type)]:
        if rule := rule_for(name):
            by_scaling.setdefault(f"{rule.scaling}: {rule.source}", set()).add(name)
    assert by_scaling == {f"linear: {GOYAL}": {"SGD"}, f"sqrt: {MALLADI}": {"Adam", "AdamW", "RMSprop"}}
    for name in ("NAdam", "Adamax", "Adagrad", "LBFGS", "Lion", "adam", ""):
        assert rule_for(name) is None


def test_advice_for_sgd() -> None:
    assert advice(["SGD"], effective_batch_size=256, base_batch_size=32, learning_rate=0.1) == (
        f"samples per optimizer step went from 32 to 256: for SGD the linear rule ({GOYAL}) multiplies the"
        ' learning rate by 8 (0.1 to 0.8), as BatchFinder(lr_scaling="linear", base_batch_size=32) does.'
        " The paper warms the rate up over the first epochs, which is left to the user."
    )


def test_advice_for_adam_without_a_known_rate() -> None:
    text = advice(["AdamW", "AdamW"], effective_batch_size=1024, base_batch_size=2048)
    assert text.startswith(
        f"samples per optimizer step went from 2,048 to 1,024: for AdamW the square root rule ({MALLADI})"
        ' multiplies the learning rate by 0.7071, as BatchFinder(lr_scaling="sqrt", base_batch_size=2048) does. '
    )
    assert "without decoupled weight decay" in text
    assert "eps too" in text


def test_advice_where_no_rule_is_known() -> None:
    assert advice(["Lion"], effective_batch_size=64, base_batch_size=32, learning_rate=0.1) == (
        "samples per optimizer step went from 32 to 64: for Lion we know of no rule,"
        " so the learning rate is yours to tune."
    )


@pytest.mark.parametrize("others", [["Adam"], ["Lion"]])
def test_optimizers_that_differ_get_no_call_that_would_do_for_one_only(others: list[str]) -> None:
    text = advice(["SGD", *others], effective_batch_size=128, base_batch_size=32, learning_rate=0.1)
    assert "BatchFinder(" not in text
    assert "by 4 (0.1 to 0.4); for " in text
    assert text.endswith("by 2 (0.1 to 0.2)." if others == ["Adam"] else "tune.")


def test_optimizers_with_one_rule_share_a_clause() -> None:
    text = advice(["Adam", "RMSprop"], effective_batch_size=4_000_000, base_batch_size=1)
    assert "for Adam and RMSprop the square root rule" in text
    assert "by 2,000, as BatchFinder(" in text


def test_no_advice_without_a_change_or_an_optimizer() -> None:
    assert advice(["SGD"], effective_batch_size=32, base_batch_size=32, learning_rate=0.1) == ""
    assert advice([], effective_batch_size=64, base_batch_size=32) == ""
    with pytest.raises(ValueError, match="base_batch_size must be a whole number of at least 1, got 0"):
        advice(["SGD"], effective_batch_size=64, base_batch_size=0)
