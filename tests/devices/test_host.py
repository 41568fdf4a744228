import copy
import mmap
import pickle
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from lightning_batchmem.devices import host
from lightning_batchmem.devices.host import HostMemory, cpu_utilization, peak_can_be_reset

MIB = 1 << 20

needs_peak = pytest.mark.skipif(not peak_can_be_reset(), reason="no writable /proc/self/clear_refs on this host")


def touch(size_bytes):
    """Memory mapped directly from the kernel, and returned to it by ``close``."""
    block = mmap.mmap(-1, size_bytes)
    block.write(b"x" * size_bytes)
    return block


@needs_peak
def test_the_peak_includes_freed_memory_until_it_is_reset():
    device_memory = HostMemory()
    device_memory.release_cached()
    device_memory.reset_peak()
    before_bytes = device_memory.peak().allocated_bytes
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    held_bytes = device_memory.current().allocated_bytes
    del tensor
    device_memory.release_cached()
    assert device_memory.peak().allocated_bytes - before_bytes == pytest.approx(64 * MIB, rel=0.1)
    assert held_bytes - before_bytes == pytest.approx(64 * MIB, rel=0.1)
    device_memory.reset_peak()
    assert device_memory.peak().allocated_bytes - before_bytes < 8 * MIB


@needs_peak
def test_the_quick_reading_equals_the_exact_one():
    quick, exact = HostMemory(quick=True), HostMemory()
    if not quick._quick:
        pytest.skip("the program before exec was larger")
    for size in (0, 64, 8):
        quick.reset_peak()
        touch(size * MIB).close() if size else None
        assert abs(quick.peak().allocated_bytes - exact.peak().allocated_bytes) <= MIB


@needs_peak
def test_getrusage_is_not_read_if_it_includes_the_program_before_exec(monkeypatch):
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=1 << 30))
    assert HostMemory(quick=True).peak().allocated_bytes < 1 << 40


@needs_peak
def test_release_cached_returns_small_freed_blocks():
    device_memory = HostMemory()
    blocks = [torch.ones(16 * 1024, dtype=torch.uint8) for _ in range(4096)]  # below glibc's mmap threshold
    pin = torch.ones(16 * 1024, dtype=torch.uint8)  # prevents trimming by free itself
    blocks.clear()
    held_bytes = device_memory.current().allocated_bytes
    device_memory.release_cached()
    assert held_bytes - device_memory.current().allocated_bytes > 32 * MIB
    assert pin.sum() == 16 * 1024


@needs_peak
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda device_memory: pickle.loads(pickle.dumps(device_memory))])
def test_a_copy_opens_its_own_files_and_every_file_is_closed(duplicate):
    before = psutil.Process().num_fds()
    device_memory = HostMemory(quick=True)
    twin = duplicate(device_memory)
    assert psutil.Process().num_fds() == before + 4  # two files each
    del device_memory
    twin.reset_peak()
    assert twin.peak().allocated_bytes > 0
    del twin
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("name", ["_CLEAR_REFS", "_STATUS"])
def test_without_the_files_of_the_kernel_the_peak_is_the_current_value(monkeypatch, tmp_path, name):
    monkeypatch.setattr(host, name, tmp_path / "missing")
    assert not peak_can_be_reset()
    device_memory = HostMemory(quick=True)
    touch(64 * MIB).close()
    device_memory.reset_peak()
    assert device_memory.peak().allocated_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)


@pytest.mark.parametrize(("group_gib", "room_gib"), [(None, 7), (3, 3), (0, 0), (9, 7)])
def test_the_budget_is_the_resident_set_and_the_least_room(monkeypatch, group_gib, room_gib):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7 << 30))
    monkeypatch.setattr(host, "memory_headroom_bytes", lambda: None if group_gib is None else group_gib << 30)
    device_memory = HostMemory()
    room_bytes = device_memory.budget_bytes() - device_memory.current().allocated_bytes
    assert room_bytes == pytest.approx(room_gib << 30, abs=4 * MIB)


@pytest.mark.skipif(sys.platform != "linux", reason="resource limits are read on Linux")
@pytest.mark.parametrize(("limit", "field"), [("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")])
def test_a_resource_limit_bounds_the_budget(monkeypatch, limit, field):
    device_memory = HostMemory()
    status = Path("/proc/self/status").read_text()
    used_bytes = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(field))
    limits = {getattr(resource, limit): (used_bytes + 300 * MIB, resource.RLIM_INFINITY)}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, unlimited))
    room_bytes = device_memory.budget_bytes() - device_memory.current().allocated_bytes
    assert room_bytes == pytest.approx(300 * MIB, abs=10 * MIB)


@pytest.mark.parametrize(
    ("quota", "seconds", "percents"),
    [
        (None, [(12, 14), (13, 15)], [50, 25]),  # 4 of 8 core seconds, then 1 of 4
        (0.5, [(12, 10.5), (12.5, 11.5)], [50, 100]),  # the second is a burst above the quota
        (None, [(10, 10)], [None]),  # no time passed
        (None, [(12, 0.5)], [None]),  # a forked child, whose process time restarts at 0
    ],
)
def test_cpu_utilization_is_the_share_of_the_usable_cores_since_the_last_call(monkeypatch, quota, seconds, percents):
    clock = SimpleNamespace(wall=10.0, busy=10.0)
    clock.monotonic, clock.process_time = lambda: clock.wall, lambda: clock.busy
    monkeypatch.setattr(host, "time", clock)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: [0, 1, 2, 3])
    monkeypatch.setattr(host, "cpu_quota_cores", lambda: quota)
    utilization = cpu_utilization()
    assert utilization.key == "cpu_pct"
    for (clock.wall, clock.busy), percent in zip(seconds, percents, strict=True):
        assert utilization.percent() == (None if percent is None else pytest.approx(percent))


@pytest.mark.skipif(not hasattr(host._c_library(), "mallinfo2"), reason="needs mallinfo2 of glibc 2.33")
def test_holes_in_the_heap_are_set_aside():
    def holes_bytes():
        heap = host._c_library().mallinfo2()
        return heap.fordblks - heap.keepcost

    device_memory = HostMemory()
    device_memory.release_cached()
    before_bytes = holes_bytes()  # small ones, of earlier tests
    blocks = [torch.empty(100 * 1024, dtype=torch.uint8) for _ in range(512)]  # below glibc's mmap threshold
    del blocks[::2]
    held_bytes, made_bytes = device_memory.current().allocated_bytes, holes_bytes() - before_bytes
    assert made_bytes > 20 * MIB
    device_memory.release_cached()
    assert holes_bytes() - before_bytes < 0.4 * made_bytes
    assert device_memory.current().allocated_bytes <= held_bytes + 2 * MIB
