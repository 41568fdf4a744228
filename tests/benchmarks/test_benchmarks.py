"""The benchmarks run, and their tables can be read back."""

import pytest

from benchmarks import trace
from benchmarks.common import in_fresh_process
from benchmarks.oracle import largest_surviving
from benchmarks.workloads import WORKLOADS


def rows_of(table):
    """The cells of a Markdown table, without its second line."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    return [[cell.strip() for cell in line] for line in (lines[0], *lines[2:])]


@pytest.mark.parametrize("known", [{}, {1: [True], 450: [False]}])
@pytest.mark.parametrize("limit", [1, 7, 90, 400])
def test_largest_surviving_size(limit, known):
    found = largest_surviving(lambda size, count: [size <= limit] * count, known=known, largest=500)
    assert 0.97 * limit <= found <= limit


@pytest.mark.slow
def test_a_training_in_a_control_group_survives_or_is_killed():
    room_bytes = WORKLOADS["LSTM"].room_bytes
    try:
        small = in_fresh_process("benchmarks.ways", "LSTM", "2", "--steps", "3", room_bytes=room_bytes)
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    assert (small["error"], small["steps"]) == (None, 3)
    assert 0 < small["used_bytes"] <= small["peak_bytes"] < room_bytes
    large = in_fresh_process("benchmarks.ways", "LSTM", "400", room_bytes=room_bytes)
    assert (large["error"], large["last_new_size"], large.get("steps")) == ("killed", 400, None)


@pytest.mark.filterwarnings("ignore")  # of Lightning's finder
def test_trace_of_one_way_to_train():
    name = "dropout"
    head, row, total = rows_of(trace.table({name: {finder: trace.compare(name, finder) for finder in trace.FINDERS}}))
    found = dict(zip(head, row, strict=True))
    assert (found["BatchFinder"], found["no finder"]) == ("identical", "identical")
    assert {"weights", "random"} <= set(found["power"].split(", "))
    assert total[1:] == ["1 of 1 identical", "0 of 1 identical", "0 of 1 identical", "1 of 1 identical"]
