import pytest
import torch

from lightning_batchmem.devices.accelerator import AcceleratorMemory
from tests.helpers.cuda_stub import is_cuda_stub


def pytest_collection_modifyitems(config, items):
    if not is_cuda_stub():
        return
    # Lightning compares lengths on the device, where a comparison has no result on the stub.
    zero_length = "ignore:Total length of `.*` across ranks is zero"
    for item in items:
        item.add_marker(pytest.mark.filterwarnings(zero_length))


@pytest.fixture(autouse=True)
def _cuda(request):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if is_cuda_stub() and request.node.get_closest_marker("real_device"):
        pytest.skip("needs cuDNN or the results of kernels, which the CUDA stub does not have")


@pytest.fixture
def device():
    return torch.device("cuda", 0)


@pytest.fixture
def native(device):
    """Skip a test of features that only torch's own allocator has."""
    if torch.cuda.get_allocator_backend() != "native":
        pytest.skip("needs torch's own allocator")


@pytest.fixture
def limit_to(device):
    """Limit the memory of this process for one test, in bytes."""

    def limit(limit_bytes):
        fraction = limit_bytes / torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(fraction, device)

    AcceleratorMemory(device).release_cached()
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    AcceleratorMemory(device).release_cached()
