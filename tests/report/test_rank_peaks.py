"""What ranks know together, with real processes (gloo)."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_batchmem.report.rank_peaks import RankPeaks, join_ranks

MIB = 2**20
ROOT = Path(__file__).parents[2]


def test_one_rank_by_itself():
    assert join_ranks(2**40 + 1, 12.5, torch.device("cpu")) == RankPeaks((2**40 + 1,), (12.5,))
    assert join_ranks(7, None, torch.device("cpu")) == RankPeaks((7,), (None,))


def test_the_highest_peak_its_rank_and_the_sum_of_the_speeds():
    joined = RankPeaks((5 * MIB, 9 * MIB, 7 * MIB), (1.0, 2.0, 4.0))
    assert joined.metrics() == {
        "ranks/highest_peak_allocated_mib": 9.0,
        "ranks/lowest_peak_allocated_mib": 5.0,
        "ranks/highest_rank": 1.0,
        "ranks/samples_per_s": 7.0,
    }


def test_a_speed_that_is_not_known_makes_no_sum_and_without_a_peak_counter_nothing_is_called_peak():
    assert set(RankPeaks((1, 2), (None, 4.0)).metrics(has_peak=False)) == {
        "ranks/highest_allocated_mib",
        "ranks/lowest_allocated_mib",
        "ranks/highest_rank",
    }


def trained(tmp_path, strategy):
    """What rank zero of two processes printed, and the last line of that as data."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "profiled_ranks.py"), str(tmp_path), strategy]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_two_processes_are_joined_at_the_end_of_each_epoch(tmp_path):
    printed, found = trained(tmp_path, "ddp")
    zero, one = found["peaks"]
    assert zero == found["own"]
    assert one - zero > 40 * MIB
    assert "Peaks of 2 ranks" in printed
    assert printed.count("Memory of a training step") == 1  # rank zero only
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open() as file:
        joined = [row for row in csv.DictReader(file) if row["ranks/highest_rank"]]
    assert [row["step"] for row in joined] == ["2", "5"]
    assert {row["ranks/highest_rank"] for row in joined} == {"1.0"}
    for row in joined:
        assert float(row["ranks/highest_peak_allocated_mib"]) > float(row["ranks/lowest_peak_allocated_mib"]) + 40
        assert float(row["ranks/samples_per_s"]) > 0
    assert len(list(tmp_path.rglob("memory_per_batch*.csv"))) == 1


@pytest.mark.slow
def test_fsdp2_holds_half_of_the_model_on_each_of_two_ranks(tmp_path):
    _, found = trained(tmp_path, "fsdp2")
    weights = (64 * 32 + 32 * 2) * 4
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):
        assert found["breakdown"][name] == found["estimate"][name] == weights // 2, name
