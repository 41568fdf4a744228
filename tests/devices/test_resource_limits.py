"""Under a real RLIMIT_DATA, in processes of their own: it cannot be taken back."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lightning_batchmem.devices.resource_limits import ResourceLimits, field_bytes

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="no writable /proc/self/clear_refs on this host"
)

BEGIN = """
import gc, mmap, os, resource, sys, threading, time
import torch
from lightning_batchmem.devices.host import HostMemory

MIB = 1 << 20

def used(field="VmData"):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field + ":")) * 1024

meter = HostMemory()
meter.release_cached()
resource.setrlimit(resource.RLIMIT_DATA, (used() + ROOM * MIB,) * 2)
"""


def child(script: str, room_mib: int = 500) -> list[float]:
    """The numbers that a script prints, which begins under the limit."""
    done = subprocess.run(
        [sys.executable, "-c", f"ROOM = {room_mib}\n{BEGIN}\n{textwrap.dedent(script)}"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(number) for number in done.stdout.split()]


def test_what_the_heap_keeps_mapped_counts_in_the_peak_and_leaves_the_budget_as_it_was() -> None:
    first, mapped, second, peak, current = child("""
        first = meter.budget_bytes()
        held = [torch.ones(16 * 1024, dtype=torch.uint8) for _ in range(200 * 64)]  # 200 MiB from the heap
        pin = torch.ones(16 * 1024, dtype=torch.uint8)  # so that it stays mapped
        before, resident = used(), used("VmRSS")
        held.clear()
        meter.release_cached()
        second = meter.budget_bytes()
        meter.reset_peak()
        peak = meter.peak().allocated_bytes - resident
        current = meter.current().allocated_bytes - resident
        print(first / MIB, (before - used()) / MIB, second / MIB, peak / MIB, current / MIB)
    """)
    assert mapped < 20  # else this test shows nothing: the kernel has it back
    assert second == pytest.approx(first, abs=5)
    assert peak == pytest.approx(0, abs=20)  # the limit counts it still
    assert current == pytest.approx(-200, abs=20)  # but it lasts for nobody


def test_what_is_mapped_and_never_touched_is_in_the_peak() -> None:
    mapped, unwatched = child("""
        meter.budget_bytes()
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        meter.reset_peak()
        start = meter.peak().allocated_bytes
        meter.reset_peak()
        buffer = mmap.mmap(-1, 200 * MIB, flags=private)
        time.sleep(0.2)
        buffer.close()
        mapped = meter.peak().allocated_bytes - start

        profiler = HostMemory(quick=True)
        profiler._quick = False  # as where getrusage remembers more
        profiler.budget_bytes()
        time.sleep(0.1)  # until the first meter's has ended
        threads = threading.active_count()
        profiler.reset_peak()
        print(mapped / MIB, threading.active_count() - threads)
    """)
    assert mapped == pytest.approx(200, abs=5)
    assert unwatched == 0  # no thread in the steps of a training


def test_nobody_watches_once_the_peak_is_read_or_the_meter_is_gone() -> None:
    watching, after_peak, after_meter = child("""
        meter.budget_bytes()
        before = threading.active_count()
        meter.reset_peak()
        watching = threading.active_count() - before
        meter.peak()
        time.sleep(0.3)
        after_peak = threading.active_count() - before
        meter.reset_peak()  # and a user's error ends the step
        del meter
        gc.collect()
        time.sleep(0.3)
        print(watching, after_peak, threading.active_count() - before)
    """)
    assert (watching, after_peak, after_meter) == (1, 0, 0)


@pytest.mark.parametrize(("room_mib", "counted"), [(100, False), (50_000_000, True)])
def test_pages_of_files_count_unless_this_limit_is_the_least(room_mib: int, counted: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (64 << 20))
    (grown,) = child(
        f"""
        meter.budget_bytes()
        meter.reset_peak()
        start = meter.peak().allocated_bytes
        mapped = mmap.mmap(os.open({str(tmp_path / "file")!r}, os.O_RDONLY), 0, prot=mmap.PROT_READ)
        meter.reset_peak()
        seen = sum(mapped[place] for place in range(0, 64 * MIB, 4096))
        peak = meter.peak().allocated_bytes
        assert abs(peak - meter.current().allocated_bytes) < 5 * MIB
        print((peak - start) / MIB)
        """,
        room_mib,
    )
    assert grown == pytest.approx(64 if counted else 0, abs=5)


def test_without_a_limit_a_peak_is_the_resident_set() -> None:
    limits = ResourceLimits(None, None)
    assert limits.rooms(1000) == {}
    limits.watch()
    assert limits.counted_bytes(b"VmData: 999 kB\n", 123) == 123


def test_a_field_is_read_from_its_own_line() -> None:
    status = b"Name: VmData: 1 kB\nVmDataX: 2 kB\nVmData:   3 kB\n"
    assert field_bytes(status, "VmData") == 3072
    assert field_bytes(status, "VmHWM") is None
