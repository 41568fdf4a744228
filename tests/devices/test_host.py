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
from lightning_batchmem.devices.foreign_values import begin_run
from lightning_batchmem.devices.host import HostMemory

MIB = 1 << 20

needs_peak = pytest.mark.skipif(
    not HostMemory().can_reset_peak, reason="no writable /proc/self/clear_refs on this host"
)


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
    quick = HostMemory(quick=True)
    exact = HostMemory()
    if not quick.is_quick:
        pytest.skip("the program before exec was larger")
    for size in (0, 64, 8):
        quick.reset_peak()
        if size:
            touch(size * MIB).close()
        assert abs(quick.peak().allocated_bytes - exact.peak().allocated_bytes) <= MIB


@needs_peak
def test_getrusage_is_not_read_if_it_includes_the_program_before_exec(monkeypatch):
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=1 << 30))
    assert HostMemory(quick=True).peak().allocated_bytes < 1 << 40


@needs_peak
def test_release_cached_returns_small_freed_blocks():
    device_memory = HostMemory()
    # Blocks below glibc's mmap threshold lie in the heap.
    blocks = [torch.ones(16 * 1024, dtype=torch.uint8) for _ in range(4096)]
    # The last block of the heap prevents that free itself trims the heap.
    pin = torch.ones(16 * 1024, dtype=torch.uint8)
    blocks.clear()
    held_bytes = device_memory.current().allocated_bytes
    device_memory.release_cached()
    assert held_bytes - device_memory.current().allocated_bytes > 32 * MIB
    assert pin.sum() == 16 * 1024


@needs_peak
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda device_memory: pickle.loads(pickle.dumps(device_memory))]
)
def test_a_copy_opens_its_own_files_and_every_file_is_closed(duplicate):
    before = psutil.Process().num_fds()
    device_memory = HostMemory(quick=True)
    twin = duplicate(device_memory)
    # Each of the two has two open files.
    assert psutil.Process().num_fds() == before + 4
    del device_memory
    twin.reset_peak()
    assert twin.peak().allocated_bytes > 0
    del twin
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("name", ["clear_refs", "status"])
def test_without_the_files_of_the_kernel_the_peak_is_the_current_value(tmp_path, name):
    (tmp_path / name).symlink_to(Path("/proc/self") / name)
    device_memory = HostMemory(quick=True, files=tmp_path)
    assert not device_memory.can_reset_peak
    touch(64 * MIB).close()
    device_memory.reset_peak()
    peak_bytes = device_memory.peak().allocated_bytes
    assert peak_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)


@pytest.mark.parametrize(("group_gib", "room_gib"), [(None, 7), (3, 3), (0, 0), (9, 7)])
def test_the_budget_is_the_resident_set_and_the_least_room(monkeypatch, group_gib, room_gib):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7 << 30))
    monkeypatch.setattr(
        host, "memory_headroom_bytes", lambda: None if group_gib is None else group_gib << 30
    )
    device_memory = HostMemory()
    room_bytes = device_memory.available_bytes() - device_memory.current().allocated_bytes
    assert room_bytes == pytest.approx(room_gib << 30, abs=4 * MIB)


@pytest.mark.skipif(sys.platform != "linux", reason="these names of sysconf are those of Linux")
def test_the_free_memory_is_the_room_where_the_available_is_not_known(monkeypatch):
    def refuse():
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    monkeypatch.setattr(host, "memory_headroom_bytes", lambda: None)
    pages = {"SC_AVPHYS_PAGES": 300, "SC_PAGE_SIZE": MIB}
    monkeypatch.setattr(host.os, "sysconf", pages.__getitem__)
    device_memory = HostMemory()
    with pytest.warns(UserWarning, match="available memory of the CPU cannot be read: AccessDen"):
        room_bytes = device_memory.available_bytes() - device_memory.current().allocated_bytes
    assert room_bytes == pytest.approx(300 * MIB, abs=4 * MIB)


@pytest.mark.parametrize("content", ["Name: x\nVmHWM:\n", "Name: x\nVmHWM: many kB\n"])
def test_a_peak_that_cannot_be_parsed_is_none(tmp_path, content):
    (tmp_path / "status").write_text(content)
    (tmp_path / "clear_refs").touch()
    assert not HostMemory(quick=True, files=tmp_path).can_reset_peak


@needs_peak
@pytest.mark.parametrize("content", ["", "1 2 3", "1 many 3 4 5 6 7"])
def test_a_resident_set_that_cannot_be_parsed_is_read_with_psutil(tmp_path, content):
    (tmp_path / "status").symlink_to("/proc/self/status")
    (tmp_path / "clear_refs").symlink_to("/proc/self/clear_refs")
    (tmp_path / "statm").write_text(content)
    begin_run()
    device_memory = HostMemory(files=tmp_path)
    with pytest.warns(UserWarning, match="/proc/self/statm cannot be read: ValueError") as caught:
        readings = [device_memory.current().allocated_bytes for _ in range(2)]
    assert readings == pytest.approx([psutil.Process().memory_info().rss] * 2, rel=0.1)
    assert len(caught) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="resource limits are read on Linux")
@pytest.mark.parametrize(("limit", "field"), [("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")])
def test_a_resource_limit_bounds_the_budget(monkeypatch, limit, field):
    device_memory = HostMemory()
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(field)]
    used_bytes = int(line.split()[1]) << 10
    limits = {getattr(resource, limit): (used_bytes + 300 * MIB, resource.RLIM_INFINITY)}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, unlimited))
    room_bytes = device_memory.available_bytes() - device_memory.current().allocated_bytes
    assert room_bytes == pytest.approx(300 * MIB, abs=10 * MIB)


def test_resource_limits_that_a_sandbox_refuses_are_missing(monkeypatch):
    def refuse(kind):
        raise PermissionError("not here")

    monkeypatch.setattr(resource, "getrlimit", refuse)
    device_memory = HostMemory()
    with pytest.warns(UserWarning, match="The limits of this process cannot be read: Permission"):
        assert device_memory.available_bytes() > device_memory.current().allocated_bytes
