"""The arithmetic and the rows of benchmarks.published_memory; the steps themselves need a stub."""

import inspect
import json

import pytest

from benchmarks.published_law import MILABENCH
from benchmarks.published_memory import (
    OUT_OF_MEMORY,
    ROWS,
    Row,
    compared,
    explanations,
    milabench_sizes,
    rows_of,
    sizes_of,
    summary,
    trainings_of,
    variables_of,
)
from benchmarks.published_steps import KINDS

GIB = 2**30
ALL_ROWS = rows_of(ROWS.read_text())


def row(published, unit="GiB reserved", **other):
    defaults = {"name": "a row", "source": "a table", "gpu": "16GiB", "kind": "gpt", "settings": {}}
    return Row(published=published, unit=unit, **{**defaults, **other})


def peaks(*gibs):
    return [{"allocated": 1e9, "reserved": gib * GIB} for gib in gibs]


def test_each_row_has_a_source_and_settings_that_its_training_takes():
    sources = json.loads(ROWS.read_text())["sources"]
    for known in ALL_ROWS:
        assert known.source in sources
        for settings in trainings_of(known):
            inspect.signature(KINDS[known.kind]).bind(**settings)


def test_names_of_rows_differ_and_each_experiment_has_a_row():
    rows = [known.name for known in ALL_ROWS if not known.experiment]
    assert len(set(rows)) == len(rows) >= 30
    assert {known.name for known in ALL_ROWS if known.experiment} <= set(rows)


def test_a_reading_is_compared_in_the_unit_of_the_row():
    assert compared(row(10.0), peaks(9)).error == pytest.approx(-0.1)
    assert compared(row(0.8, "GB allocated"), peaks(9)).error == pytest.approx(0.25)
    with_context = compared(row(2048, "MiB reserved + 1024"), peaks(1))
    assert with_context.error == pytest.approx(0)


def test_running_out_of_memory_is_right_where_it_is_published():
    failed = [{"error": OUT_OF_MEMORY}]
    assert compared(row(None), failed).is_right
    assert not compared(row(None), peaks(9)).is_right
    assert not compared(row("trains"), failed).is_right
    assert compared(row("trains"), peaks(9)).is_right
    assert not compared(row(10.0), failed).is_right


def test_the_difference_of_two_sizes_leaves_room_on_the_card():
    assert sizes_of({1: 10, 8: 20, 16: 40, 32: 91, 64: 100}, card_mib=100) == (8, 16)


def test_a_row_of_milabench_is_a_difference_of_its_measurements():
    known = row(
        "difference", "MiB reserved", gpu="H100", settings={"bench": "bert-fp32", "network": "Bert"}
    )
    smaller, larger = milabench_sizes(known)
    measured = json.loads(MILABENCH.read_text())["cards"]["H100"]["bert-fp32"]
    memory_mib = {size: memory for size, memory, _ in measured}
    assert (smaller, larger) == (16, 96)
    difference = memory_mib[larger] - memory_mib[smaller]
    found = compared(known, peaks(1, 1 + difference / 1024))
    assert found.published == difference
    assert found.error == pytest.approx(0)
    assert [settings["samples"] for settings in trainings_of(known)] == [16, 96]


def test_a_large_error_is_explained_by_a_remark_or_an_experiment():
    far_off = compared(row(10.0), peaks(8))
    (note,) = explanations([far_off, compared(row(10.0), peaks(10))], [])
    assert note == "a row, -20.0 %: not explained"
    experiment = compared(row(10.0, experiment="an older softmax"), peaks(10))
    (note,) = explanations([far_off], [experiment])
    assert note == "a row, -20.0 %: an older softmax: +0.0 %"
    (note,) = explanations([compared(row(10.0, remark="another training"), peaks(8))], [])
    assert note == "a row, -20.0 %: another training"


def test_a_summary_counts_numbers_and_verdicts():
    known = [compared(row(10.0, name=str(gib)), peaks(gib)) for gib in (9, 10, 10.2)]
    known.append(compared(row(None), peaks(9)))
    assert summary("all", known) == (
        "all: 3 numbers, absolute error median 2.0%, 90th percentile 8.4%, largest -10.0% (9);"
        " 1 too low, above 5%: 1; 0 of 1 verdicts (trains, or memory runs out) are the same"
    )


@pytest.mark.parametrize(("cudnn", "expected"), [(True, "1"), (False, "0")])
def test_the_switch_of_cudnn_goes_to_the_stub(cudnn, expected, monkeypatch):
    monkeypatch.setattr("benchmarks.published_memory.kernels_of", lambda gpu: (None, 86))
    variables = variables_of("L40S", "shard", cudnn=cudnn)
    assert variables["CUDA_STUB_CUDNN"] == expected
    assert variables["CUDA_STUB_CAPABILITY"] == "8.9"
    assert variables["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in variables_of("L40S", "gpt", cudnn=cudnn)
