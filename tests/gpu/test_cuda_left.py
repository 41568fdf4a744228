"""What a search leaves on the device, and what an earlier error leaves to a search."""

import pytest

from tests.helpers.cuda_stub import needs_stub, on_stub, require

pytestmark = needs_stub


@pytest.mark.parametrize("case", ["workspaces_of_trainer", "workspaces_of_loop"])
def test_no_workspace_of_cublas_is_left(case):
    found = on_stub("cuda_left", case)
    assert found["left_mib"] < 1, found


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="issue 46")
def test_a_search_after_a_step_that_ended_before_the_update_of_the_scaler():
    found = on_stub("cuda_left", "scaler")
    require("the user's error" in found["first"], found)
    require(found["second"] == "" or "GradScaler" in found["second"], found)
    assert found["second"] == "", found
