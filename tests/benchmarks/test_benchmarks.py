"""Each benchmark runs, and the table that it prints can be read back."""

import importlib
import json
import re
import shlex
import shutil
import statistics
import sys
from functools import partial
from itertools import pairwise

import pytest

from benchmarks import search, simulated_cost, throughput
from benchmarks.common import ROOT, in_fresh_process
from benchmarks.search import largest_that
from benchmarks.ways import NETWORKS

COMMANDS = [
    path.stem
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if "__main__" in path.read_text()
]
RESULTS = ROOT / "benchmarks" / "results" / "cpu-2-cores"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command as ``python -m benchmarks.COMMAND`` does; returns what it prints."""

    def run_command(command):
        name, *arguments = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        importlib.import_module(f"benchmarks.{name}").main()
        return capsys.readouterr().out

    return run_command


def rows_of(printed):
    """The rows of a Markdown table, by the name of the column."""
    lines = [line.strip("|").split("|") for line in printed.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_command(name, run, capsys):
    with pytest.raises(SystemExit, match="0"):
        run(f"{name} --help")
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out


def test_the_trace_of_batch_finder_is_empty_and_that_of_lightning_is_not(run):
    row, total = rows_of(run("trace --only dropout"))
    assert (row["BatchFinder"], row["no finder"]) == ("identical", "identical")
    assert {"weights", "random"} <= set(row["power"].split(", "))
    identical = ["1 of 1 identical", "0 of 1 identical", "0 of 1 identical", "1 of 1 identical"]
    assert list(total.values()) == ["all", *identical]


def test_predictions_have_the_errors_that_the_documentation_states(run):
    *_, total = rows_of(run("prediction"))
    page = " ".join((ROOT / "docs" / "comparison.md").read_text().split())
    assert total["network"] == "all"
    assert int(total["predictions"]) >= 70
    assert f"median error of {total['predictions']} predictions is 0.00 %" in page
    assert total["error of the peak, median"] == "0.00%"
    largest = abs(float(total["error of the peak, largest"].strip("%")))
    assert f"The largest error is {largest:.1f} %" in page
    too_low = total["peak too low by more than 0%"].strip("%")
    assert f"{too_low} % were too low, none of them by more than 1 %" in page
    assert total["peak too low by more than 1%"] == "0%"


@pytest.fixture(scope="module")
def searches():
    """The stored searches and trainings, by network."""
    return json.loads((RESULTS / "search.json").read_text())["networks"]


def errors_of(known):
    """How searches of BatchFinder with a network ended, and trainings at the sizes found."""
    runs = known["searches"]["BatchFinder"]
    sizes = {str(run["batch_size"]) for run in runs if run.get("batch_size")}
    trainings = [error for size in sizes for error in known["trainings"].get(size, [])]
    return [*(run["error"] for run in runs), *trainings]


def test_a_search_continues_from_its_file(run, searches, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "in_fresh_process", None)
    path = shutil.copy(RESULTS / "search.json", tmp_path)
    command = f"search --quick --ways BatchFinder --only {shlex.join(NETWORKS)} --file {path}"
    rows = rows_of(run(command))
    assert [row["network"] for row in rows] == list(NETWORKS)
    for row in rows:
        count = len(errors_of(searches[row["network"]]))
        assert f"failed 0 of {count}" in row["BatchFinder"]
    for name in ("search.json", "search.md"):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text()


def test_the_page_has_the_processes_of_all_networks(searches):
    """A change of the results without a change of the page fails."""
    errors = [error for known in searches.values() for error in errors_of(known)]
    count = sum(len(known["searches"]["BatchFinder"]) for known in searches.values())
    page = (ROOT / "docs" / "comparison.md").read_text()
    assert not any(errors)
    counts = f"0 of {count} | 0 of {len(errors) - count} |"
    assert f"| BatchFinder | {len(searches)} | {counts}" in page


def added_by_each(rows, size_of, key):
    """What each unit of the size adds, between neighbouring rows: the least and the most."""
    added = [
        (more[key] - less[key]) / (size_of(more) - size_of(less)) for less, more in pairwise(rows)
    ]
    return min(added), max(added)


def test_the_page_has_what_a_simulated_search_costs():
    path = ROOT / "benchmarks" / "results" / "cuda-stub" / "simulated_cost.json"
    results = json.loads(path.read_text())
    assert results.keys() == simulated_cost.ROWS.keys()
    page = " ".join((ROOT / "docs" / "any-gpu.md").read_text().split())
    others = [row for row in results.values() if row["network"] != "resnet18"]
    seconds = [row["CPU s"] for row in others]
    assert f"takes {min(seconds):.1f} to {max(seconds):.1f} CPU seconds, besides 5 s of" in page
    assert statistics.median(row["imports s"] for row in others) == pytest.approx(5, abs=0.5)
    assert max(row["host GiB"] for row in others) <= 1
    by_layers = [results[f"gpt-{layers} 24GiB"] for layers in (8, 16, 32, 64)]
    least, most = added_by_each(
        by_layers, lambda row: int(row["network"].removeprefix("gpt-")), "ms a step"
    )
    assert f"each layer adds {least:.0f} to {most:.0f} ms to a step" in page
    images = [row for row in results.values() if row["network"] == "resnet18"]
    added = added_by_each(images, lambda row: row["found"] / 1000, "host GiB")
    assert f"takes {min(added):.1f} to {max(added):.1f} GiB of main memory" in page
    seconds = [row["CPU s"] for row in images]
    assert f"its searches {min(seconds):.0f} to {max(seconds):.0f} CPU seconds" in page


def test_a_training_in_a_control_group_survives_or_is_killed():
    training = partial(
        in_fresh_process, "benchmarks.ways", "LSTM", room_bytes=NETWORKS["LSTM"].room_bytes
    )
    try:
        small = training("2", "--steps", "3")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    assert (small["error"], small["steps"]) == (None, 3)
    assert 0 < small["used_bytes"] <= small["peak_bytes"] < NETWORKS["LSTM"].room_bytes
    large = training("400")
    assert (large["error"], large["last_new_size"], large.get("steps")) == ("killed", 400, None)


def test_overhead_is_relative_to_memory_profiler(run):
    rows = rows_of(run("overhead --runs 1"))
    assert {row["log_every_n_steps"] for row in rows} == {"50", "1"}
    assert all(row["MemoryProfiler us"].endswith(" (1.00)") for row in rows)


@pytest.mark.parametrize("start", [1, 100])
@pytest.mark.parametrize("largest", [0, 1, 7, 90, 130, 1000])
def test_the_largest_size_that_passes_is_found_from_any_start(largest, start):
    found_size = largest_that(lambda size: size <= largest, start)
    assert 0.97 * largest <= found_size <= largest


def found(batch_size, search_seconds, step_seconds):
    return {
        "batch_size": batch_size,
        "search_seconds": search_seconds,
        "step_seconds": [step_seconds] * 3,
        "error": None,
    }


def test_the_regret_of_a_search_is_against_the_fastest_size_of_the_ladder():
    searches = {
        "memory": [found(8, 4.0, 0.25)],
        "throughput": [found(4, 2.0, 0.1), found(2, 3.0, 0.1), {"error": "killed"}],
        "Lightning power": [],
    }
    # These are 20, 40 and 32 samples per second.
    steps = {"error": None, "step_seconds": {"2": [0.1] * 3, "4": [0.1] * 3, "8": [0.25] * 3}}
    printed = throughput.table({"net": {"searches": searches, "steps": steps}})
    memory, speed, power = rows_of(printed)
    assert list(memory.values())[2:] == ["8", "32", "4", "20.0%", "20.0%", "4.0", "16"]
    assert list(speed.values())[2:] == ["4, 2", "40, 20", "4", "25.0%", "50.0%", "2.5", "25"]
    assert power["sizes"] == "none"
    assert "throughput: regret 25.0% in the median over the networks, 50.0% at most" in printed
    assert "costs less than that for memory on 1 of 1 networks" in printed
    assert "- net, throughput: killed" in printed
    assert "- net, samples/s by size: 2: 20, 4: 40, 8: 32" in printed


def test_the_fastest_size_is_looked_up_in_other_rounds():
    # 2 and 4 samples are equally fast, and each of them has one lucky round.
    known = {
        "searches": {"memory": [found(2, 1.0, seconds) for seconds in (0.1, 0.2)]},
        "steps": {"step_seconds": {"2": [0.05, 0.1], "4": [0.2, 0.1]}},
    }
    # The size that is best in one round has 20 samples per second in the other.
    assert throughput.regrets(known, "memory") == pytest.approx([0.0, 0.5])


def test_a_training_that_is_faster_than_every_size_has_no_regret():
    known = {
        "searches": {"memory": [found(2, 1.0, 0.05)]},
        "steps": {"step_seconds": {"2": [0.1] * 2}},
    }
    assert throughput.regrets(known, "memory") == [0.0]


def test_throughput_times_the_ladder_and_the_training_after_each_search(run):
    printed = run("throughput --only 'small transformer' --repeats 1 --rounds 2")
    rows = rows_of(printed)
    assert [row["way"] for row in rows] == ["memory", "throughput", "Lightning power"]
    (timed,) = re.findall(r"^- small transformer, samples/s by size: (.+)$", printed, re.MULTILINE)
    sizes = re.findall(r"(\S+): ", timed)
    assert {row["fastest of the ladder"] for row in rows} <= set(sizes)
    assert all(float(row["samples/s"].replace(",", "")) > 0 for row in rows)
    assert all(float(row["regret, worst"].rstrip("%")) < 100 for row in rows)
    memory, _, power = (int(row["sizes"]) for row in rows)
    assert memory / 2 < power <= memory


def test_a_loop_and_a_trainer_measure_the_same_memory_on_the_host(run, monkeypatch):
    """Their sizes differ as those of two equal searches do, since the held bytes are not equal."""
    # For a tiny network, several threads are slower than one.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (row,) = rows_of(run("plain_loop --only 'small U-Net' --repeats 1"))
    assert min(int(row["loop"]), int(row["Trainer"])) > 100
    slopes = [float(row[f"{way}: MiB a sample"]) for way in ("loop", "Trainer")]
    assert slopes[0] == pytest.approx(slopes[1], rel=0.05)
