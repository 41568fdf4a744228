from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from lightning_batchmem.measure.breakdown import MemoryBreakdown
from lightning_batchmem.report.tables import Summary, breakdown_text, mib, show_summary

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
        "other (interpreter, libraries)": ("50.0", "2.5%"),
        "peak": ("2,000.0", "100.0%"),
    }


def test_other_numbers_stand_below():
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
    assert "other (workspaces, kept tensors)" in text(reserved)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"breakdown": None}, "No breakdown: the run ended before the first step after an optimizer step"),
        ({"peak_bytes": 2001 * MIB}, "came before the first step after an optimizer step"),
        ({"breakdown": MemoryBreakdown(2100 * MIB, 0, 0, 0, 0, -100 * MIB)}, "some tensors are not resident"),
    ],
)
def test_notes_on_the_breakdown(change, note):
    assert note not in " ".join(text(SUMMARY).split())
    assert note in " ".join(text(dataclasses.replace(SUMMARY, **change)).split())


def test_missing_numbers_are_left_out():
    bare = dataclasses.replace(SUMMARY, breakdown=None, samples_per_second=None, data_wait_share=None, batch_size=None)
    assert "samples" not in text(bare)
    assert "waiting" not in text(bare)
    assert cells(bare) == {"peak": ("2,000.0", "100.0%")}


def test_mib():
    assert mib(1536 * MIB + 51 * MIB // 1024) == "1,536.0"
    assert mib(-MIB // 2) == "-0.5"


def test_a_breakdown_in_one_line():
    assert breakdown_text(MemoryBreakdown(100 * MIB, 0, 200 * MIB, 0, 1500 * MIB, 50 * MIB)) == (
        "100.0 MiB parameters and buffers, 0.0 MiB gradients, 200.0 MiB optimizer state,"
        " 1,500.0 MiB activations and temporaries, 0.0 MiB batch data, 50.0 MiB other"
    )


def test_other_memory_stands_below_the_peak():
    shown = cells(
        dataclasses.replace(
            SUMMARY, peak_reserved_bytes=2100 * MIB, outside_bytes=512 * MIB, predicted_bytes=1950 * MIB
        )
    )
    assert list(shown)[-4:] == ["peak", "predicted by the plan", "cached, unused", "outside the allocator"]
    assert shown["predicted by the plan"] == ("1,950.0", "")
    assert (shown["cached, unused"], shown["outside the allocator"]) == (("100.0", ""), ("512.0", ""))
    assert "cached, unused" not in cells(SUMMARY)


def test_validation_alerts_ranks_and_items_stand_below():
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
    assert "Warning: Something rises." in shown
    assert "Peaks of 2 ranks: 1,900.0 to 2,000.0 MiB, highest on 1; 3,900.0 MiB in all" in " ".join(shown.split())
    assert "1,234.5 samples/s, 99.5 items/s" in shown
    assert "Memory of a validation step (host)" in text(validation)


def test_without_memory_only_the_times_are_printed():
    bare = dataclasses.replace(SUMMARY, device="mps", peak_bytes=None, limit_bytes=None, breakdown=None)
    assert "MiB" not in text(bare)
    assert "1,200 steps of 12.5 ms" in text(bare)


@pytest.mark.parametrize("breakdown", [SUMMARY.breakdown, None])
def test_a_summary_survives_json(breakdown):
    validation = dataclasses.replace(SUMMARY, stage="validate")
    changes = {"breakdown": breakdown, "alerts": ("a", "b"), "rank_peaks_bytes": (1, 2), "validation": validation}
    summary = dataclasses.replace(SUMMARY, **changes)
    assert Summary.from_json(summary.to_json()) == summary
    older = {**json.loads(summary.to_json()), "has_peak": True, "estimate": None}
    assert Summary.from_json(json.dumps(older)) == summary


@pytest.mark.parametrize("wrong", ["{}", "[]", "no JSON", '{"device": "host"}'])
def test_other_json_is_no_summary(wrong):
    with pytest.raises(ValueError, match=r"must be the JSON of a Summary|Expecting value"):
        Summary.from_json(wrong)
