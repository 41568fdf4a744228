"""The benchmarks run, and their tables can be read back."""

import json
from dataclasses import replace

import pytest

from benchmarks import prediction, search, trace
from benchmarks.common import in_fresh_process
from benchmarks.search import largest_surviving, largest_that
from benchmarks.workloads import WORKLOADS
from lightning_batchmem.plan.records import Trial
from tests.plan.test_plan import PLAN


def rows_of(table):
    """The cells of a Markdown table, without its second line."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    return [[cell.strip() for cell in line] for line in (lines[0], *lines[2:])]


@pytest.mark.parametrize("known", [{}, {1: [True], 450: [False]}])
@pytest.mark.parametrize("limit", [1, 7, 90, 400])
def test_largest_surviving_size(limit, known):
    found = largest_surviving(lambda size, count: [size <= limit] * count, known=known)
    assert found is not None
    assert 0.97 * limit <= found <= limit


@pytest.mark.parametrize("start", [1, 100])
@pytest.mark.parametrize("largest", [0, 1, 7, 90, 130, 1000])
def test_the_largest_size_that_passes_is_found_from_any_start(largest, start):
    found = largest_that(lambda size: size <= largest, start, growth=1.25)
    assert 0.97 * largest <= found <= largest


@pytest.mark.parametrize(("repeats", "sizes"), [(0, []), (3, [20, 20, 30])])
def test_one_training_for_each_search_and_then_the_largest_size(
    repeats, sizes, monkeypatch, tmp_path
):
    trained = []
    to_find = iter(sizes)

    def in_fresh_process(module, name, way, *, room_bytes):
        if not way.isdecimal():
            return {
                "error": None,
                "batch_size": next(to_find),
                "search_seconds": 1.0,
                "samples_run": 60,
            }
        trained.append(int(way))
        return {"error": None if int(way) <= 40 else "killed"}

    monkeypatch.setattr(search, "in_fresh_process", in_fresh_process)
    path = tmp_path / "results.json"
    search.measure(search.Measurements(path), "LSTM", ["toma"], repeats, has_oracle=True)
    assert trained[: len(sizes)] == sizes
    known = json.loads(path.read_text())
    assert known["LSTM"]["oracle"] == 40
    _, row = rows_of(search.table(known))
    searched = ["20 (20 to 30), 50%, failed 0 of 6, 1 s"] if sizes else []
    assert row == ["LSTM", "200", "40", *searched]
    before = len(trained)
    search.measure(search.Measurements(path), "LSTM", ["toma"], repeats, has_oracle=True)
    # The second measurement continues from the file.
    assert len(trained) == before


@pytest.mark.slow
def test_a_training_in_a_control_group_survives_or_is_killed():
    room_bytes = WORKLOADS["LSTM"].room_bytes
    try:
        small = in_fresh_process(
            "benchmarks.ways", "LSTM", "2", "--steps", "3", room_bytes=room_bytes
        )
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    assert (small["error"], small["steps"]) == (None, 3)
    assert 0 < small["used_bytes"] <= small["peak_bytes"] < room_bytes
    large = in_fresh_process("benchmarks.ways", "LSTM", "400", room_bytes=room_bytes)
    assert (large["error"], large["last_new_size"], large.get("steps")) == ("killed", 400, None)


# Lightning's own finder raises warnings.
@pytest.mark.filterwarnings("ignore")
def test_trace_of_one_way_to_train():
    name = "dropout"
    results = {finder: trace.compare(name, finder) for finder in trace.FINDERS}
    head, row, total = rows_of(trace.table({name: results}))
    found = dict(zip(head, row, strict=True))
    assert (found["BatchFinder"], found["no finder"]) == ("identical", "identical")
    assert {"weights", "random"} <= set(found["power"].split(", "))
    assert total[1:] == [
        "1 of 1 identical",
        "0 of 1 identical",
        "0 of 1 identical",
        "1 of 1 identical",
    ]


def test_predictions_are_compared_with_trials_twice_as_large():
    # The peaks follow 100 + 4 * size, and the last one is higher by 10.
    peaks = [(2, 108), (8, 132), (20, 190)]
    trials = tuple(Trial(size, "ok", {"backward": peak}) for size, peak in peaks)
    plan = replace(PLAN, trials=trials)
    assert list(prediction.errors(plan)) == [(-10 / 190, -10 / 82)]
