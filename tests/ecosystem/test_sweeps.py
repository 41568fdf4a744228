"""Sweeps that search once: the examples, in processes of their own, with trials that fail."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ecosystem.twice import MARKS, MISSING

REPOSITORY = Path(__file__).parents[2]
REUSED = "64, 64, 64 samples: the size of an earlier plan, which passed a rehearsal again."
pytestmark = MARKS


def test_optuna_prunes_a_trial_out_of_memory_and_frees_its_tensors(tmp_path):
    pytest.importorskip("optuna", reason=MISSING)
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.failing_sweep", "optuna_sweep"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # A trial that ends in its search has no training.
    assert re.findall(r"^training: (.*)$", done.stdout, re.MULTILINE) == [REUSED] * 3
    tensors = re.findall(r"^run (\d): (\d+) of (\d+) tensors alive$", done.stdout, re.MULTILINE)
    assert [run for run, _, _ in tensors] == ["0", "1", "2", "3", "4"]
    # Those of the search before the sweep are parts of a Trainer that waits for its collection.
    assert [alive for _, alive, _ in tensors[2:]] == ["0"] * 3
    assert all(int(count) > 0 for _, _, count in tensors[1:])
    ends = re.findall(r"Trial (\d) (finished|pruned\. [A-Z]\w+ \w+)", done.stderr)
    assert ends == [
        ("0", "finished"),
        ("1", "pruned. CUDA out"),
        ("2", "pruned. Nothing fits"),
        ("3", "finished"),
    ]
    assert re.search(r"^accuracy 0\.\d+ with \{'learning_rate': ", done.stdout, re.MULTILINE)
