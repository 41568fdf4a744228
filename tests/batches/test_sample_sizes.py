import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_batchmem.batches.sample_sizes import (
    LargestSum,
    LongestSample,
    SampleSizes,
    TypicalSamples,
)
from lightning_batchmem.plan.policy import ReadingPolicy


def sizes_of(sample_bytes, *, is_complete=False):
    """Sizes of samples of which all are available; the last one is the longest."""
    return SampleSizes(
        [float(size) for size in sample_bytes],
        list(sample_bytes),
        spread_count=len(sample_bytes) - 1,
        largest=len(sample_bytes) - 1,
        is_ragged=True,
        is_complete=is_complete,
    )


def test_typical_batches_have_all_samples_in_turn():
    choice = TypicalSamples(sizes_of([10, 20, 30]))
    assert choice.positions(5) == choice.other_positions(5, 1) == [0, 1, 2, 0, 1]
    assert choice.batch_bytes(5, choice.longest_bytes) == 5 * 30


def test_batches_of_the_longest_sample_repeat_it_and_others_repeat_another():
    choice = LongestSample(sizes_of([10, 20, 30]))
    assert choice.positions(2) == [2, 2]
    assert [choice.other_positions(2, index) for index in range(4)] == [
        [0, 0],
        [1, 1],
        [2, 2],
        [0, 0],
    ]
    # Another rank has a longer sample.
    assert choice.batch_bytes(5, 40) == 200


@given(
    sample_bytes=st.lists(st.integers(1, 1000), min_size=2, max_size=40).map(sorted),
    count=st.integers(1, 60),
    index=st.integers(0, 5),
    is_complete=st.booleans(),
)
def test_a_largest_sum_is_reached_and_no_other_batch_is_larger(
    sample_bytes, count, index, is_complete
):
    choice = LargestSum(sizes_of(sample_bytes, is_complete=is_complete), ReadingPolicy(max_draws=5))
    largest_sum = choice.batch_bytes(count, max(sample_bytes))
    positions = choice.positions(count)
    total = sum(sample_bytes[position] for position in positions)
    assert len(positions) == count
    assert largest_sum <= total <= count * max(sample_bytes)
    others = choice.other_positions(count, index)
    assert len(others) == count
    assert sum(sample_bytes[position] for position in others) <= total


def test_a_complete_data_set_has_each_sample_once():
    sample_bytes = [1] * 99 + [100]
    complete = LargestSum(sizes_of(sample_bytes, is_complete=True), ReadingPolicy())
    assert complete.batch_bytes(100, 100) == 199
    # There may be more large samples among those that were not measured.
    assert LargestSum(sizes_of(sample_bytes), ReadingPolicy()).batch_bytes(100, 100) > 199


@pytest.mark.parametrize(
    ("policy", "largest"), [({"max_draws": 1}, 1), ({"max_drawn_sizes": 1}, 1)]
)
def test_the_policy_limits_the_random_batches(policy, largest):
    sizes = sizes_of([1] * 99 + [100])
    assert LargestSum(sizes, ReadingPolicy()).batch_bytes(1, 100) == 100
    assert LargestSum(sizes, ReadingPolicy(**policy)).batch_bytes(1, 100) == largest
