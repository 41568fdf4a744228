from collections import Counter

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
        is_ragged=True,
        is_complete=is_complete,
    )


def longest(sizes, *, joins=True, is_sorted=False, has_largest=False):
    return LongestSample(sizes, joins=joins, is_sorted=is_sorted, has_largest=has_largest)


def test_typical_batches_have_all_samples_in_turn():
    choice = TypicalSamples(sizes_of([10, 20, 30]))
    assert choice.positions(5) == choice.other_positions(5, 1) == [0, 1, 2, 0, 1]
    assert choice.batch_bytes(5, choice.longest_bytes) == 5 * 30


def test_batches_of_the_longest_sample_repeat_it_and_others_repeat_another():
    choice = longest(sizes_of([10, 20, 30]), joins=False)
    assert choice.positions(2) == [2, 2]
    others = [choice.other_positions(2, index) for index in range(20)]
    assert {tuple(other) for other in others} == {(0, 0), (1, 1), (2, 2)}
    # Another rank has a longer sample.
    assert choice.batch_bytes(5, 40) == 200


def test_other_batches_are_drawn_as_the_loader_draws_them():
    sizes = sizes_of(range(100))
    batches = [longest(sizes).other_positions(10, index) for index in range(20)]
    assert len({max(batch) for batch in batches}) > 5
    assert all(len(set(batch)) == 10 for batch in batches)
    assert all(max(batch) - min(batch) > 30 for batch in batches)
    # A loader that sorts makes batches of samples that are about equally long.
    buckets = longest(sizes, is_sorted=True, has_largest=True)
    in_buckets = [buckets.other_positions(10, index) for index in range(20)]
    assert all(max(batch) - min(batch) == 9 for batch in in_buckets)
    assert len({max(batch) for batch in in_buckets}) > 5
    assert longest(sizes).other_positions(10, 3) == batches[3]
    # Where longer samples may exist, a bucket has one sample again and again.
    assert len(set(longest(sizes, is_sorted=True).other_positions(10, 3))) == 1


def test_equally_long_samples_take_turns_unless_they_cannot_be_joined():
    sizes = sizes_of([30, 10, 30, 20, 30])
    choice = longest(sizes)
    assert sorted(choice.positions(3)) == [0, 2, 4]
    turns = Counter(choice.positions(7))
    assert sorted(turns.items()) == [(0, 2), (2, 2), (4, 3)]
    assert len(set(longest(sizes, joins=False, has_largest=True).positions(3))) == 1


@given(
    sample_bytes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    missing=st.lists(st.integers(1, 9), max_size=4),
    count=st.integers(1, 12),
    index=st.integers(0, 20),
)
def test_the_largest_samples_together_are_a_batch_where_all_of_them_are_available(
    sample_bytes, missing, count, index
):
    """The samples that are missing were measured, but there was no room for them."""
    sizes = sizes_of(sample_bytes)
    sizes.measured.extend(missing)
    choice = longest(sizes, has_largest=True)
    positions = choice.positions(count)
    largest = sorted(sizes.measured, reverse=True)[:count]
    chosen = sorted((sample_bytes[position] for position in positions), reverse=True)
    assert len(chosen) == count
    # Only the available largest ones are known to be a batch.
    longest_is_there = max(sample_bytes) == max(sizes.measured)
    if longest_is_there:
        assert all(one >= other for one, other in zip(chosen, largest, strict=False))
    if not missing and count <= len(sample_bytes):
        assert len(set(positions)) == count
        assert chosen == largest
        others = choice.other_positions(count, index)
        assert len(set(others)) == count
        assert max(sample_bytes[other] for other in others) <= chosen[0]


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
    if is_complete and count <= len(sample_bytes):
        assert len(set(positions)) == count
    if is_complete and count < len(sample_bytes):
        assert len(set(others)) == count


def test_random_batches_have_distinct_samples_while_there_are_enough():
    choice = LargestSum(sizes_of(range(1, 21), is_complete=True), ReadingPolicy(max_draws=5))
    assert [len(set(choice.other_positions(8, index))) for index in range(6)] == [8] * 6
    assert len(choice.other_positions(30, 0)) == 30


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


def test_a_part_that_some_samples_lack_has_its_longest_too():
    parts = [(900, 8), (500, 4, 400), (100, 4)]
    assert SampleSizes([900.0, 500.0, 100.0], [900, 500, 100], parts=parts).longest == [0, 1]


def test_samples_of_equal_bytes_differ_in_shape():
    assert SampleSizes([8.0, 8.0], [8, 8]).difference == "Samples differ in shape: 2 were read."
    assert "the largest has 9 bytes" in SampleSizes([8.0, 9.0], [8, 9]).difference


def test_how_many_random_samples_take_what_the_longest_take():
    # Half of the samples have one byte, and half have nine. The largest of two has (1 + 3 * 9) / 4.
    sizes = SampleSizes([1.0, 9.0], [1, 9], is_ragged=True)
    assert sizes.typical_count(1) == 1
    assert 2 * (1 + 3 * 9) / 4 <= 2 * 9 < 3 * (1 + 7 * 9) / 8
    assert sizes.typical_count(2) == 2
    # Nearly all samples are short, and most batches have no long one.
    rare = SampleSizes([1.0] * 9_999 + [1000.0], [1], is_ragged=True)
    assert rare.typical_count(4) == 196


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50), st.integers(1, 1000))
def test_random_samples_are_at_least_as_many_as_the_longest(measured, count):
    sizes = SampleSizes([float(one) for one in measured], measured)
    assert sizes.typical_count(count) >= count
    equal = SampleSizes([7.0] * len(measured), measured)
    assert equal.typical_count(count) == count
