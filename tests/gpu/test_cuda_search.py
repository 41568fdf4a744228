"""Searches and trainings of four networks on the stub, as in benchmarks.cuda_search."""

import re

from tests.helpers.cuda_stub import needs_stub, output_on_stub

NETWORKS = ["mlp", "checkpointed gpt", "unet", "gan"]


@needs_stub
def test_no_training_dies_at_a_size_found():
    options = ["--gibibytes", "1.5", "--ways", "BatchFinder", "--only", *NETWORKS]
    printed = output_on_stub("benchmarks.cuda_search", *options)
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    found = [re.search(r"\| (\d+) \((\d+\.\d+)\), ok \|", row) for row in rows[2:]]
    assert len(found) == len(NETWORKS), printed
    assert all(found), printed
    assert min(float(one[2]) for one in found) >= 0.75, printed
