"""The examples on two processes, started as their users start them."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp

REPOSITORY = Path(__file__).parents[2]
PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SHARDS_HERE = hasattr(torch.distributed.fsdp, "fully_shard") or torch.cuda.device_count() >= 2


def run(starter: tuple[str, ...], name: str, directory: Path) -> str:
    """Output of an example; `timeout` ends its processes too."""
    command = ["timeout", "--kill-after=10", "240", *starter, str(REPOSITORY / "examples" / f"{name}.py")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "starter"), [pytest.param("ddp", TORCHRUN, id="ddp, torchrun"), pytest.param("fsdp2", PYTHON, id="fsdp2")]
)
def test_both_ranks_train_with_one_size(name: str, starter: tuple[str, ...], tmp_path: Path) -> None:
    if name == "fsdp2" and not SHARDS_HERE:
        pytest.skip("FSDP2 of torch 2.5 needs two GPUs")
    output = run(starter, name, tmp_path)

    sizes = dict(re.findall(r"^rank (\d) trained with the batch size (\d+)", output, re.MULTILINE))
    assert set(sizes) == {"0", "1"}
    assert sizes["0"] == sizes["1"]
    (samples,) = re.findall(r"^samples per optimizer step over 2 ranks: (\d+)$", output, re.MULTILINE)
    assert int(samples) == 2 * int(sizes["0"])
    with (tmp_path / "logs" / name / "version_0" / "memory_per_batch.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["stage"] == "train"]
    assert rows[0]["batch_size"] == sizes["0"]
    assert output.count("BatchFinder: batch size") == 1  # rank zero speaks for all
    if name == "fsdp2":
        shares = re.findall(r"holding ([\d,]+) of ([\d,]+) parameters", output)
        own, whole = ([int(text.replace(",", "")) for text in texts] for texts in zip(*shares, strict=True))
        assert sum(own) == whole[0] == whole[1]


@pytest.mark.slow
@pytest.mark.skipif(SHARDS_HERE, reason="FSDP2 works here")
def test_an_unsupported_fsdp2_is_reported(tmp_path: Path) -> None:
    assert run(PYTHON, "fsdp2", tmp_path).endswith("on a CPU too\n")
