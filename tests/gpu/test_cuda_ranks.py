"""Two ranks with a device each, under DDP with gloo."""

import signal

import pytest

from tests.helpers.cuda_stub import needs_stub, on_stub

pytestmark = needs_stub

GIB = 2**30
MOST_SECONDS = 60


def run_on(folder, gibibytes, case, *arguments):
    """The exit codes, outputs and findings of both ranks, on devices of this size."""
    folder.mkdir()
    settings = {"CUDA_STUB_DEVICES": "2", "CUDA_STUB_GIB": gibibytes}
    return on_stub("cuda_ranks", str(folder), case, *arguments, **settings)


def found_on(folder, gibibytes, case, *arguments):
    """What each rank found."""
    result = run_on(folder, gibibytes, case, *arguments)
    assert result["codes"] == [0, 0], result["outputs"]
    return result["found"]


def test_unequal_devices_agree_on_a_size_that_both_train(tmp_path):
    first, second = found_on(tmp_path / "unequal", "0.75,0.6", "memory")
    assert first["total_bytes"] == 0.75 * GIB
    assert second["total_bytes"] == pytest.approx(0.6 * GIB, abs=2**20)
    assert first["batch_size"] == second["batch_size"] > 100
    assert (first["verified"], second["verified"]) == (True, True)
    assert (first["steps"], second["steps"]) == (5, 5)
    # A rank that ran out of memory tried a smaller size with the other.
    assert first["errors"] > 0
    # The smaller device decides.
    larger, _ = found_on(tmp_path / "equal", "0.75,0.75", "memory")
    assert larger["batch_size"] > first["batch_size"]


def test_other_ways_to_train(tmp_path):
    first, second = found_on(tmp_path / "ways", "1.5,1.25", "ways")
    assert len(first) == 5
    for way, found in first.items():
        assert found["verified"], way
        assert found["limited_by"] == "memory", way
        assert found["batch_size"] == second[way]["batch_size"] > 1, way
        assert found["steps"] in (5, 10), way


@pytest.mark.parametrize("network", ["mlp", "gpt"])
def test_training_stays_within_the_memory_limit(network, tmp_path):
    for found in found_on(tmp_path / "ranks", "4", "memory_limit", network, "1400"):
        assert found["steps"] == 60
        rehearsal_limit_mib = found["limit_mib"] - found["gradient_mib"]
        assert 0.9 * rehearsal_limit_mib < found["rehearsed_mib"] <= rehearsal_limit_mib
        assert found["trained_mib"] <= found["limit_mib"]
        assert found["fraction"] == pytest.approx(found["limit_mib"] / 4096, abs=1e-3)


def test_a_rank_without_memory_ends_the_other_that_waits_for_its_gradients(tmp_path):
    result = run_on(tmp_path / "ranks", "0.75", "out_of_memory")
    assert result["codes"] == [1, 1], result["outputs"]
    waited, failed = result["outputs"]
    assert "OutOfMemoryError" in failed
    sentence = (
        "BatchFinder: this error occurred in a step of 8 samples that all ranks take together."
    )
    assert sentence in failed
    assert sentence in waited
    assert seconds_until_the_other_ended(result) < MOST_SECONDS


def test_a_rank_that_is_killed_ends_the_other(tmp_path):
    result = run_on(tmp_path / "ranks", "0.75", "killed")
    assert result["codes"] == [1, -signal.SIGKILL], result["outputs"]
    sentence = "another rank ended without a message; rank 0 waited for it"
    assert sentence in result["outputs"][0]
    assert seconds_until_the_other_ended(result) < MOST_SECONDS


def seconds_until_the_other_ended(result):
    return result["moments"]["ended_at.0"] - result["moments"]["failed_at"]
