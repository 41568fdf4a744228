"""Two ranks with a device each, under DDP with gloo."""

import json

import pytest

from tests.helpers.cuda_stub import needs_stub, output_on_stub

GIB = 2**30


def search_on(folder, gibibytes):
    """What each rank found, on devices of this size."""
    output_on_stub(
        "tests.helpers.cuda_ranks",
        str(folder),
        CUDA_STUB_DEVICES="2",
        CUDA_STUB_GIB=gibibytes,
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@needs_stub
def test_unequal_devices_agree_on_a_size_that_both_train(tmp_path):
    first, second = search_on(tmp_path, "0.75,0.6")
    assert first["total_bytes"] == 0.75 * GIB
    assert second["total_bytes"] == pytest.approx(0.6 * GIB, abs=2**20)
    assert first["batch_size"] == second["batch_size"] > 100
    assert (first["verified"], second["verified"]) == (True, True)
    assert (first["steps"], second["steps"]) == (5, 5)
    # The smaller device decides.
    (tmp_path / "equal").mkdir()
    larger, _ = search_on(tmp_path / "equal", "0.75,0.75")
    assert larger["batch_size"] > first["batch_size"]
