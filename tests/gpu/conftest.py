import pytest
import torch

from lightning_batchmem.devices.accelerator import AcceleratorMemory


@pytest.fixture(autouse=True)
def _cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


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
