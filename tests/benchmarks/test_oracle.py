from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.oracle import AGREEING, largest_surviving


class Trainings:
    """Survive up to a size; at the sizes in ``failing_from`` the first ones only."""

    def __init__(self, threshold: int, failing_from: dict[int, int] | None = None) -> None:
        self.threshold = threshold
        self.failing_from = failing_from or {}
        self.runs: Counter[int] = Counter()

    def __call__(self, size: int, count: int) -> list[bool]:
        self.runs[size] = max(self.runs[size], count)
        survivals = self.failing_from.get(size, self.runs[size])
        return [size <= self.threshold and index < survivals for index in range(self.runs[size])]


@pytest.mark.parametrize("known", [{}, {1: [True]}, {20: [True], 600: [False]}, {37: [True]}, {38: [False]}])
def test_finds_the_largest_to_the_sample_where_two_per_cent_are_less(known: dict[int, list[bool]]) -> None:
    trainings = Trainings(37)
    found = largest_surviving(trainings, known=known, largest=1000)
    assert found == {"batch_size": 37, "survived_once": 37, "failed_once": 38}
    assert trainings.runs[37] == AGREEING
    assert all(count == 1 for size, count in trainings.runs.items() if size != 37)


@pytest.mark.parametrize("known", [{}, {900: [True]}, {900: [True], 1500: [False]}, {5000: [False]}])
def test_stops_at_two_per_cent_of_a_large_size(known: dict[int, list[bool]]) -> None:
    trainings = Trainings(1000)
    found = largest_surviving(trainings, known=known, largest=65_536)
    assert 980 <= found["batch_size"] <= 1000
    assert found["failed_once"] - found["batch_size"] <= 20
    assert sum(trainings.runs.values()) <= 25


def test_what_is_known_saves_trainings() -> None:
    trainings = Trainings(104)
    found = largest_surviving(trainings, known={100: [True] * 3, 110: [True, False]}, largest=1000)
    assert found == {"batch_size": 103, "survived_once": 110, "failed_once": 105}
    assert sum(trainings.runs.values()) <= 9


def test_a_size_that_is_known_to_have_failed_once_bounds_the_answer() -> None:
    found = largest_surviving(Trainings(104), known={90: [True, False]}, largest=1000)
    assert found["batch_size"] == 89


def test_steps_down_where_one_of_five_fails() -> None:
    found = largest_surviving(Trainings(200, {200: 4, 196: 2}), known={200: [True]}, largest=1000)
    assert found == {"batch_size": 193, "survived_once": 200, "failed_once": 196}


def test_nothing_survives() -> None:
    assert largest_surviving(Trainings(0), known={}, largest=1000) == {
        "batch_size": None,
        "survived_once": None,
        "failed_once": 1,
    }


def test_everything_survives() -> None:
    assert largest_surviving(Trainings(10**6), known={}, largest=1000) == {
        "batch_size": 1000,
        "survived_once": 1000,
        "failed_once": None,
    }
