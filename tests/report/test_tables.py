from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from lightning_batchmem.measure.breakdown import MemoryBreakdown
from lightning_batchmem.measure.estimate import Estimate
from lightning_batchmem.report.summary import Summary
from lightning_batchmem.report.tables import breakdown_text, mib, show_summary

MIB = 2**20
SUMMARY = Summary(
    device="host",
    steps=1200,
    peak_bytes=2000 * MIB,
    peak_step=37,
    batch_size=64,
    phase_peak_bytes={"forward": 1900 * MIB, "backward": 2000 * MIB},
    peak_reserved_bytes=None,
    limit_bytes=8192 * MIB,
    breakdown=MemoryBreakdown(100 * MIB, 100 * MIB, 200 * MIB, 50 * MIB, 1500 * MIB, 50 * MIB),
    samples_per_second=1234.5,
    step_seconds=0.0125,
    data_wait_share=0.25,
)


def text(summary):
    console = Console(width=80, file=io.StringIO())
    show_summary(summary, console)
    return console.file.getvalue()


def cells(summary):
    lines = [line for line in text(summary).splitlines() if "│" in line]
    return {name: (size, share) for name, size, share in (map(str.strip, x.split("│")[1:4]) for x in lines)}


def test_every_part_with_its_share():
    assert cells(SUMMARY) == {
        "parameters and buffers": ("100.0", "5.0%"),
        "gradients": ("100.0", "5.0%"),
        "optimizer state": ("200.0", "10.0%"),
        "activations and temporaries": ("1,500.0", "75.0%"),
        "batch data": ("50.0", "2.5%"),
        "the rest (interpreter, libraries)": ("50.0", "2.5%"),
        "peak": ("2,000.0", "100.0%"),
    }


def test_the_runs_other_numbers_stand_below():
    shown = text(SUMMARY)
    for expected in (
        "2,000.0 MiB at step 37 (64 samples)",
        "8,192.0 MiB",
        "1,200 steps of 12.5 ms",
        "1,234.5 samples/s",
        "25.0% of the time waiting for data",
    ):
        assert expected in shown
    assert "eserved" not in shown
    reserved = dataclasses.replace(SUMMARY, device="cuda", peak_reserved_bytes=2048 * MIB)
    assert "Reserved: 2,048.0 MiB" in text(reserved)
    assert "the rest (workspaces, kept tensors)" in text(reserved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"breakdown": None}, "too short"),
        ({"peak_bytes": 2001 * MIB}, "before the first step after an optimizer step"),
        ({"breakdown": MemoryBreakdown(2100 * MIB, 0, 0, 0, 0, -100 * MIB)}, "not all of the tensors are resident"),
        ({"has_peak": False}, "No peak could be read"),
        ({"has_peak": False}, "highest value seen"),
    ],
)
def test_what_a_reader_has_to_know_is_said(change, said):
    assert said not in " ".join(text(SUMMARY).split())
    assert said in " ".join(text(dataclasses.replace(SUMMARY, **change)).split())


def test_missing_numbers_are_left_out():
    bare = dataclasses.replace(SUMMARY, breakdown=None, samples_per_second=None, data_wait_share=None, batch_size=None)
    assert "samples" not in text(bare)
    assert "waiting" not in text(bare)
    assert cells(bare) == {"peak": ("2,000.0", "100.0%")}


def test_mib():
    assert mib(1536 * MIB + 51 * MIB // 1024) == "1,536.0"
    assert mib(-MIB // 2) == "-0.5"


def test_the_parts_in_a_sentence():
    assert breakdown_text(MemoryBreakdown(100 * MIB, 0, 200 * MIB, 0, 1500 * MIB, 50 * MIB)) == (
        "100.0 MiB parameters and buffers, 0.0 MiB gradients, 200.0 MiB optimizer state,"
        " 1,500.0 MiB activations and temporaries, 0.0 MiB batch data, 50.0 MiB the rest"
    )


def test_what_arithmetic_and_the_plan_say_stands_beside_the_measurement():
    estimate = Estimate(90 * MIB, 100 * MIB, None, 49 * MIB)
    shown = text(dataclasses.replace(SUMMARY, estimate=estimate, predicted_bytes=1950 * MIB))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    assert {name: estimated for name, _, _, estimated in rows} == {
        "parameters and buffers": "90.0",
        "gradients": "100.0",
        "optimizer state": "",
        "activations and temporaries": "",
        "batch data": "49.0",
        "the rest (interpreter, libraries)": "",
        "peak": "1,950.0",
    }


def test_what_the_device_holds_beyond_the_peak():
    shown = cells(dataclasses.replace(SUMMARY, peak_reserved_bytes=2100 * MIB, outside_bytes=512 * MIB))
    assert list(shown)[-3:] == ["peak", "cached, unused", "outside the allocator"]
    assert (shown["cached, unused"], shown["outside the allocator"]) == (("100.0", ""), ("512.0", ""))
    assert "cached, unused" not in cells(SUMMARY)


def test_an_evaluation_alarms_ranks_and_items_are_said_below():
    validation = dataclasses.replace(SUMMARY, stage="validate", peak_bytes=2500 * MIB, steps=3)
    summary = dataclasses.replace(
        SUMMARY,
        validation=validation,
        alerts=("Something rises.",),
        rank_peaks_bytes=(1900 * MIB, 2000 * MIB),
        items_per_second=99.5,
    )
    shown = " ".join(text(summary).split())
    assert "Validation: highest peak 2,500.0 MiB, 3 steps of 12.5 ms" in shown
    assert "Warned: Something rises." in shown
    assert "Peaks of 2 ranks: 1,900.0 to 2,000.0 MiB, highest on 1; 3,900.0 MiB in all" in " ".join(shown.split())
    assert "1,234.5 samples/s, 99.5 items/s" in shown
    assert "Memory of a validation step (host)" in text(validation)


def test_a_summary_survives_json():
    estimate = Estimate(1, 2, None, 3)
    changes = {"estimate": estimate, "alerts": ("a", "b"), "rank_peaks_bytes": (1, 2)}
    summary = dataclasses.replace(SUMMARY, validation=dataclasses.replace(SUMMARY, stage="validate"), **changes)
    assert Summary.from_json(summary.to_json()) == summary
    assert Summary.from_json(dataclasses.replace(SUMMARY, breakdown=None).to_json()).breakdown is None
