"""What a search and the training after it take of the device and of the host."""

import pytest

from tests.helpers.cuda_stub import needs_stub, on_stub, require

pytestmark = needs_stub


@pytest.mark.parametrize("expandable", ["True", "False"])
def test_training_stays_within_the_memory_limit(expandable):
    settings = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    found = on_stub("cuda_limits", "memory_limit", CUDA_STUB_GIB="4", **settings)
    require(found["rehearsed_mib"] <= found["limit_mib"], found)
    assert found["trained_mib"] <= found["limit_mib"], found


def test_a_data_set_on_the_device_is_not_copied_there():
    found = on_stub("cuda_limits", "data_on_device", CUDA_STUB_GIB="4")
    require(found["size"] == 128, found)
    assert found["largest_block_mib"] < found["data_mib"] / 2, found


def test_weights_of_the_device_are_not_copied_to_a_host_without_room():
    # From this size on, the C library returns a block to the kernel when it is freed.
    found = on_stub("cuda_limits", "weights_on_host", MALLOC_MMAP_THRESHOLD_=str(2**20))
    require(found["size"] == 16, found)
    assert found["grown_mib"] < found["weights_mib"] / 2, found
    assert found["training_starts_at_zero"], found
