from __future__ import annotations

import copy
import mmap
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from lightning_batchmem.devices import cgroup, host
from lightning_batchmem.devices.host import CpuUtilization, HostMemory
from lightning_batchmem.devices.select import device_memory_for, utilization_for

MIB = 1 << 20

needs_peak = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="no writable /proc/self/clear_refs on this host"
)


def touch(size_bytes: int) -> mmap.mmap:
    """Resident memory that comes straight from the kernel and goes straight back on ``close``."""
    block = mmap.mmap(-1, size_bytes)
    block.write(b"x" * size_bytes)
    return block


def in_child(work: Callable[[], int]) -> int:
    """What ``work`` returns in a forked child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, str(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as pipe:
        return int(pipe.read())


def test_meter_for_cpu_is_the_host_meter() -> None:
    device_memory = device_memory_for(torch.device("cpu"))
    assert isinstance(device_memory, HostMemory)
    assert device_memory.name == "host"
    assert 0 < device_memory.repeatability < 1
    assert device_memory.counters() == {}
    device_memory.synchronize()


@needs_peak
def test_the_quick_reading_is_that_of_the_kernels_mark() -> None:
    device_memory, exact = HostMemory(quick=True), HostMemory()
    if not device_memory._quick:
        pytest.skip("what this process was before exec was larger")
    for size in (0, 64, 8):
        device_memory.reset_peak()
        touch(size * MIB).close() if size else None
        assert abs(device_memory.peak().allocated_bytes - exact.peak().allocated_bytes) <= MIB


@needs_peak
def test_a_quick_reading_that_remembers_more_than_the_mark_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux carries the peak of the program before exec along in getrusage."""
    monkeypatch.setattr(host, "_rusage_peak_bytes", lambda: 1 << 40)
    device_memory = HostMemory(quick=True)
    assert device_memory.peak().allocated_bytes < 1 << 40


@needs_peak
def test_peak_rises_by_a_tensor_and_falls_after_reset() -> None:
    device_memory = HostMemory()
    assert device_memory.has_peak
    device_memory.release_cached()
    device_memory.reset_peak()
    before = device_memory.peak().allocated_bytes
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    held = device_memory.current().allocated_bytes
    del tensor
    device_memory.release_cached()
    assert device_memory.peak().allocated_bytes - before == pytest.approx(64 * MIB, rel=0.1)  # freed, yet in the peak
    assert held - before == pytest.approx(64 * MIB, rel=0.1)
    device_memory.reset_peak()
    assert device_memory.peak().allocated_bytes - before < 8 * MIB


def test_reserved_is_missing() -> None:
    device_memory = HostMemory()
    assert device_memory.peak().reserved_bytes is None
    assert device_memory.current().reserved_bytes is None


def test_current_is_the_resident_set() -> None:
    resident_bytes = psutil.Process().memory_info().rss
    assert HostMemory().current().allocated_bytes == pytest.approx(resident_bytes, rel=0.05)


@needs_peak
@pytest.mark.skipif(sys.platform != "linux", reason="malloc_trim is glibc's")
def test_release_cached_gives_small_freed_blocks_back() -> None:
    device_memory = HostMemory()
    blocks = [torch.ones(16 * 1024, dtype=torch.uint8) for _ in range(4096)]  # below glibc's mmap threshold
    pin = torch.ones(16 * 1024, dtype=torch.uint8)  # keeps the heap's top from being trimmed by free itself
    blocks.clear()
    held = device_memory.current().allocated_bytes
    device_memory.release_cached()
    assert held - device_memory.current().allocated_bytes > 32 * MIB
    assert pin.sum() == 16 * 1024


@needs_peak
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 and later, torch has threads
def test_forked_child_has_its_own_peak_and_leaves_the_parents() -> None:
    device_memory = HostMemory()
    device_memory.reset_peak()
    touch(64 * MIB).close()
    parent_peak = device_memory.peak().allocated_bytes

    def work() -> int:
        device_memory.reset_peak()
        before = device_memory.peak().allocated_bytes
        touch(128 * MIB).close()
        return device_memory.peak().allocated_bytes - before

    # write() needs its 128 MiB of bytes too; had the child read the parent's file, it would see no growth at all.
    assert 128 * MIB <= in_child(work) <= 300 * MIB
    assert device_memory.peak().allocated_bytes == pytest.approx(parent_peak, abs=MIB)  # not reset, not raised


@needs_peak
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda device_memory: pickle.loads(pickle.dumps(device_memory))])
def test_copy_has_files_of_its_own(duplicate: Callable[[HostMemory], HostMemory]) -> None:
    device_memory = HostMemory()
    twin = duplicate(device_memory)
    del device_memory
    twin.reset_peak()
    assert twin.peak().allocated_bytes > 0


def test_many_meters_leak_no_descriptors() -> None:
    HostMemory()
    before = psutil.Process().num_fds()
    for _ in range(20):
        HostMemory().peak()
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("missing", [["_CLEAR_REFS"], ["_STATUS"], ["_STATM", "_STATUS"]])
def test_without_clear_refs_one_warning_and_a_coarse_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: list[str]
) -> None:
    for name in missing:
        monkeypatch.setattr(host, name, str(tmp_path / "missing"))
    with pytest.warns(UserWarning, match="coarser") as caught:
        device_memory = HostMemory()
    assert len(caught) == 1
    device_memory.reset_peak()  # any further warning is an error
    readings = [device_memory.peak(), device_memory.current()]
    assert not device_memory.has_peak
    resident_bytes = psutil.Process().memory_info().rss
    for reading in readings:
        assert reading.allocated_bytes == pytest.approx(resident_bytes, rel=0.1)
    assert device_memory.budget_bytes() > resident_bytes * 0.9


def test_refused_reset_is_no_peak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_CLEAR_REFS", "/dev/full")  # opens, and fails at the first write
    with pytest.warns(UserWarning, match="coarser"):
        device_memory = HostMemory()
    block = touch(64 * MIB)
    block.close()
    assert device_memory.peak().allocated_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)


@pytest.fixture
def meminfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stands in for /proc/meminfo; psutil says 5 GiB."""
    monkeypatch.setattr(host, "_MEMINFO", str(tmp_path / "meminfo"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 << 30))
    return tmp_path / "meminfo"


def test_budget_is_held_and_the_least_room(meminfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo.write_text(f"MemTotal: {64 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {7 << 20} kB\nBuffers: 1 kB\n")
    group_bytes: int | None = None
    monkeypatch.setattr(cgroup, "memory_headroom_bytes", lambda: group_bytes)
    device_memory = HostMemory()
    held = device_memory.current().allocated_bytes
    assert device_memory.budget_bytes() - held == pytest.approx(7 << 30, abs=4 * MIB)
    group_bytes = 3 << 30
    assert device_memory.budget_bytes() - held == pytest.approx(3 << 30, abs=4 * MIB)
    group_bytes = 0
    assert device_memory.budget_bytes() - held == pytest.approx(0, abs=4 * MIB)


@pytest.mark.parametrize(
    "lines",
    [
        None,
        "MemTotal: 9000000 kB\nMemFree: 1000000 kB\n",  # Linux before 3.14
        "MemTotal: 9000000 kB\nMemAvailable: 0 kB\n",  # psutil#1915
        "MemTotal: 9000000 kB\nMemAvailable: 9000001 kB\n",  # LXC: the container's total, the host's available
        "MemAvailable: 8000000 kB\n",
    ],
)
def test_psutil_is_asked_where_the_kernels_line_is_missing_or_makes_no_sense(
    meminfo: Path, monkeypatch: pytest.MonkeyPatch, lines: str | None
) -> None:
    monkeypatch.setattr(cgroup, "memory_headroom_bytes", lambda: None)
    if lines is not None:
        meminfo.write_text(lines)
    device_memory = HostMemory()
    assert device_memory.budget_bytes() - device_memory.current().allocated_bytes == pytest.approx(5 << 30, abs=4 * MIB)


def test_available_is_what_psutil_says() -> None:
    assert HostMemory()._available_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="files of /proc")
def test_a_budget_opens_no_file_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    device_memory = HostMemory(quick=True)
    device_memory.budget_bytes()
    monkeypatch.setattr(os, "open", lambda *arguments: pytest.fail(f"opened {arguments[0]}"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: pytest.fail("psutil opens one"))
    assert device_memory.budget_bytes() > device_memory.current().allocated_bytes


def test_nothing_is_outside_an_allocator() -> None:
    assert HostMemory().outside_bytes() is None


@pytest.mark.skipif(sys.platform != "linux", reason="resource limits are read on Linux")
@pytest.mark.parametrize(("limit", "field"), [("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")])
def test_resource_limit_bounds_the_budget_and_the_bound_is_true(limit: str, field: str) -> None:
    script = f"""
        import mmap, resource
        from lightning_batchmem.devices.host import HostMemory
        meter = HostMemory()
        used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("{field}")) * 1024
        resource.setrlimit(resource.{limit}, (used + (300 << 20),) * 2)
        room = meter.budget_bytes() - meter.current().allocated_bytes
        print(room >> 20)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        held = mmap.mmap(-1, room - (16 << 20), flags=private)
        try:
            mmap.mmap(-1, 32 << 20, flags=private)
        except OSError:
            print("full")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    room_mib, full = done.stdout.split()
    assert int(room_mib) == pytest.approx(300, abs=10)
    assert full == "full"


class Clock:
    """Stands in for ``host.time``: wall and process seconds that a test sets."""

    def __init__(self) -> None:
        self.wall = self.busy = 10.0

    def monotonic(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.busy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(host, "time", clock)
    return clock


def test_cpu_share_of_the_cores_since_the_last_call(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(cgroup, "cpu_quota_cores", lambda: None)
    utilization = CpuUtilization()
    assert utilization.key == "cpu_pct"
    clock.wall, clock.busy = 12.0, 14.0  # 4 core seconds of 2 s x 4 cores
    assert utilization.percent_since_last_call() == pytest.approx(50)
    clock.wall, clock.busy = 13.0, 15.0
    assert utilization.percent_since_last_call() == pytest.approx(25)


def test_cpu_quota_below_the_cores_counts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(cgroup, "cpu_quota_cores", lambda: 0.5)
    utilization = CpuUtilization()
    clock.wall, clock.busy = 12.0, 10.5
    assert utilization.percent_since_last_call() == pytest.approx(50)
    clock.wall, clock.busy = 12.5, 11.5  # a burst above the quota
    assert utilization.percent_since_last_call() == 100


@pytest.mark.parametrize(("wall", "busy"), [(10.0, 10.0), (12.0, 0.5)])
def test_cpu_share_is_missing_without_time_or_in_a_forked_child(clock: Clock, wall: float, busy: float) -> None:
    utilization = CpuUtilization()
    clock.wall, clock.busy = wall, busy
    assert utilization.percent_since_last_call() is None


def test_real_cpu_share_is_a_share() -> None:
    utilization = utilization_for(torch.device("cpu"))
    assert isinstance(utilization, CpuUtilization)
    sum(range(2_000_000))
    share = utilization.percent_since_last_call()
    assert share is not None
    assert 0 < share <= 100
