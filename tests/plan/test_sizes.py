from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.sizes import micro_batch, rounded, size_range


@pytest.mark.parametrize(
    ("target", "largest", "ranks", "multiple_of", "expected"),
    [
        (1024, 5000, 1, None, (1024, 1, 1024)),
        # 4 batches are needed, but 5 make exactly the target.
        (1005, 300, 1, None, (201, 5, 1005)),
        # 19 batches of 53 samples would make exactly the target, but 2 batches are enough.
        (1007, 600, 1, None, (504, 2, 1008)),
        # The target is a prime, so the fewest batches with the nearest size are chosen.
        (1009, 256, 1, None, (252, 4, 1008)),
        (1024, 100, 4, None, (64, 4, 1024)),
        (1010, 256, 4, None, (253, 1, 1012)),
        # 4 batches would have 250 samples, which is no multiple of 8. 5 batches have 200.
        (1000, 300, 1, 8, (200, 5, 1000)),
        # The largest multiple of 4 is 252, so 5 batches are needed and not 4.
        (1020, 255, 1, 4, (204, 5, 1020)),
        (1000, 100, 1, 64, (64, 16, 1024)),
        # 12 samples are one and a half multiples of 8, which is rounded up to two.
        (12, 16, 1, 8, (16, 1, 16)),
    ],
)
def test_micro_batch(target, largest, ranks, multiple_of, expected):
    found = micro_batch(target, largest=largest, ranks=ranks, multiple_of=multiple_of)
    assert (*found, found[0] * found[1] * ranks) == expected


@given(
    target=st.integers(1, 20_000),
    largest=st.integers(1, 3000),
    ranks=st.integers(1, 9),
    multiple_of=st.none() | st.integers(1, 64),
)
def test_properties_of_a_micro_batch(target, largest, ranks, multiple_of):
    unit = multiple_of or 1
    assume(largest >= unit and target >= ranks * unit)
    size, steps = micro_batch(target, largest=largest, ranks=ranks, multiple_of=multiple_of)
    assert 1 <= size <= largest
    assert size % unit == 0
    usable = max(other for other in range(1, largest + 1) if other % unit == 0)
    fewest = next(k for k in range(1, target + 1) if k * ranks * usable >= target)
    exact = [k for k in range(fewest, 2 * fewest + 1) if target % (k * ranks * unit) == 0]
    assert steps == (exact[0] if exact else fewest)
    assert (size * steps * ranks == target) == bool(exact)
    errors = [abs(other * steps * ranks - target) for other in range(unit, largest + 1, unit)]
    assert abs(size * steps * ranks - target) == min(errors)


def test_sizes_that_are_avoided():
    limits = SearchLimits(1000, 2, 40, "dataset", avoided_sizes=frozenset({2, 3, 4, 10, 39, 40}))
    assert size_range(limits) == (2, 38)
    assert [rounded(size, limits) for size in (39, 10, 9)] == [38, 9, 9]
    assert [rounded(size, limits, up=True) for size in (2, 10, 11)] == [5, 11, 11]
    # No other size is left.
    assert rounded(4, limits) == 4
    fixed = replace(limits, min_batch_size=39)
    assert size_range(fixed) == (39, 39)
    multiples = replace(limits, options=SearchOptions(multiple_of=10))
    assert size_range(multiples) == (10, 30)
    assert rounded(19, multiples) == 10


@pytest.mark.parametrize(
    ("size", "expected"), [(63, 63), (127, 127), (129, 128), (999, 992), (5000, 4992)]
)
def test_sizes_are_rounded_to_the_largest_power_of_two_up_to_a_64th(size, expected):
    assert rounded(size, SearchLimits(1000, 1, 10**7, "dataset")) == expected
