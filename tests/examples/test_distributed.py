"""The examples on two processes, which torchrun starts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp

from tests.helpers.profiled import rows

REPOSITORY = Path(__file__).parents[2]
SHARDS_HERE = hasattr(torch.distributed.fsdp, "fully_shard") or torch.cuda.device_count() >= 2
NAMES = ("ddp", "fsdp2", "fabric_loop")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def outputs(directory):
    """The output of both ranks for each example."""
    # The output of each rank becomes a file.
    redirected = ["--redirects=3", f"--log-dir={directory / 'ranks'}"]
    done = subprocess.run(
        [*TORCHRUN, *redirected, "-m", "tests.helpers.short_example", *NAMES],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    texts = [path.read_text() for path in sorted(directory.glob("ranks/*/attempt_0/*/stdout.log"))]
    assert done.returncode == 0, (done.stderr, texts)
    pieces = [
        re.split(rf"^example (?:{'|'.join(NAMES)})\n", text, flags=re.MULTILINE) for text in texts
    ]
    return dict(zip(("before", *NAMES), zip(*pieces, strict=True), strict=True))


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_both_ranks_train_with_one_size(name, outputs, directory):
    if name == "fsdp2" and not SHARDS_HERE:
        assert outputs[name][0].endswith("on a CPU too\n")
        return
    output = "\n".join(outputs[name])
    sizes = dict(re.findall(r"^rank (\d) trained with the batch size (\d+)", output, re.MULTILINE))
    assert set(sizes) == {"0", "1"}
    assert sizes["0"] == sizes["1"]
    (samples,) = re.findall(
        r"^samples per optimizer step over 2 ranks: (\d+)$", output, re.MULTILINE
    )
    assert int(samples) == 2 * int(sizes["0"])
    (first, *_) = rows(directory / "logs" / name / "version_0" / "memory_per_batch.csv")
    assert (first["stage"], first["batch_size"]) == ("train", sizes["0"])
    # Only rank zero prints the plan.
    assert output.count("BatchFinder: batch size") == 1
    if name == "fsdp2":
        shares = re.findall(r"holding ([\d,]+) of ([\d,]+) parameters", output)
        own = [int(own_count.replace(",", "")) for own_count, _ in shares]
        whole = [int(whole_count.replace(",", "")) for _, whole_count in shares]
        assert sum(own) == whole[0] == whole[1]


def test_a_loop_with_fabric_trains_with_one_size(outputs):
    output = "\n".join(outputs["fabric_loop"])
    pattern = r"^rank (\d) trained with the batch size (\d+), .* was (0\.\d\d)$"
    found = re.findall(pattern, output, re.MULTILINE)
    assert sorted(rank for rank, _, _ in found) == ["0", "1"]
    assert len({size for _, size, _ in found}) == 1
    # A network that guesses has a loss of 2.3.
    assert all(float(loss) < 0.6 for _, _, loss in found)
    assert output.count("BatchFinder: batch size") == 1
