"""The example for SLURM, on two processes of this machine."""

import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_batchmem import Plan
from tests.helpers import fake_srun

REPOSITORY = Path(__file__).parents[2]


def run(command, folder, **variables):
    """The output of a command that ends without an error."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def job(tmp_path):
    """Variables of a job with the numbers of the sbatch script."""
    shutil.copytree(
        REPOSITORY / "examples",
        tmp_path / "examples",
        ignore=shutil.ignore_patterns("logs", "__pycache__"),
    )
    script = (tmp_path / "examples" / "slurm" / "train.sbatch").read_text()
    wanted = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))
    assert (wanted["nodes"], wanted["ntasks-per-node"]) == ("1", "2")
    return {
        "SLURM_JOB_ID": free_job_id(),
        "SLURM_JOB_NAME": wanted["job-name"],
        "SLURM_NNODES": wanted["nodes"],
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": wanted["ntasks-per-node"],
        "SLURM_NODELIST": "127.0.0.1",
    }


def free_job_id():
    """A job whose port, 15000 and the last four digits, is free."""
    for last_digits in range(1000, 10_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", 15_000 + last_digits)):
            return f"7{last_digits}"
    raise RuntimeError("no port is free")


def test_the_tasks_of_a_job_train_with_one_size_and_the_next_job_uses_their_plan(tmp_path, job):
    tasks = [sys.executable, fake_srun.__file__, sys.executable, "examples/slurm/train.py"]
    output = run(tasks, tmp_path, **job)
    plan = Plan.from_json((tmp_path / "logs" / "slurm" / "batch_plan.json").read_text())
    assert (plan.batch_size, plan.verified, plan.effective_batch_size) == (64, True, 128)
    assert tasks_with(plan.reason, output) == ["0", "1"]
    assert "earlier plan" not in plan.reason

    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_srun.__file__} "$@"\n')
    srun.chmod(0o755)
    path = os.pathsep.join([str(srun.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    output = run(["bash", "examples/slurm/train.sbatch"], tmp_path, PATH=path, **job)
    reason = "64 samples: the size of an earlier plan, which passed a rehearsal on this device."
    assert tasks_with(reason, output) == ["0", "1"]


def tasks_with(reason, output):
    """The tasks that printed this reason of a plan; the output of two tasks may share a line."""
    return sorted(re.findall(rf"task (\d) of 2: {re.escape(reason)}", output))
