"""Page faults of this process, counted by its kernel, and the share of the time that they take."""

import mmap
import platform
import sys
import time

import pytest

from lightning_batchmem.devices.page_faults import (
    PageFaultMeter,
    PageFaults,
    page_fault_sentence,
    page_fault_share,
    seconds_per_fault,
)

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="private mappings are of Linux")
PAGES = 256


def touch_new_pages():
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=flags) as block:
        block[:: mmap.PAGESIZE] = bytes(PAGES)


def read_zeros():
    """Spend kernel time without page faults."""
    with open("/dev/zero", "rb", buffering=0) as file:
        file.readinto(bytearray(2**16))


def faults_while(work, cpu_seconds):
    meter = PageFaultMeter()
    end = time.process_time() + cpu_seconds
    while time.process_time() < end:
        work()
    return meter.read()


@needs_linux
def test_the_meter_counts_each_new_page_that_is_written():
    meter = PageFaultMeter()
    first = meter.read()
    for _ in range(4):
        touch_new_pages()
    faults = meter.read() - first
    # The interpreter may touch some pages too.
    assert 4 * PAGES <= faults.count < 8 * PAGES
    assert faults.cpu_seconds > 0
    # The differences are rounded.
    assert 0 <= faults.kernel_seconds <= faults.cpu_seconds + 1e-6


@needs_linux
def test_a_pause_is_left_out():
    meter = PageFaultMeter()
    touch_new_pages()
    meter.pause()
    for _ in range(16):
        touch_new_pages()
    meter.resume()
    touch_new_pages()
    assert 2 * PAGES <= meter.read().count < 8 * PAGES


def test_without_a_count_there_is_no_reading(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    meter = PageFaultMeter()
    meter.pause()
    meter.resume()
    assert meter.read() is None


@pytest.mark.parametrize(
    ("count", "kernel_seconds", "share"),
    [
        # 1 million faults of 2 µs take 2 s.
        (10**6, 2.5, 0.2),
        # Kernel time without page faults is not theirs.
        (10, 9.0, 2e-6),
        # Page faults take no more than the kernel time.
        (10**7, 3.0, 0.3),
        (0, 0.0, 0.0),
    ],
)
def test_the_share_is_that_of_the_kernel_time_which_the_faults_explain(
    count, kernel_seconds, share
):
    faults = PageFaults(count, kernel_seconds, cpu_seconds=10.0)
    assert page_fault_share(faults, fault_seconds=2e-6) == pytest.approx(share)


# Each fault takes more than 1 ps, so the faults explain all of the kernel time.
@pytest.mark.parametrize("version", ["2.36", "2.36.9000"])
def test_the_sentence_is_issued_above_15_per_cent(monkeypatch, version):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", version))
    assert page_fault_sentence(PageFaults(10**15, 1.5, 10.0), steps=50) is None
    sentence = page_fault_sentence(PageFaults(10**15, 1.6, 10.0), steps=50)
    assert "Page faults take 16% of the CPU time of the training steps (20,000,0" in sentence
    assert "MALLOC_MMAP_THRESHOLD_=8589934592 and MALLOC_TRIM_THRESHOLD_=8589934592" in sentence
    assert "jemalloc (LD_PRELOAD)" in sentence


# glibc 2.35 was not tried with the value of the sentence, and other libraries ignore the variables.
@pytest.mark.parametrize("library", [("glibc", "2.35"), ("musl", "1.2.5"), ("", "")])
def test_no_sentence_names_variables_that_do_nothing(monkeypatch, library):
    monkeypatch.setattr(platform, "libc_ver", lambda: library)
    assert page_fault_sentence(PageFaults(10**15, 9.0, 10.0), steps=50) is None


@needs_linux
def test_work_in_the_kernel_counts_only_if_it_is_page_faults():
    """The margins are wide, because both shares vary with other work on the machine."""
    touching = faults_while(touch_new_pages, 0.3)
    reading = faults_while(read_zeros, 0.3)
    assert page_fault_share(touching, seconds_per_fault()) > 0.25
    assert seconds_per_fault() < 2 * touching.cpu_seconds / touching.count
    assert page_fault_share(reading, seconds_per_fault()) < 0.1
    # This kernel time would be an alert if all of it counted.
    assert reading.kernel_seconds / reading.cpu_seconds > 0.25
