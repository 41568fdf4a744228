"""Sizes of searches beside the largest that train, for networks that fragment memory."""

from tests.helpers.cuda_stub import needs_stub, on_stub

pytestmark = needs_stub


def test_an_mlp_on_a_small_device():
    # With this variable torch looks for devices without starting CUDA, so that copies of the
    # process can start it.
    found = on_stub("cuda_sizes", "mlp", PYTORCH_NVML_BASED_CUDA_CHECK="1")
    assert found["size"] >= 0.93 * found["quiet"], found
