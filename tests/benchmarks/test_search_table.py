from __future__ import annotations

from typing import Any

import pytest

from benchmarks.search_table import HEAD, over_searches, summary, survived, table

TITLES = {"ours": "BatchFinder", "power": "Lightning power", "toma": "toma"}


def searched(batch_size: int | None, *, error: str | None = None, oom: int = 0, seconds: float = 2.0) -> dict[str, Any]:
    return {
        "batch_size": batch_size,
        "error": error,
        "out_of_memory": ["RuntimeError: no"] * oom,
        "samples_by_size": {"2": 20, "50": 100},
        "search_seconds": seconds,
    }


RECORD = {
    "small": {
        "room_bytes": 400 * 2**20,
        "ways": {
            "ours": [searched(60), searched(50, seconds=4.0), searched(40, seconds=3.0)],
            "power": [searched(None, error="RuntimeError: could not create a primitive", oom=2), searched(100, oom=1)],
            "toma": [{"error": "killed: its memory control group was full"}],
        },
        "trainings": {
            "40": [None] * 3,
            "50": [None] * 5,
            "60": [None, "MemoryError", None],
            "100": ["MemoryError"] * 2,
        },
        "oracle": {"batch_size": 50, "survived_once": 60, "failed_once": 51},
    }
}


def test_every_figure_of_a_way() -> None:
    rows = table(RECORD, TITLES).splitlines()
    assert rows[2].startswith("| small | 400 | *oracle* | 50 |")
    assert rows[3] == (
        "| small | 400 | BatchFinder | 50 (40 to 60) | 100% (80% to 120%) | 0 | 2 | 2.4 (2.0 to 3.0) "
        "| 3.0 (2.0 to 4.0) | 75 (33 to 80) | 10/11 |"
    )


def test_each_way_over_all_workloads() -> None:
    other = {**RECORD["small"], "ways": {"ours": [searched(20, seconds=1.0)]}, "trainings": {"20": [None]}}
    rows = summary({**RECORD, "other": other}, TITLES).splitlines()
    # sizes 50 and 20 of 50; 120 samples over 50 and over 20; 75 and 50 ms a sample
    assert rows[2] == "| BatchFinder | 4 of 4 | 70% (40% to 100%) | 0 | 4.2 (2.4 to 6.0) | 1.0 | 11/12 |"
    assert rows[3] == "| Lightning power | 1 of 2 | 200% | 3 | 1.2 | 0.3 | 0/2 |"
    assert rows[4] == "| toma | 0 of 1 | none | 0, and 1 killed | none | none | 0/0 |"
    without = {name: {**known, "oracle": None} for name, known in RECORD.items()}
    assert summary(without, TITLES).splitlines()[2].startswith("| BatchFinder | 3 of 3 | not measured | 0 |")


def test_a_search_that_found_nothing_is_counted_and_no_zero() -> None:
    rows = table(RECORD, TITLES).splitlines()
    assert rows[4] == (
        "| small | 400 | Lightning power | 100, 1 of 2 | 200%, 1 of 2 | 2 (1 to 2) | 2 | 1.2, 1 of 2 "
        "| 2.0, 1 of 2 | 20, 1 of 2 | 0/2 |"
    )
    assert rows[5] == "| small | 400 | toma | killed | none | unknown | unknown | none | none | none | none |"


def test_every_row_has_a_cell_for_each_column() -> None:
    rows = [line for line in table(RECORD, TITLES).splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {len(HEAD) + 1}


def test_errors_are_said_in_their_own_words() -> None:
    notes = [line for line in table(RECORD, TITLES).splitlines() if line.startswith("- ")]
    assert notes == [
        "- small, oracle: 50 survives 5 of 5; the largest that survived once is 60, the smallest that failed once 51",
        "- small, BatchFinder, training at 60 (1 of 3): MemoryError",
        "- small, Lightning power, search (1 of 2): RuntimeError: could not create a primitive",
        "- small, Lightning power, training at 100 (2 of 2): MemoryError",
        "- small, toma, search (1 of 1): killed: its memory control group was full",
    ]


def test_a_cap_that_cannot_be_set_says_why() -> None:
    assert table({"unavailable": "cgroup: read-only"}, TITLES) == "Not measured: cgroup: read-only"


def test_without_an_oracle_its_share_is_unknown() -> None:
    known: dict[str, Any] = {**RECORD["small"]}
    del known["oracle"]
    assert "| 50 (40 to 60) | unknown | 0 |" in table({"small": known}, TITLES)


@pytest.mark.parametrize(
    ("values", "text"),
    [([3.0], "3"), ([1.0, 5.0, 4.0], "4 (1 to 5)"), ([2.0, 2.0], "2"), ([None], "none"), ([None, 2.0], "2, 1 of 2")],
)
def test_medians_and_ranges(values: list[float | None], text: str) -> None:
    assert over_searches(values, "{:.0f}".format) == text


def test_survivals_of_a_size_found_twice_count_once() -> None:
    assert survived([4, 4, 8], {"4": [None, "no"], "8": [None]}) == (2, 3)
