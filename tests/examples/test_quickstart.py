"""The quickstart, in a process of its own, because its limit includes the interpreter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_batchmem import Plan
from lightning_batchmem.profile.summary import Summary

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


def test_the_quickstart_ends_with_five_lines_that_hold(tmp_path):
    done = subprocess.run(
        [sys.executable, str(QUICKSTART)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    size, speed, memory, accuracy, files = done.stdout.splitlines()[-5:]
    folder = tmp_path / re.fullmatch(r"files     ([\w/]+): .*", files)[1]
    named = files.partition(": ")[2].split(", ")
    assert len(named) == 3
    assert all((folder / name).is_file() for name in named)
    plan = Plan.from_json((folder / "batch_plan.json").read_text())
    assert size.startswith(f"size      {plan.reason} Limited by ")
    assert size.endswith("; it was 4 before.")
    if not torch.cuda.is_available():
        assert plan.limited_by == "memory"
    summary = Summary.from_json((folder / "memory_summary.json").read_text())
    faster, after, before = re.fullmatch(
        r"speed     ([\d.]+) times as fast: ([\d,]+) samples/s in \d+ training steps,"
        r" instead of ([\d,]+) in 20",
        speed,
    ).groups()
    assert after == f"{summary.speed.samples_per_s:,.0f}"
    ratio = summary.speed.samples_per_s / float(before.replace(",", ""))
    assert float(faster) == pytest.approx(ratio, rel=0.05)
    # A build of torch for CUDA takes more, so that the limit has a thousands separator there.
    numbers = re.fullmatch(r"memory    peak ([\d,]+) MiB, limit ([\d,]+) MiB", memory).groups()
    peak, limit = (int(number.replace(",", "")) for number in numbers)
    assert peak <= limit
    assert limit >= 1100
    assert float(accuracy.split()[1]) >= 0.9
