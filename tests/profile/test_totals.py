import json

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_batchmem.devices.peaks import StepPeaks
from lightning_batchmem.profile.step_record import StepRecord
from lightning_batchmem.profile.totals import StageTotals, StepTotals, gather_ranks, rank_metrics
from tests.helpers.profiled import rows
from tests.helpers.profiled_ranks import profile, profile_after_bar
from tests.helpers.rank_processes import run_ranks

MIB = 2**20


def step(number, peak, *, size=4, seconds=2.0, wait=0.5, reserved=None, items=None):
    peaks = StepPeaks({"forward": peak * MIB, "backward": MIB}, reserved)
    return StepRecord(number, size, peaks, seconds, wait, items=items)


def total_of(*steps):
    total = StepTotals()
    for record in steps:
        total.add(record)
    return total


def test_metrics_are_maxima_of_bytes_and_means_of_times():
    first = step(0, 5, reserved=8 * MIB)
    second = step(1, 9, seconds=4.0, reserved=7 * MIB, items=100)
    total = total_of(first, second, step(2, 3, size=1, reserved=6 * MIB))
    assert total.metrics(limit_bytes=64 * MIB, total_bytes=80 * MIB, world_size=2) == {
        "memory/peak_allocated_mib": 9.0,
        "memory/peak_reserved_mib": 8.0,
        "memory/reserved_pct": 10.0,
        "memory/limit_mib": 64.0,
        "throughput/samples_per_s": 2 * 9 / 8.0,
        "throughput/items_per_s": 2 * 100 / 4.0,
        "throughput/step_ms": pytest.approx(8000 / 3),
        "throughput/data_wait_pct": pytest.approx(100 * 1.5 / 8),
        "batch/size": 4.0,
    }
    assert (total.peak_bytes, total.peak_step, total.peak_batch_size) == (9 * MIB, 1, 4)


def test_a_step_that_a_measurement_slowed_down_has_no_throughput():
    slowed = step(1, 3, seconds=20.0, items=50)
    slowed.is_slowed = True
    total = total_of(step(0, 5, items=100), slowed)
    metrics = total.metrics(limit_bytes=None, world_size=1)
    assert metrics["throughput/samples_per_s"] == 2.0
    assert metrics["throughput/items_per_s"] == 50.0
    assert metrics["throughput/step_ms"] == 11000.0
    assert total.steps == 2


def test_the_share_of_the_device_needs_both_numbers():
    reserved = total_of(step(0, 5, reserved=8 * MIB))
    assert "memory/reserved_pct" not in reserved.metrics(limit_bytes=None, world_size=1)
    unreserved = total_of(step(0, 5))
    metrics = unreserved.metrics(limit_bytes=None, total_bytes=80 * MIB, world_size=1)
    assert "memory/reserved_pct" not in metrics


def test_unknown_sizes_items_and_waits_are_left_out_of_the_means():
    total = total_of(step(0, 5, items=100), step(1, 3, size=None, seconds=6.0, wait=None))
    metrics = total.metrics(limit_bytes=None, world_size=1)
    names = ("samples_per_s", "items_per_s", "data_wait_pct", "step_ms")
    assert [metrics[f"throughput/{name}"] for name in names] == [2.0, 50.0, 25.0, 4000.0]
    assert metrics["batch/size"] == 4.0
    assert "batch/size" not in total_of(step(1, 3, size=None)).metrics(
        limit_bytes=None, world_size=1
    )


def test_an_interval_begins_after_the_previous_one():
    totals = StageTotals()
    steps = [step(0, 9), step(1, 5), step(2, 7)]
    totals.add(steps[0])
    assert totals.end_interval() == total_of(steps[0])
    for later in steps[1:]:
        totals.add(later)
    assert totals.end_interval().peak_step == 2
    assert (totals.run.peak_step, totals.run.steps, totals.run.step_seconds) == (0, 3, 2.0)
    assert totals.end_interval() == StepTotals()


def test_one_rank():
    total = total_of(step(0, 5, size=8, seconds=2.0))
    total.peak_bytes = 2**40 + 1
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    assert gather_ranks(total, strategy) == ([2**40 + 1], [4.0])
    assert rank_metrics(*gather_ranks(StepTotals(), strategy)) == {}


def test_two_processes_are_joined_at_the_end_of_each_epoch(tmp_path):
    codes, outputs = run_ranks(profile, tmp_path)
    assert codes == [0, 0], outputs
    ddp, fsdp2 = json.loads((tmp_path / "0.json").read_text())
    zero, one = ddp["peaks"]
    assert zero == ddp["own"]
    assert one - zero > 40 * MIB
    assert [output.count("Peaks of 2 ranks") for output in outputs] == [2, 0]
    (path,) = (tmp_path / "ddp").rglob("metrics.csv")
    joined = [row for row in rows(path) if row["ranks/highest_rank"]]
    assert [row["step"] for row in joined] == ["2", "5"]
    for row in joined:
        assert row["ranks/highest_rank"] == "1.0"
        lowest_mib = float(row["ranks/lowest_peak_allocated_mib"])
        assert float(row["ranks/highest_peak_allocated_mib"]) > lowest_mib + 40
        assert float(row["ranks/samples_per_s"]) > 0
    assert len(list((tmp_path / "ddp").rglob("memory_per_batch*.csv"))) == 1
    # Each rank has half of the model.
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):
        assert fsdp2["breakdown"][name] == (64 * 32 + 32 * 2) * 4 // 2, name


def test_ranks_exchange_after_lightning_has_reduced_the_metrics_of_an_epoch(tmp_path):
    codes, outputs = run_ranks(profile_after_bar, tmp_path)
    assert codes == [0, 0], outputs
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    # An epoch has three steps.
    steps = {
        "whole": [2, 5, 8],
        "max_steps": [2, 3],
        "should_stop": [0],
        "unlogged": [],
        "error": [2],
    }
    assert {name: found["steps"] for name, found in zero.items()} == steps
    for name in steps:
        # After an error, ranks exchange nothing.
        ranks = 0 if name == "error" else 2
        assert (zero[name]["ranks"], one[name]["ranks"]) == (ranks, ranks), name
