"""The arithmetic and the rows of benchmarks.published_devices; the steps themselves need a stub."""

import inspect

import pytest

from benchmarks.published_devices import (
    OUT_OF_MEMORY,
    ROWS,
    Row,
    chosen_rows,
    compared,
    explanations,
    notes_of,
    rows_of,
    stub_variables,
    summary,
)
from benchmarks.published_devices_steps import KINDS

GIB = 2**30
ALL_ROWS = rows_of(ROWS.read_text())


def row(published, unit="GiB reserved", **other):
    defaults = {
        "name": "a row",
        "source": "a table",
        "gpu": "16GiB",
        "ranks": 2,
        "kind": "gpt2",
        "goal_percent": 5,
        "settings": {},
    }
    return Row(published=published, unit=unit, **{**defaults, **other})


def found(gib=0.0, **other):
    return {"allocated": 1e9, "reserved": gib * GIB, **other}


def test_each_row_has_settings_that_its_training_takes():
    for known in ALL_ROWS:
        settings = dict(known.settings)
        if known.is_size:
            settings["samples"] = known.published
        inspect.signature(KINDS[known.kind]).bind(**settings)


def test_names_of_rows_differ_and_each_experiment_has_a_row():
    rows = [known.name for known in ALL_ROWS if not known.experiment]
    assert len(set(rows)) == len(rows) >= 10
    assert {known.name for known in ALL_ROWS if known.experiment} <= set(rows)


def test_every_row_says_what_it_assumes():
    assert all(known.assumes for known in ALL_ROWS if not known.experiment)


def test_a_peak_is_compared_with_the_goal_of_its_row():
    close = compared(row(10.0), found(9.6))
    assert close.error == pytest.approx(-0.04)
    assert close.is_reached
    assert not compared(row(10.0, goal_percent=3), found(9.6)).is_reached
    assert compared(row(0.8, "GB allocated"), found()).error == pytest.approx(0.25)


def test_words_and_sizes_have_to_be_the_same():
    failed = {"error": OUT_OF_MEMORY}
    assert compared(row(None), failed).is_reached
    assert not compared(row(None), found(9)).is_reached
    assert compared(row("trains"), found(9)).is_reached
    assert not compared(row("trains"), failed).is_reached
    assert not compared(row(10.0), failed).is_reached
    size = row(7, "samples largest")
    assert compared(size, found(largest=7)).is_reached
    assert compared(size, found(largest=8)).error is None
    assert not compared(size, found(largest=8)).is_reached


def test_the_summary_counts_peaks_words_and_sizes_by_themselves():
    known = [
        compared(row(10.0, name="first"), found(9)),
        compared(row(10.0, name="second"), found(10.1)),
        compared(row("trains"), found(9)),
        compared(row(7, "samples largest"), found(largest=8)),
    ]
    assert summary("all", known) == (
        "all: 1 of 2 peaks within the goal, largest error -10.0% (first);"
        " 1 of 1 verdicts the same; 0 of 1 largest sizes the same"
    )


def test_an_experiment_stands_beside_its_row_and_counts_by_itself():
    known = [compared(row(10.0), found(8))]
    tried = {"a row": compared(row(10.0, experiment="the optimizer of 2023"), found(10))}
    first, as_it_was, _ = notes_of(known, tried)
    assert "0 of 1 peaks" in first
    assert "1 of 1 peaks" in as_it_was
    assert explanations(known, tried) == ["a row, -20.0 %: the optimizer of 2023: +0.0 %"]


def test_a_row_without_an_explanation_says_so():
    assert explanations([compared(row(None), found(9))], {}) == [
        "a row, not the same: not explained"
    ]


def test_the_stub_has_the_devices_of_a_node_and_what_nccl_takes(monkeypatch):
    monkeypatch.setattr("benchmarks.published_memory.kernels_of", lambda gpu: (None, 90))
    pair = stub_variables(row(1.0, kind="guide"))
    assert (pair["CUDA_STUB_DEVICES"], float(pair["CUDA_STUB_NCCL_MIB"])) == ("2", 544)
    many = stub_variables(row(1.0, kind="titan", gpu="H100", ranks=128))
    assert many["CUDA_STUB_DEVICES"] == "8"
    assert float(many["CUDA_STUB_NCCL_FIRST_MIB"]) > 2000
    slow = stub_variables(row(1.0, kind="guide", device={"CUDA_STUB_TFLOPS": "400"}))
    assert slow["CUDA_STUB_TFLOPS"] == "400"


def test_rows_are_chosen_by_words_of_their_names():
    rows = [row(1.0, name="Llama, FSDP2"), row(1.0, name="Llama, DDP")]
    assert chosen_rows(rows, ["DDP"]) == rows[1:]
    assert chosen_rows(rows, []) == rows
