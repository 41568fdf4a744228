from __future__ import annotations

import dataclasses
import io
import time

from rich.console import Console

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import MIB, PHASES, Line, MemoryModel, NextSize, TimeModel, Trial
from lightning_batchmem.report.tables import SearchProgress, plan_table

PLAN = Plan(
    batch_size=32,
    limited_by="memory",
    verified=True,
    limit_bytes=200 * MIB,
    predicted_peak_bytes=164 * MIB,
    upper_peak_bytes=170 * MIB,
    measured_peak_bytes=165 * MIB,
    trials=(
        Trial(2, "ok", {"forward": 104 * MIB, "backward": 103 * MIB}, step_seconds=0.012, measured_steps=5),
        Trial(32, "ok", {"forward": 165 * MIB, "backward": 160 * MIB}, step_seconds=0.040, measured_steps=2),
        Trial(64, "out_of_memory", {"forward": 190 * MIB}),
    ),
    memory=MemoryModel({"forward": Line(100 * MIB, 2 * MIB, MIB, 2, 32)}),
    time=TimeModel(Line(0.010, 0.001, 0.0, 2, 32)),
    reason="32 samples: because.",
)


def rendered(width: int = 80, plan: Plan = PLAN) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(plan_table(plan))
    return stream.getvalue()


def test_a_row_for_each_size_with_its_figures() -> None:
    header, _, *rows = [line.strip() for line in rendered().splitlines()[1:] if line.strip()]
    assert header.split() == ["size", "forward", "backward", "peak", "line", "ms", "samples/s"]
    assert [row.split() for row in rows] == [
        ["2", "104.0", "103.0", "104.0", "104.0", "12.0", "167"],
        ["32", "165.0", "160.0", "165.0", "164.0", "40.0", "800"],
        ["64", "190.0", "no", "memory", "228.0"],
    ]


def test_nothing_is_cut_off_in_a_terminal_of_80_columns() -> None:
    peaks = dict.fromkeys(PHASES, 123_456 * MIB)
    trials = tuple(Trial(size, "ok", peaks, step_seconds=0.3) for size in (2, 8192))
    lines = {phase: Line(123_456 * MIB, 0.0, 0.0, 2, 3) for phase in PHASES}
    stream = io.StringIO()
    plan = dataclasses.replace(PLAN, trials=trials, memory=MemoryModel(lines))
    Console(file=stream, width=80).print(plan_table(plan))
    assert "…" not in stream.getvalue()
    assert stream.getvalue().count("123,456") == 2 * (len(PHASES) + 2)


def test_the_plan_reads_well() -> None:
    assert str(PLAN).splitlines() == [
        "batch size 32, limited by memory, verified by real steps",
        "  limit     200.0 MiB",
        "  predicted 164.0 MiB from the smaller sizes",
        "  margin    6.0 MiB on top, for noise and residuals of the lines",
        "  measured  165.0 MiB at its peak",
        "  memory    100.0 MiB + 2.0 MiB a sample (forward)",
        "  time      10 ms + 1 ms a sample",
        "  tried     2, 32, 64",
        "  why       32 samples: because.",
    ]


def test_the_plan_says_what_follows_from_it() -> None:
    line = Line(100 * MIB, 2 * MIB, MIB, 2, 32, repeatability=0.4)
    plan = dataclasses.replace(
        PLAN,
        memory=MemoryModel({"forward": line}),
        accumulate_grad_batches=4,
        effective_batch_size=128,
        learning_rate=0.2,
        learning_rate_before=0.1,
        notes=("Mind the step.",),
        evaluation=Plan(
            48, "dataset", False, 200 * MIB, None, None, None, (), None, None, "48 samples: all there are."
        ),
    )
    assert plan.margin_bytes == 6 * MIB
    text = str(plan).splitlines()
    assert (
        "  margin    6.0 MiB on top, for noise and residuals of the lines and 40% of the growth, by which the device"
        " differs from run to run" in text
    )
    assert text[-7:] == [
        "  step      128 samples, in 4 batches",
        "  lr        0.2 instead of 0.1",
        "  why       32 samples: because.",
        "  note      Mind the step.",
        "validation: batch size 48, limited by dataset, not verified",
        "  limit     200.0 MiB",
        "  why       48 samples: all there are.",
    ]


def test_progress_says_what_is_tried() -> None:
    stream = io.StringIO()
    with SearchProgress(Console(file=stream, force_terminal=True, width=120), enabled=True) as progress:
        progress.trying(NextSize(8, "a reason"))
        time.sleep(0.3)  # the spinner draws itself 12.5 times a second
    assert "trying batch size 8: a reason" in stream.getvalue()


def test_progress_is_silent_when_it_is_not_wanted() -> None:
    stream = io.StringIO()
    with SearchProgress(Console(file=stream, force_terminal=True), enabled=False) as progress:
        progress.trying(NextSize(8, "a reason"))
    assert stream.getvalue() == ""


def test_of_several_ranks_the_table_shows_each_and_all() -> None:
    plan = dataclasses.replace(PLAN, ranks=4, effective_batch_size=256, accumulate_grad_batches=2)
    shown = rendered(plan=plan)
    assert "on each of 4 ranks" in shown
    assert "3,200" in shown  # samples/s of all
    assert str(plan).startswith("batch size 32 on each of 4 ranks, limited by memory")
    assert "step      256 samples, in 2 batches on each of 4 ranks" in str(plan)
    assert "MiB at its peak on the rank that held most, at most " in str(plan)
    assert "MiB on all" in str(plan)
    assert "on the rank" not in str(PLAN)
    assert Plan.from_json(plan.to_json()) == plan
