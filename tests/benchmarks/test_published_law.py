"""The arithmetic of benchmarks.published_law."""

import pytest

from benchmarks.published_law import (
    error_text,
    memory_by_size,
    prediction,
    predictions_of,
    quantile,
    speeds_of,
)

LINE = [(size, 1000 + 10 * size, 5.0) for size in (1, 10, 20, 40)]


def test_a_line_through_small_sizes_predicts_the_largest():
    known = prediction("bench", [*LINE, (80, 2000, 5.0)])
    assert (known.sizes, known.largest_size, known.measured_mib) == (4, 80, 2000)
    assert known.predicted_mib == pytest.approx(1800)
    assert known.error == pytest.approx(-0.1)


def test_sizes_above_half_of_the_largest_are_not_in_the_line():
    known = prediction("bench", [*LINE, (41, 9000, 5.0), (80, 1800, 5.0)])
    assert known.sizes == 4
    assert known.error == pytest.approx(0)


def test_the_smallest_sizes_can_be_left_out():
    known = prediction("bench", [(1, 9000, 5.0), *LINE[1:], (80, 1800, 5.0)], smallest_size=2)
    assert known.sizes == 3
    assert known.error == pytest.approx(0)


def test_one_small_size_predicts_nothing():
    assert prediction("bench", [(1, 10, 5.0), (8, 80, 5.0)]) is None


def test_of_repeated_measurements_the_highest_counts():
    assert memory_by_size([(8, 80, 5.0), (1, 12, 5.0), (1, 10, 5.0)]) == {1: 12, 8: 80}


def test_benches_with_tf32_are_left_out():
    rows = [*LINE, (80, 1800, 5.0)]
    assert list(predictions_of({"bert-fp32": rows, "bert-tf32": rows})) == ["bert-fp32"]


def test_the_speed_of_the_largest_size_is_compared_where_it_fills_the_card():
    full = [(1, 10, 4.0), (2, 20, 10.0), (4, 40, 9.0), (8, 100, 8.0)]
    half_full = [(size, memory_mib / 2, speed) for size, memory_mib, speed in full]
    benches = {"full": full, "half full": half_full, "few sizes": full[1:]}
    (known,) = speeds_of(benches)
    assert (known.bench, known.largest_size, known.fastest_size) == ("full", 8, 2)
    assert known.share == pytest.approx(0.8)


def test_a_quantile_lies_between_two_values():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2
    assert quantile([10.0, 0.0], 0.9) == pytest.approx(9)
    assert quantile([4.0], 0.9) == 4


def test_errors_count_without_their_sign():
    text = "absolute error: median 2.0%, 90th percentile 2.8%, largest 3.0%"
    assert error_text([-0.03, 0.01, 0.02]) == text
