from contextlib import nullcontext

import pytest
import torch

from lightning_batchmem.devices.accelerator import AcceleratorMemory
from lightning_batchmem.devices.out_of_memory import is_out_of_memory

MIB = 1 << 20

needs_fraction = pytest.mark.skipif(
    not hasattr(torch.cuda, "get_per_process_memory_fraction"),
    reason="this torch cannot report the memory fraction",
)


@pytest.fixture
def device_memory(device):
    torch.empty(1, device=device)
    device_memory = AcceleratorMemory(device)
    device_memory.release_cached()
    device_memory.reset_peak()
    yield device_memory
    device_memory.release_cached()


def block(size_mib, device):
    return torch.empty(size_mib * MIB, dtype=torch.uint8, device=device)


def multiply(matrix):
    for _ in range(200):
        matrix @ matrix


def test_peak_is_exact_and_restarts_after_a_reset(device_memory, device):
    before = device_memory.current()
    tensor = block(256, device)
    assert device_memory.current().allocated_bytes - before.allocated_bytes == 256 * MIB
    del tensor
    assert device_memory.peak().allocated_bytes - before.allocated_bytes == 256 * MIB
    device_memory.reset_peak()
    assert device_memory.peak().allocated_bytes == before.allocated_bytes
    # The freed block is still cached.
    assert (device_memory.peak().reserved_bytes or 0) >= 256 * MIB
    device_memory.release_cached()
    device_memory.reset_peak()
    assert (device_memory.peak().reserved_bytes or 0) < 256 * MIB


@needs_fraction
def test_the_budget_is_true_and_the_error_above_it_is_recognized(
    device_memory, device, limit_to, native
):
    limit_to(1024 * MIB)
    available_bytes = device_memory.available_bytes()
    assert available_bytes == pytest.approx(1024 * MIB, abs=MIB)
    ooms = device_memory.counters()["num_ooms"]
    room_mib = (available_bytes - (device_memory.current().reserved_bytes or 0)) // MIB
    tensor = block(room_mib - 32, device)
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        block(64, device)
    assert is_out_of_memory(caught.value)
    assert device_memory.counters()["num_ooms"] == ooms + 1
    assert device_memory.peak().allocated_bytes <= available_bytes
    del tensor


@needs_fraction
@pytest.mark.parametrize("previous_mib", [None, 2048])
def test_an_enforced_limit_fails_above_it_and_is_lifted_afterwards(
    device_memory, device, limit_to, previous_mib
):
    if previous_mib is not None:
        limit_to(previous_mib * MIB)
    previous = torch.cuda.get_per_process_memory_fraction(device)
    held_bytes = device_memory.current().reserved_bytes or 0
    with device_memory.limit_enforced(held_bytes + 256 * MIB) as is_enforced:
        assert is_enforced == (torch.cuda.get_allocator_backend() == "native")
        block(128, device)
        with pytest.raises(torch.cuda.OutOfMemoryError) if is_enforced else nullcontext() as caught:
            block(512, device)
    assert caught is None or is_out_of_memory(caught.value)
    assert torch.cuda.get_per_process_memory_fraction(device) == pytest.approx(previous, abs=1e-6)
    block(512, device)


def test_no_reading_waits_for_the_device(device_memory, device):
    matrix = torch.ones(4096, 4096, device=device)
    matrix @ matrix
    device_memory.synchronize()
    multiply(matrix)
    last = torch.cuda.Event()
    last.record(torch.cuda.current_stream(device))
    device_memory.reset_peak()
    device_memory.peak()
    device_memory.current()
    device_memory.counters()
    device_memory.available_bytes()
    device_memory.non_torch_bytes()
    assert not last.query(), "a reading waited until the device was idle"
    device_memory.synchronize()
    assert last.query()
