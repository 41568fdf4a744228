from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_batchmem.plan.memory_limit import check_positive, parse_memory_limit

BUDGET = 100 * 2**30


@pytest.mark.parametrize(
    ("memory_limit", "expected"),
    [
        (None, BUDGET),
        (12345, 12345),
        (BUDGET + 1, BUDGET + 1),
        (0.5, BUDGET // 2),
        (1.0, BUDGET),
        ("20GiB", 20 * 2**30),
        ("1.5 gib", 3 * 2**29),
        ("500MB", 500 * 10**6),
        (" 64 KiB ", 64 * 2**10),
        ("7 B", 7),
        ("1TiB", 2**40),
        (np.int64(7), 7),
    ],
)
def test_limit(memory_limit: Any, expected: int) -> None:
    assert parse_memory_limit(memory_limit, BUDGET) == expected


@pytest.mark.parametrize(
    "memory_limit", [0, -1, 0.0, 1.1, float("nan"), True, "", "20", "20 parsecs", "-3GiB", "0GiB", []]
)
def test_a_limit_that_makes_no_sense_names_the_argument_and_the_value(memory_limit: Any) -> None:
    with pytest.raises(ValueError, match="memory_limit must be") as error:
        parse_memory_limit(memory_limit, BUDGET)
    assert repr(memory_limit) in str(error.value)


@given(st.floats(0.001, 1.0), st.integers(1, 2**45))
def test_a_fraction_is_never_more_than_the_budget(memory_limit: float, budget_bytes: int) -> None:
    assert 0 <= parse_memory_limit(memory_limit, budget_bytes) <= budget_bytes


def test_check_positive() -> None:
    check_positive("multiple_of", None)
    check_positive("multiple_of", 1)
    for value in (0, -8, 2.0, True, "8"):
        with pytest.raises(ValueError, match=r"multiple_of must be a whole number of at least 1, got"):
            check_positive("multiple_of", value)  # type: ignore[arg-type]
