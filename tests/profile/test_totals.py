import json

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_batchmem.devices.peaks import StepPeaks
from lightning_batchmem.profile.step_record import StepRecord
from lightning_batchmem.profile.totals import StepTotals, gather_ranks, rank_metrics
from tests.helpers.profiled import rows
from tests.helpers.profiled_ranks import profile
from tests.helpers.rank_processes import run_ranks

MIB = 2**20


def step(number, peak, *, size=4, seconds=2.0, wait=0.5, reserved=None, items=None):
    peaks = StepPeaks({"forward": peak * MIB, "backward": MIB}, reserved)
    return StepRecord(number, size, peaks, seconds, wait, items=items)


def total_of(*steps):
    total = StepTotals()
    for one in steps:
        total.add(one)
    return total


def test_metrics_are_maxima_of_bytes_and_means_of_times():
    first = step(0, 5, reserved=8 * MIB)
    second = step(1, 9, seconds=4.0, reserved=7 * MIB, items=100)
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


def test_one_rank():
    total = total_of(step(0, 5, size=8, seconds=2.0))
    total.peak_bytes = 2**40 + 1
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    assert gather_ranks(total, strategy) == ([2**40 + 1], [4.0])
    assert rank_metrics(*gather_ranks(StepTotals(), strategy)) == {}


@pytest.mark.slow
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
