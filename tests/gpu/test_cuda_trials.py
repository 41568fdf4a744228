"""Trials on the stub: what one of them measures does not depend on those before it."""

import pytest

from tests.helpers.cuda_stub import needs_stub, on_stub, require


@needs_stub
@pytest.mark.parametrize("network", ["mlp", "checkpointed gpt", "gan", "lstm"])
def test_two_trials_of_one_size_give_equal_records(network):
    """Live and held bytes, retries, frees and allocations of segments are equal."""
    settings = {"CUDA_STUB_GIB": "1.5", "CUDA_STUB_TFLOPS": "50"}
    found = on_stub("cuda_trials", "every_trial_twice", network, "1.5", **settings)
    require(found["num_trials"] > 4, found)
    assert found["differences"] == []
