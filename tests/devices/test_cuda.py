from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from lightning_batchmem.devices.base import MemoryStats
from lightning_batchmem.devices.cuda import CudaMemory
from lightning_batchmem.devices.select import device_memory_for

GIB = 1 << 30
DEVICE = torch.device("cuda", 1)


class Driver:
    """What the patched torch.cuda answers for device 1, and which calls it got."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.free_bytes, self.total_bytes = 20 * GIB, 80 * GIB
        self.fraction = 1.0
        self.integrated = 0
        self.initialized = True

    def stats(self, device: torch.device) -> dict[str, object]:
        assert device == DEVICE
        if not self.initialized:
            return {}
        return {
            "allocated_bytes": {"all": {"current": 3 * GIB, "peak": 9 * GIB}, "large_pool": {"peak": 1}},
            "reserved_bytes": {"all": {"current": 4 * GIB, "peak": 12 * GIB}},
            "num_ooms": 2,
            "num_alloc_retries": 5,
            "num_device_alloc": 77,
        }

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == DEVICE
        return self.free_bytes, self.total_bytes


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", driver.stats)
    monkeypatch.setattr(cuda, "mem_get_info", driver.mem_get_info)
    monkeypatch.setattr(cuda, "is_initialized", lambda: driver.initialized)
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda device: driver.calls.append(f"reset {device}"))
    monkeypatch.setattr(cuda, "empty_cache", lambda: driver.calls.append("empty"))
    monkeypatch.setattr(cuda, "synchronize", lambda device: driver.calls.append(f"synchronize {device}"))
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=driver.integrated))
    monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda device: driver.fraction, raising=False)
    return driver


def test_readings_are_the_allocators_own_counters(driver: Driver) -> None:
    device_memory = device_memory_for(DEVICE)
    assert (device_memory.name, device_memory.has_peak, device_memory.repeatability) == ("cuda", True, 0.0)
    assert device_memory.peak() == MemoryStats(9 * GIB, 12 * GIB)
    assert device_memory.current() == MemoryStats(3 * GIB, 4 * GIB)
    assert device_memory.counters() == {"num_ooms": 2, "num_alloc_retries": 5}


def test_only_synchronize_synchronizes(driver: Driver) -> None:
    device_memory = CudaMemory(DEVICE)
    device_memory.reset_peak()
    device_memory.peak()
    device_memory.current()
    device_memory.counters()
    device_memory.budget_bytes()
    device_memory.outside_bytes()
    assert driver.calls == ["reset cuda:1"]
    device_memory.release_cached()
    device_memory.synchronize()
    assert driver.calls == ["reset cuda:1", "empty", "synchronize cuda:1"]


def test_budget_is_free_and_ours_never_the_total(driver: Driver) -> None:
    assert CudaMemory(DEVICE).budget_bytes() == 24 * GIB


def test_memory_fraction_lowers_the_budget(driver: Driver) -> None:
    driver.fraction = 0.125
    assert CudaMemory(DEVICE).budget_bytes() == 10 * GIB


def test_torch_without_the_fraction_works(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert CudaMemory(DEVICE).budget_bytes() == 24 * GIB


def test_integrated_gpu_is_bound_by_the_host_too(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=6 * GIB))
    assert CudaMemory(DEVICE).budget_bytes() == 24 * GIB
    driver.integrated = 1
    assert CudaMemory(DEVICE).budget_bytes() == 10 * GIB


def test_outside_is_what_neither_is_free_nor_reserved_by_us(driver: Driver) -> None:
    driver.free_bytes, driver.total_bytes = 20 * GIB, 80 * GIB
    assert (
        CudaMemory(DEVICE).outside_bytes() == 56 * GIB
    )  # 60 in use, 4 of them reserved; what is allocated is in those
    driver.free_bytes = 76 * GIB
    assert CudaMemory(DEVICE).outside_bytes() == 0


def test_outside_is_missing_where_reserved_memory_is_not_on_the_device(driver: Driver) -> None:
    driver.free_bytes = 77 * GIB
    assert CudaMemory(DEVICE).outside_bytes() is None


def test_outside_does_not_start_cuda(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.initialized = False
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: pytest.fail("started CUDA"))
    assert CudaMemory(DEVICE).outside_bytes() is None


def test_before_cuda_starts_nothing_is_held_and_nothing_fails(driver: Driver) -> None:
    driver.initialized = False
    device_memory = CudaMemory(DEVICE)
    device_memory.reset_peak()
    assert driver.calls == []
    assert device_memory.peak() == MemoryStats(0, 0)
    assert device_memory.counters() == {}


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device must be a cuda device, got cpu"):
        CudaMemory(torch.device("cpu"))


def test_import_starts_nothing() -> None:
    script = """if True:
        import sys
        import torch
        from lightning_batchmem.devices import cuda, host, mps, nvml, out_of_memory
        from lightning_batchmem.devices.select import timer_for
        timer_for(torch.device("cuda:0"))
        meter = cuda.CudaMemory(torch.device("cuda:0"))
        meter.peak()
        meter.outside_bytes()
        assert not torch.cuda.is_initialized()
        print(sorted({"pynvml", "matplotlib"} & set(sys.modules)))
    """
    # torch.cuda and Lightning import pynvml themselves in some releases: compare with them alone.
    alone = "import sys, torch, lightning.pytorch; print(sorted({'pynvml', 'matplotlib'} & set(sys.modules)))"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
        ).stdout
        for code in (script, alone)
    ]
    assert outputs[0] == outputs[1]
