from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_batchmem.devices.cuda import CudaMemory


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture
def native(device: torch.device) -> None:
    """Skip a test of what only torch's own allocator has."""
    if torch.cuda.get_allocator_backend() != "native":
        pytest.skip("needs torch's own allocator")


@pytest.fixture
def limit_to(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Limit the memory of this process for one test, in bytes."""

    def limit(limit_bytes: int) -> None:
        torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.mem_get_info(device)[1], device)

    CudaMemory(device).release_cached()
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    CudaMemory(device).release_cached()
