"""The differences of two runs, and the data in the figures with both."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.two_runs import RunFiles, difference_table, draw_two, read_run
from tests.profile.test_figures import PLAN, SUMMARY, row

ROWS = [row(0, 100), row(1, 300), row(0, 900, stage="validate")]
FIRST = RunFiles("a", ROWS, SUMMARY, PLAN)
SECOND = RunFiles(
    "b",
    [row(0, 50), row(1, 60)],
    replace(
        SUMMARY,
        peak_bytes=1500 * MIB,
        samples_per_second=12.5,
        data_wait_share=0.05,
        batch_size=96,
    ),
    PLAN,
)
KILLED = RunFiles("killed", ROWS, None, None)


def cells(first, second):
    console = Console(width=80, file=io.StringIO())
    console.print(difference_table(first, second))
    rows = [line.split("│")[1:5] for line in console.file.getvalue().splitlines() if "│" in line]
    return {name.strip(): [cell.strip() for cell in others] for name, *others in rows}


def test_the_changes_of_two_runs():
    assert cells(FIRST, SECOND) == {
        "batch size": ["64", "96", "+50.0%"],
        "peak": ["2,000.0 MiB", "1,500.0 MiB", "-25.0%"],
        "samples/s": ["10.0", "12.5", "+25.0%"],
        "step": ["100.0 ms", "100.0 ms", "+0.0%"],
        "waiting for data": ["20.0%", "5.0%", "-15.0 points"],
    }


def test_a_run_that_was_killed_has_a_peak_only():
    shown = cells(KILLED, SECOND)
    # The peak of validation is higher, but the summary has that of training too.
    assert shown["peak"] == ["300.0 MiB", "1,500.0 MiB", "+400.0%"]
    assert shown["samples/s"] == ["-", "12.5", "-"]


def test_both_runs_are_in_each_figure():
    figures = draw_two(FIRST, SECOND)
    assert set(figures) == {
        "memory_over_steps",
        "memory_composition",
        "throughput_vs_batch_size",
    }
    lines = {line.get_label(): line for line in figures["memory_over_steps"].axes[0].lines}
    assert list(lines["a"].get_ydata()) == [100, 300]
    assert list(lines["b"].get_ydata()) == [50, 60]
    heights = {0: 0.0, 1: 0.0}
    for bar in figures["memory_composition"].axes[0].patches:
        heights[round(bar.get_x() + bar.get_width() / 2)] += bar.get_height()
    assert heights == {0: pytest.approx(2000), 1: pytest.approx(2000)}
    speeds = figures["throughput_vs_batch_size"].axes[0].lines
    assert [list(line.get_xdata()) for line in speeds] == [[2, 32], [2, 32]]


def test_a_figure_needs_the_data_of_both_runs():
    assert set(draw_two(FIRST, KILLED)) == {"memory_over_steps"}
    assert not draw_two(RunFiles("empty", [], None, None), FIRST)


def test_the_run_of_a_directory_or_of_a_file(tmp_path):
    text = "step,stage,peak_allocated_mib\n0,train,5.0\n"
    path = tmp_path / "version_0" / "memory_per_batch.csv"
    path.parent.mkdir()
    path.write_text(text)
    run = read_run(tmp_path)
    assert run == RunFiles(str(tmp_path), [row(0, 5.0)], None, None)
    numbered = path.with_stem("memory_per_batch_1")
    numbered.write_text(text.replace("5.0", "6.0"))
    path.with_name("memory_summary.json").write_text(SUMMARY.to_json())
    path.with_name("memory_summary_1.json").write_text(
        replace(SUMMARY, peak_bytes=6 * MIB).to_json()
    )
    assert read_run(numbered).peak_bytes == 6 * MIB
    for wrong, found in (
        (tmp_path, "version_0/memory_per_batch.csv, version_0/memory_per_batch_1.csv"),
        (tmp_path / "version_0" / "missing", "none"),
    ):
        with pytest.raises(ValueError, match=r"must have one memory_per_batch\.csv") as error:
            read_run(wrong)
        assert str(error.value).endswith(f"with: {found}")
