"""The benchmarks run, and their tables can be read back."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import overhead, search, trace
from benchmarks.common import in_fresh_process
from benchmarks.oracle import largest_surviving
from benchmarks.workloads import MIB, WORKLOADS

SEARCH = {
    "batch_size": 40,
    "error": None,
    "search_seconds": 2.0,
    "samples_run": 100,
    "plan": {"predicted_peak_bytes": 99 * MIB, "measured_peak_bytes": 100 * MIB},
}


def rows_of(table: str) -> list[list[str]]:
    """The cells of a Markdown table, without its second line."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    return [[cell.strip() for cell in line] for line in (lines[0], *lines[2:])]


def test_table_of_searches() -> None:
    known: dict[str, Any] = {
        "searches": {"BatchFinder": [SEARCH, {**SEARCH, "batch_size": 60, "error": "killed"}, {"error": "killed"}]},
        "trainings": {"40": [{"error": None}], "60": [{"error": "killed"}]},
        "oracle": 50,
    }
    head, row = rows_of(search.table({"GAN": known}))
    cells = dict(zip(head, row, strict=True))
    assert (cells["found"], cells["survives"], cells["share"]) == ("50 (40 to 60)", "50", "100% (80% to 120%)")
    assert cells["no size found"] == "1 of 3"
    assert cells["killed after it"] == cells["killed in a fresh process"] == "1 of 2"
    assert cells["prediction error"] == "-1.0%"


@pytest.mark.parametrize("known", [{}, {1: [True], 450: [False]}])
@pytest.mark.parametrize("limit", [1, 7, 90, 400])
def test_largest_surviving_size(limit: int, known: dict[int, list[bool]]) -> None:
    found = largest_surviving(lambda size, count: [size <= limit] * count, known=known, largest=500)
    assert found is not None
    assert 0.97 * limit <= found <= limit


@pytest.mark.slow
def test_a_training_in_a_control_group_survives_or_is_killed() -> None:
    room_bytes = WORKLOADS["LSTM"].room_bytes
    try:
        small = in_fresh_process("benchmarks.ways", "LSTM", "2", "--steps", "3", room_bytes=room_bytes)
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    assert (small["error"], small["steps"]) == (None, 3)
    assert 0 < small["used_bytes"] <= small["peak_bytes"] < room_bytes
    large = in_fresh_process("benchmarks.ways", "LSTM", "400", room_bytes=room_bytes)
    assert (large["error"], large["last_new_size"], large.get("steps")) == ("killed", 400, None)


@pytest.mark.slow
def test_trace_of_one_way_to_train(capsys: pytest.CaptureFixture[str]) -> None:
    results = trace.compare(["Adam"], ["BatchFinder"])
    assert rows_of(trace.table(results))[1] == ["Adam", "identical"]
    digests = dict.fromkeys(trace.COMPARED, "same")
    assert trace.differing({**digests, "files": "one"}, digests) == ["files"]


@pytest.mark.filterwarnings("ignore")  # of the other callbacks
def test_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "STEPS_BY_INTERVAL", {50: 50})
    monkeypatch.setattr(overhead, "WARM_UP_STEPS", 2)
    head, *rows = rows_of(overhead.table([overhead.run("cpu", 50, turn=0)]))
    cells = dict(zip(head, next(row for row in rows if overhead.OURS in row), strict=True))
    assert float(cells["median us"]) > 0
