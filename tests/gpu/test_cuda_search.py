"""Searches and trainings of four networks on the stub, as in benchmarks.cuda_search."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.cuda_stub import needs_stub

ROOT = Path(__file__).parents[2]
NETWORKS = ["mlp", "checkpointed gpt", "unet", "gan"]


@needs_stub
def test_no_training_dies_at_a_size_found():
    options = ["--gibibytes", "1.5", "--ways", "BatchFinder", "--only", *NETWORKS]
    # Kernels take no time here, and the settings of this process may say otherwise.
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("CUDA_STUB_")
    }
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.cuda_search", *options],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    rows = [line for line in run.stdout.splitlines() if line.startswith("| ")]
    found = [re.search(r"\| (\d+) \((\d+\.\d+)\), ok \|", row) for row in rows[2:]]
    assert len(found) == len(NETWORKS), run.stdout
    assert all(found), run.stdout
    # In the stored results of version 0.3.0, no share of the largest quiet size is lower.
    assert min(float(one[2]) for one in found) >= 0.5, run.stdout
