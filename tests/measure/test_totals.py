from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_batchmem.measure.peaks import StepPeaks
from lightning_batchmem.measure.step_record import RankTotals, StepRecord, StepTotals

MIB = 2**20
ROOT = Path(__file__).parents[2]


def step(number, peak, *, size=4, seconds=2.0, wait=0.5, reserved=None, items=None):
    peaks = StepPeaks({"forward": peak * MIB, "backward": MIB}, reserved)
    return StepRecord(number, size, peaks, seconds, wait, items=items)


def total_of(*steps):
    total = StepTotals()
    for one in steps:
        total.add(one)
    return total


def test_metrics_are_maxima_of_bytes_and_means_of_times():
    first, second = step(0, 5, reserved=8 * MIB), step(1, 9, seconds=4.0, reserved=7 * MIB, items=100)
    total = total_of(first, second, step(2, 3, size=1, reserved=6 * MIB))
    assert total.metrics(limit_bytes=64 * MIB, world_size=2) == {
        "memory/peak_allocated_mib": 9.0,
        "memory/peak_reserved_mib": 8.0,
        "memory/limit_mib": 64.0,
        "throughput/samples_per_s": 2 * 9 / 8.0,
        "throughput/items_per_s": 2 * 100 / 4.0,
        "throughput/step_ms": pytest.approx(8000 / 3),
        "throughput/data_wait_pct": pytest.approx(100 * 1.5 / 8),
        "batch/size": 1.0,
    }
    assert (total.peak_bytes, total.peak_step, total.peak_batch_size) == (9 * MIB, 1, 4)


def test_unknown_values_are_left_out():
    without_memory = StepRecord(0, None, StepPeaks({}), 2.0, None)
    assert set(total_of(without_memory).metrics(limit_bytes=None, world_size=1)) == {"throughput/step_ms"}
    names = set(total_of(step(0, 5, size=None, wait=None)).metrics(limit_bytes=MIB, world_size=1))
    assert names == {"memory/peak_allocated_mib", "memory/limit_mib", "throughput/step_ms"}


def test_steps_of_unknown_size_do_not_lower_the_throughput():
    total = total_of(step(0, 5, size=8, seconds=2.0), step(1, 5, size=None, seconds=100.0))
    assert total.samples_per_second(1) == 4.0


def test_merged_totals_are_those_of_all_steps():
    steps = [
        step(0, 5),
        step(1, 9, size=7, reserved=5, items=100),
        step(2, 3, wait=None),
        step(3, 8, size=None, reserved=3),
    ]
    for cut in range(5):
        total = total_of(*steps[:cut])
        total.merge(total_of(*steps[cut:]))
        assert total == total_of(*steps)


def test_the_time_of_the_device_replaces_wall_time_of_the_step_only():
    total = total_of(step(0, 5, size=8, seconds=1.0))
    assert total.step_seconds == 1.0
    total.device_seconds, total.device_steps = 4.0, 1
    total.merge(total_of(step(1, 5, size=8, seconds=3.0)))
    assert (total.step_seconds, total.samples_per_second(1)) == (4.0, 4.0)


def test_one_rank():
    total = total_of(step(0, 5, size=8, seconds=2.0))
    total.peak_bytes = 2**40 + 1
    assert RankTotals.gather(total, torch.device("cpu")) == RankTotals((2**40 + 1,), (4.0,))
    assert RankTotals.gather(StepTotals(), torch.device("cpu")) == RankTotals((None,), (None,))


def test_metrics_of_ranks():
    assert RankTotals((5 * MIB, 9 * MIB, 7 * MIB), (1.0, 2.0, 4.0)).metrics() == {
        "ranks/highest_peak_allocated_mib": 9.0,
        "ranks/lowest_peak_allocated_mib": 5.0,
        "ranks/highest_rank": 1.0,
        "ranks/samples_per_s": 7.0,
    }
    assert RankTotals((1, None), (None, 4.0)).metrics() == {}


@pytest.mark.slow
def test_two_processes_are_joined_at_the_end_of_each_epoch(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "profiled_ranks.py"), str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ddp, fsdp2 = json.loads(done.stdout.splitlines()[-1])
    zero, one = ddp["peaks"]
    assert zero == ddp["own"]
    assert one - zero > 40 * MIB
    assert done.stdout.count("Peaks of 2 ranks") == 2  # rank zero only
    (path,) = (tmp_path / "ddp").rglob("metrics.csv")
    with path.open() as file:
        joined = [row for row in csv.DictReader(file) if row["ranks/highest_rank"]]
    assert [row["step"] for row in joined] == ["2", "5"]
    for row in joined:
        assert row["ranks/highest_rank"] == "1.0"
        assert float(row["ranks/highest_peak_allocated_mib"]) > float(row["ranks/lowest_peak_allocated_mib"]) + 40
        assert float(row["ranks/samples_per_s"]) > 0
    assert len(list((tmp_path / "ddp").rglob("memory_per_batch*.csv"))) == 1
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):  # half of the model on each rank
        assert fsdp2["breakdown"][name] == (64 * 32 + 32 * 2) * 4 // 2, name
