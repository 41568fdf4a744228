from __future__ import annotations

import pytest

from benchmarks.autobatch import DEFAULT_SIZE, SIZES, size_by_line


def test_the_line_reaches_sixty_per_cent_of_what_was_free() -> None:
    assert size_by_line(SIZES, [100 + 10 * size for size in SIZES], free_bytes=1000) == 50


@pytest.mark.parametrize(
    ("held_bytes", "free_bytes"),
    [
        ([700 + 10 * size for size in SIZES], 1000),  # below 1
        ([100 - size for size in SIZES], 1000),  # falls
        ([7] * 5, 1000),  # flat
        (list(SIZES), 10_000),  # above 1024
    ],
)
def test_a_result_out_of_range_is_given_up_for_the_default(held_bytes: list[int], free_bytes: int) -> None:
    assert size_by_line(SIZES, held_bytes, free_bytes) == DEFAULT_SIZE


def test_one_probe_is_no_line() -> None:
    assert size_by_line((1,), [100], free_bytes=1000) == DEFAULT_SIZE
