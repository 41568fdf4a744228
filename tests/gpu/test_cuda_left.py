"""What a search leaves on the device, and what an earlier error leaves to a search."""

import pytest

from tests.helpers.cuda_stub import needs_stub, on_stub, require

pytestmark = needs_stub


@pytest.mark.parametrize("case", ["workspaces_of_trainer", "workspaces_of_loop"])
def test_no_workspace_of_cublas_is_left(case):
    found = on_stub("cuda_left", case)
    assert found["left_mib"] < 1, found


@pytest.mark.parametrize("strategy", ["one device", "fsdp"])
def test_a_search_without_a_training_leaves_an_empty_device(strategy):
    found = on_stub("cuda_left", "search_alone", strategy)
    expected = {"size": 16, "allocated_mib": 0, "reserved_mib": 0, "is_on_host": True}
    assert found == expected


def test_a_search_after_a_step_that_ended_before_the_update_of_the_scaler():
    found = on_stub("cuda_left", "scaler")
    require("the user's error" in found["first"], found)
    require(found["second"] == "" or "GradScaler" in found["second"], found)
    assert found["second"] == "", found


@pytest.mark.parametrize(
    ("network", "precision"),
    [("mlp", "32-true"), ("checkpointed gpt", "16-mixed"), ("gan", "32-true")],
)
def test_a_training_after_a_search_takes_what_one_with_the_size_hard_coded_takes(
    network, precision
):
    # With this variable torch looks for devices without starting CUDA, so that copies of the
    # process can start it.
    settings = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    found = on_stub("cuda_left", "beside_hard_coded", network, precision, **settings)
    searched, hard_coded = found["searched"], found["hard_coded"]
    require(searched["size"] > 2, found)
    assert searched == hard_coded, found
