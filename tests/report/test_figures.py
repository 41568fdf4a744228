"""The figures: what is drawn where, and that nothing covers anything else; never the pixels."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from lightning_batchmem.plan.records import MIB, Line, MemoryModel, TimeModel
from lightning_batchmem.report.figures import (
    plot_memory_over_steps,
    plot_memory_vs_batch_size,
    plot_throughput_vs_batch_size,
    save,
)
from tests.drawn import PLAN, check_layout, labels, line, row, trial

GIB = 1024 * MIB


STEPS = [row(step, 100 + step, limit=300 if step % 5 == 0 else None) for step in range(20)]


def test_memory_over_steps() -> None:
    figure = plot_memory_over_steps(STEPS)
    steps, peaks = line(figure, "peak of the step")
    assert steps == list(range(20))
    assert peaks == [100 + step for step in range(20)]
    assert line(figure, "forward")[1] == peaks
    assert line(figure, "backward")[1] == [peak - 10 for peak in peaks]
    assert set(line(figure, "limit 300 MiB")[1]) == {300}
    assert figure.axes[0].get_ylabel() == "memory (MiB)"
    assert figure.axes[0].get_ylim()[0] == 0
    assert figure.axes[0].get_ylim()[1] > 300
    assert labels(figure) == ["forward", "backward", "peak of the step", "limit 300 MiB"]


def test_a_missing_reading_is_a_gap_and_never_0() -> None:
    figure = plot_memory_over_steps([row(0), row(1, None), row(2)])
    assert line(figure, "peak of the step") == ([0, 1, 2], [100, None, 100])
    assert line(figure, "forward")[1] == [100, None, 100]
    with pytest.raises(ValueError, match=r"^rows must hold at least one step .*, got 1 that do not"):
        plot_memory_over_steps([row(0, None)])


def test_reserved_memory_has_a_line_of_its_own_in_gib_where_it_is_much() -> None:
    rows = [row(step, 10 * 1024, peak_reserved_bytes=12 * GIB) for step in range(3)]
    figure = plot_memory_over_steps(rows, limit_bytes=16 * GIB)
    assert line(figure, "reserved") == ([0, 1, 2], [12, 12, 12])
    assert line(figure, "peak of the step")[1] == [10, 10, 10]
    assert line(figure, "limit 16.0 GiB")[1] == [16, 16]
    assert figure.axes[0].get_ylabel() == "memory (GiB)"


def test_an_evaluation_stands_at_the_training_step_before_it() -> None:
    rows = [row(0), row(1), row(0, 50, stage="validate"), row(1, 60, stage="validate"), row(2)]
    figure = plot_memory_over_steps(rows)
    assert line(figure, "peak, train") == ([0, 1, 2], [100, 100, 100])
    assert line(figure, "peak, validate") == ([1, 1], [50, 60])
    colours = {found.get_label(): found.get_color() for found in figure.axes[0].lines}
    assert len(set(colours.values())) == len(colours)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_without_training_is_a_line_at_its_own_steps(stage: str) -> None:
    figure = plot_memory_over_steps([row(step, 50 + step, stage=stage, limit=80) for step in range(30)])
    assert line(figure, f"peak, {stage}") == (list(range(30)), [50 + step for step in range(30)])
    (drawn,) = [one for one in figure.axes[0].lines if one.get_label() == f"peak, {stage}"]
    assert drawn.get_linestyle() == "-"
    assert labels(figure) == [f"peak, {stage}", "limit 80.0 MiB"]


def test_a_resumed_run_that_goes_back_is_no_line_backwards() -> None:
    figure = plot_memory_over_steps([row(0), row(1), row(2), row(1), row(2)])
    assert line(figure, "peak of the step")[0] == [0, 1, 2, None, 1, 2]


def test_a_limit_that_changes_holds_until_it_was_asked_again() -> None:
    figure = plot_memory_over_steps([row(0, limit=300), row(1), row(2, limit=280), row(3)])
    assert line(figure, "limit 280 MiB") == ([0, 2, 3], [300, 280, 280])
    (found,) = [one for one in figure.axes[0].lines if one.get_label() == "limit 280 MiB"]
    assert found.get_drawstyle() == "steps-post"


def test_a_limit_far_above_does_not_press_the_data_to_the_floor() -> None:
    figure = plot_memory_over_steps(STEPS, limit_bytes=23 * GIB)
    assert line(figure, "limit 23.0 GiB (above)") == ([], [])
    assert figure.axes[0].get_ylim()[1] < 200


def test_many_steps_are_drawn_by_the_highest_of_each_few() -> None:
    rows = [row(step, 900 if step == 1234 else 100) for step in range(2500)]
    figure = plot_memory_over_steps(rows)
    steps, peaks = line(figure, "peak of the step")
    assert len(steps) == 834
    assert [(step, peak) for step, peak in zip(steps, peaks, strict=True) if peak != 100] == [(1233, 900)]
    assert "every 3 steps" in figure._suptitle.get_text()


@pytest.mark.parametrize(("rows_made", "said"), [(300, "every 4 steps"), (1500, "every 8 steps")])
def test_rows_that_stand_for_several_steps_each_say_so(rows_made: int, said: str) -> None:
    rows = [row(4 * index) for index in range(rows_made)]
    rows[200:200] = [row(0, 50, stage="validate"), row(4, 50, stage="validate")]
    assert said in plot_memory_over_steps(rows)._suptitle.get_text()
    resumed = plot_memory_over_steps([*rows, *rows[-50:]])  # a resumed run goes back: no distance between two rows
    assert said in resumed._suptitle.get_text()


def test_steps_that_were_skipped_make_no_row_stand_for_several() -> None:
    figure = plot_memory_over_steps([row(step) for step in (0, 1, 2, 50, 51, 52, 90)])
    assert figure._suptitle.get_text() == "Peak memory of each step"
    one_batch_each = plot_memory_over_steps(
        [row(0, stage="validate"), row(0, stage="validate"), row(0, stage="validate")]
    )
    assert one_batch_each._suptitle.get_text() == "Peak memory of each step"


def test_memory_vs_batch_size() -> None:
    figure = plot_memory_vs_batch_size(PLAN)
    assert line(figure, "whole step") == ([2, 4, 32], [104, 108, 165])
    assert line(figure, "forward") == ([2, 4, 32], [104, 108, 165])
    assert line(figure, "backward") == ([2, 4, 32], [103, 107, 160])
    assert line(figure, "out of memory") == ([48], [200])  # its own peak is not known: 90 MiB are drawn nowhere
    sizes, expected = line(figure, "fitted line")
    assert sizes[0] == 2
    assert sizes[-1] == pytest.approx(1.1 * 48)
    assert expected == pytest.approx([100 + 2 * size for size in sizes])
    assert line(figure, "chosen: 32")[0] == [32, 32]
    assert line(figure, "limit 200 MiB")[1] == [200, 200]
    assert figure.axes[0].get_xlabel() == "batch size (samples)"
    assert figure.axes[0].get_xscale() == "linear"


def test_the_band_ends_at_the_upper_bound() -> None:
    memory = MemoryModel({"forward": Line(100 * MIB, 2 * MIB, 3 * MIB, 2, 32, repeatability=0.4)}, reserved_ratio=1.5)
    figure = plot_memory_vs_batch_size(replace(PLAN, memory=memory))
    (band,) = figure.axes[0].collections
    outline = {(round(float(x), 6), round(float(y), 6)) for x, y in band.get_paths()[0].vertices}
    for size in (2.0, 1.1 * 48):
        heights = {y for x, y in outline if x == pytest.approx(size)}
        assert max(heights) == pytest.approx(memory.upper_bytes(size) / MIB)
        assert min(heights) == pytest.approx(memory.predict_bytes(size) / MIB)
    assert band.get_label() == "up to its upper bound"


def test_a_line_is_left_out_below_the_sizes_it_was_fitted_to() -> None:
    memory = MemoryModel({"forward": Line(-100 * MIB, 8 * MIB, 0.0, 16, 32)})
    sizes, expected = line(plot_memory_vs_batch_size(replace(PLAN, memory=memory)), "fitted line")
    assert 16 <= sizes[0] < 17
    assert expected[0] == pytest.approx(8 * sizes[0] - 100)


def test_reserved_bytes_are_what_the_limit_is_held_against() -> None:
    trials = (trial(2, 104, reserved=130 * MIB), trial(4, 108, reserved=140 * MIB))
    figure = plot_memory_vs_batch_size(replace(PLAN, trials=trials))
    assert line(figure, "whole step (reserved)") == ([2, 4], [130, 140])
    assert line(figure, "forward") == ([2, 4], [104, 108])


@pytest.mark.parametrize(("last", "scale"), [(90, "linear"), (92, "log")])
def test_sizes_that_span_much_get_a_logarithmic_axis(last: int, scale: str) -> None:
    plan = replace(PLAN, trials=(*PLAN.trials[:3], trial(last, 180, seconds=0.1)))
    for figure in (plot_memory_vs_batch_size(plan), plot_throughput_vs_batch_size(plan)):
        assert figure.axes[0].get_xscale() == scale


def test_a_single_size_without_lines() -> None:
    plan = replace(PLAN, batch_size=2, trials=PLAN.trials[:1], memory=None, time=None)
    assert labels(plot_memory_vs_batch_size(plan)) == [
        "forward", "backward", "whole step", "limit 200 MiB", "chosen: 2",
    ]  # fmt: skip
    assert labels(plot_throughput_vs_batch_size(plan)) == ["measured", "chosen: 2"]


def test_throughput_vs_batch_size() -> None:
    figure = plot_throughput_vs_batch_size(PLAN)
    sizes, speeds = line(figure, "measured")
    assert sizes == [2, 4, 32]  # the size that ran out of memory has no time, and is left out
    assert speeds == pytest.approx([2 / 0.012, 4 / 0.014, 32 / 0.040])
    sizes, speeds = line(figure, "fitted curve")
    assert speeds == pytest.approx([size / (0.010 + 0.001 * size) for size in sizes], abs=1e-3)
    assert line(figure, "tends to 1,000 samples/s")[1] == [1000, 1000]
    assert line(figure, "95% of that, from 190")[1] == [950, 950]  # 190 / (0.010 + 0.190) = 950
    assert line(figure, "chosen: 32")[0] == [32, 32]
    assert figure.axes[0].get_ylabel() == "throughput (samples/s)"


@pytest.mark.parametrize(
    ("line_of_time", "said"),
    [
        (Line(0.010, 1e-6, 0.0, 2, 32), "tends to 1,000,000 samples/s (above)"),
        (Line(-0.001, 0.001, 0.0, 2, 32), "tends to 1,000 samples/s"),
        (Line(0.010, 0.0, 0.0, 2, 32), ""),
    ],
)
def test_odd_lines_of_time(line_of_time: Line, said: str) -> None:
    figure = plot_throughput_vs_batch_size(replace(PLAN, time=TimeModel(line_of_time)))
    assert [label for label in labels(figure) if "tends" in label] == ([said] if said else [])
    assert any("95%" in label for label in labels(figure)) == (line_of_time.intercept > 0 and line_of_time.slope > 0)
    assert figure.axes[0].get_ylim()[1] < 1200


def test_nothing_that_was_run_is_an_error_with_a_sentence() -> None:
    for draw in (plot_memory_vs_batch_size, plot_throughput_vs_batch_size):
        with pytest.raises(ValueError, match=r"^plan must hold at least one size that was run, got none"):
            draw(replace(PLAN, trials=()))
    with pytest.raises(ValueError, match=r"^plan must hold at least one trial with its time, got none"):
        plot_throughput_vs_batch_size(replace(PLAN, trials=(trial(2, 104),)))


LONG = replace(
    PLAN,
    batch_size=123_456,
    limit_bytes=140 * GIB,
    trials=tuple(
        trial(size, 20_000, 30_000, 40_000, 35_000, seconds=0.01, reserved=45_000 * MIB)
        for size in (2, 3, 4, 9, 27, 64, 216, 536, 1112, 123_456)
    )
    + PLAN.trials[3:],
)
FIGURES = {
    "steps": lambda: plot_memory_over_steps(STEPS),
    "test alone": lambda: plot_memory_over_steps([row(step, stage="test", limit=250) for step in range(0, 64, 4)]),
    "one step": lambda: plot_memory_over_steps(STEPS[:1]),
    "all stages": lambda: plot_memory_over_steps(
        [row(123_456 + step, 20_480, peak_reserved_bytes=20 * GIB) for step in range(0, 90_000, 1000)]
        + [row(0, 20_000, stage=stage) for stage in ("validate", "test", "predict")],
        limit_bytes=500 * GIB,
    ),
    "memory": lambda: plot_memory_vs_batch_size(PLAN),
    "memory, far limit": lambda: plot_memory_vs_batch_size(
        replace(PLAN, limit_bytes=140 * GIB, trials=PLAN.trials[:3])
    ),
    "memory, long": lambda: plot_memory_vs_batch_size(LONG),
    "throughput": lambda: plot_throughput_vs_batch_size(PLAN),
    "throughput, long": lambda: plot_throughput_vs_batch_size(replace(LONG, time=TimeModel(Line(0.1, 1e-8, 0, 2, 9)))),
}


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_overlaps_and_nothing_is_cut_off(name: str) -> None:
    check_layout(FIGURES[name]())


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PNG", b"\x89PNG")])
def test_saved_by_its_ending(tmp_path, ending: str, begins: bytes) -> None:
    path = tmp_path / "made" / f"figure.{ending}"
    save(plot_memory_vs_batch_size(PLAN), path)
    assert path.read_bytes().startswith(begins)
    assert b"dc:date" not in path.read_bytes()


def test_another_ending_is_an_error(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"^path must end in \.png or \.svg, got '.*figure\.pdf'"):
        save(plot_memory_vs_batch_size(PLAN), tmp_path / "figure.pdf")


def test_no_figure_is_left_in_pyplot_and_no_setting_changes() -> None:
    program = """
import matplotlib
from lightning_batchmem.report.figures import plot_composition
from lightning_batchmem.measure.breakdown import Parts
before = dict(matplotlib.rcParams)
plot_composition(Parts(1, 2, 3, 4, 5, 6))
assert dict(matplotlib.rcParams) == before
from matplotlib import pyplot
assert not pyplot.get_fignums()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=r'pip install "lightning-batchmem\[plot\]"'):
        plot_memory_vs_batch_size(PLAN)
