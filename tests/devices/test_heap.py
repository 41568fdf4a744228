from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_batchmem.devices.heap import c_library
from lightning_batchmem.devices.host import HostMemory

MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    not hasattr(c_library(), "mallinfo2"), reason="needs mallinfo2 of glibc 2.33"
)


def holes_bytes():
    use = c_library().mallinfo2()
    return use.fordblks - use.keepcost


def set_aside_made_holes():
    """Make holes and set them aside; returns the bytes made, left, and held more than before."""
    device_memory = HostMemory()
    device_memory.release_cached()
    # Earlier tests leave small holes.
    before_bytes = holes_bytes()
    # Blocks below glibc's mmap threshold lie in the heap.
    blocks = [torch.empty(100 * 1024, dtype=torch.uint8) for _ in range(512)]
    del blocks[::2]
    held_bytes = device_memory.current().allocated_bytes
    made_bytes = holes_bytes() - before_bytes
    device_memory.release_cached()
    more_bytes = device_memory.current().allocated_bytes - held_bytes
    return made_bytes, holes_bytes() - before_bytes, more_bytes


@pytest.mark.parametrize("is_main_thread", [True, False])
def test_holes_in_the_heap_are_set_aside_and_take_no_memory(is_main_thread):
    if is_main_thread:
        made_bytes, left_bytes, more_bytes = set_aside_made_holes()
    else:
        # A thread has a heap of its own.
        with ThreadPoolExecutor(1) as pool:
            made_bytes, left_bytes, more_bytes = pool.submit(set_aside_made_holes).result()
    assert made_bytes > 20 * MIB
    assert left_bytes < 0.4 * made_bytes
    assert more_bytes <= 2 * MIB
