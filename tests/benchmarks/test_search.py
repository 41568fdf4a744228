from __future__ import annotations

from typing import Any

import pytest

from benchmarks import search

SIZES = {"ours": 20, "power": 16, "toma": None}


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    made: list[tuple[str, ...]] = []

    def attempt(kind: str, module: str, *arguments: str, timeout_seconds: float) -> dict[str, Any]:
        made.append((module.removeprefix("benchmarks."), *arguments))
        if module == "benchmarks.ways":
            size = SIZES[arguments[1]]
            return {"batch_size": size, "error": None if size else "ValueError: no"}
        return {"error": None if int(arguments[1]) <= 18 else "MemoryError: full"}

    monkeypatch.setattr(search, "attempt", attempt)
    return made


def compared(record: dict[str, Any], extent: search.Extent) -> dict[str, Any]:
    saves: list[int] = []
    search.compare(record, ["GAN"], list(SIZES), "rlimit", extent, lambda: saves.append(1))
    return record


def test_the_ways_take_turns_and_then_each_size_is_trained(attempts: list[tuple[str, ...]]) -> None:
    compared({}, search.Extent(repeats=2, trainings=2, has_oracle=False))
    searches = [("ways", "GAN", way, "rlimit") for way in SIZES]
    trainings = [("survive", "GAN", "16", "rlimit"), ("survive", "GAN", "20", "rlimit")]
    assert attempts == [*searches, *searches, *trainings, *trainings]


def test_the_oracle_uses_the_trainings_that_there_are(attempts: list[tuple[str, ...]]) -> None:
    record = compared({}, search.Extent(repeats=1, trainings=1))
    assert record["GAN"]["oracle"] == {"batch_size": 18, "survived_once": 18, "failed_once": 19}
    trained = [one[2] for one in attempts if one[0] == "survive"]
    assert {size: trained.count(size) for size in set(trained)} == {"16": 1, "20": 1, "18": 5, "19": 1}


def test_what_is_recorded_is_not_measured_again(attempts: list[tuple[str, ...]]) -> None:
    record = compared({}, search.Extent(repeats=1, trainings=1, has_oracle=False))
    attempts.clear()
    compared(record, search.Extent(repeats=1, trainings=1, has_oracle=False))
    assert attempts == []
    compared(record, search.Extent(repeats=2, trainings=1, has_oracle=False))
    assert attempts == [("ways", "GAN", way, "rlimit") for way in SIZES]


def test_a_cap_that_cannot_be_set_is_recorded_with_its_reason(
    attempts: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_group(kind: str) -> Any:
        raise OSError("read-only")

    monkeypatch.setattr(search, "own_group", no_group)
    assert compared({}, search.Extent()) == {"unavailable": "rlimit: read-only"}
    assert attempts == []
