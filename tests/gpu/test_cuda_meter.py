from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_batchmem.devices.cuda import CudaMemory
from lightning_batchmem.devices.nvml import nvml_utilization
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.devices.select import device_memory_for

MIB = 1 << 20


@pytest.fixture
def device_memory(device: torch.device) -> Iterator[CudaMemory]:
    torch.empty(1, device=device)
    device_memory = device_memory_for(device)
    assert isinstance(device_memory, CudaMemory)
    device_memory.release_cached()
    device_memory.reset_peak()
    yield device_memory
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    device_memory.release_cached()


def block(size_mib: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size_mib * MIB, dtype=torch.uint8, device=device)


def test_peak_is_exact_and_starts_again_after_reset(device_memory: CudaMemory, device: torch.device) -> None:
    before = device_memory.current()
    tensor = block(256, device)
    assert device_memory.current().allocated_bytes - before.allocated_bytes == 256 * MIB
    del tensor
    peak = device_memory.peak()
    assert peak.allocated_bytes - before.allocated_bytes == 256 * MIB
    assert peak.reserved_bytes is not None
    assert peak.reserved_bytes >= peak.allocated_bytes
    device_memory.reset_peak()
    assert device_memory.peak().allocated_bytes == before.allocated_bytes
    assert (device_memory.peak().reserved_bytes or 0) >= 256 * MIB  # the cache still has it ...
    device_memory.release_cached()
    device_memory.reset_peak()
    assert (device_memory.peak().reserved_bytes or 0) < 256 * MIB  # ... until it is given back


def test_peak_repeats_to_the_byte(device_memory: CudaMemory, device: torch.device) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(device)
    peaks = []
    for _ in range(4):
        device_memory.release_cached()
        device_memory.reset_peak()
        model(torch.ones(256, 512, device=device)).sum().backward()
        model.zero_grad()
        peaks.append(device_memory.peak().allocated_bytes)
    assert len(set(peaks[1:])) == 1  # the first has cuBLAS's workspace in it


def test_budget_does_not_depend_on_what_we_hold(device_memory: CudaMemory, device: torch.device) -> None:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    empty = device_memory.budget_bytes()
    assert free_bytes <= empty <= total_bytes
    tensor = block(1024, device)
    assert device_memory.budget_bytes() == pytest.approx(empty, abs=64 * MIB)
    del tensor
    assert device_memory.budget_bytes() == pytest.approx(empty, abs=64 * MIB)  # cached, still ours


def test_outside_does_not_depend_on_what_we_hold(device_memory: CudaMemory, device: torch.device) -> None:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    outside = device_memory.outside_bytes()
    assert outside is not None
    assert 0 < outside <= total_bytes - free_bytes  # this process's own context at least
    tensor = block(1024, device)
    assert device_memory.outside_bytes() == pytest.approx(outside, abs=64 * MIB)
    del tensor
    assert device_memory.outside_bytes() == pytest.approx(outside, abs=64 * MIB)  # cached, still ours
    assert device_memory.outside_bytes() == pytest.approx(total_bytes - device_memory.budget_bytes(), abs=64 * MIB)


def test_budget_is_true_and_running_out_is_recognised(device_memory: CudaMemory, device: torch.device) -> None:
    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        pytest.skip("this torch does not tell the memory fraction")
    total_bytes = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(1024 * MIB / total_bytes, device)
    budget = device_memory.budget_bytes()
    assert budget == pytest.approx(1024 * MIB, abs=MIB)
    ooms = device_memory.counters()["num_ooms"]
    room_mib = (budget - (device_memory.current().reserved_bytes or 0)) // MIB
    tensor = block(room_mib - 32, device)
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        block(64, device)
    assert is_out_of_memory(caught.value)
    assert device_memory.counters()["num_ooms"] == ooms + 1
    assert device_memory.peak().allocated_bytes <= budget
    del tensor


def test_readings_wait_for_nothing(device_memory: CudaMemory, device: torch.device) -> None:
    matrix = torch.ones(4096, 4096, device=device)
    matrix @ matrix
    device_memory.synchronize()
    done = torch.cuda.Event()
    for _ in range(200):
        matrix @ matrix
    done.record()
    device_memory.reset_peak()
    device_memory.peak()
    device_memory.current()
    device_memory.counters()
    device_memory.budget_bytes()
    device_memory.outside_bytes()
    assert not done.query(), "a reading waited until the device was idle"
    device_memory.synchronize()
    assert done.query()


def test_construction_starts_no_context() -> None:
    script = """if True:
        import torch
        from lightning_batchmem.devices.select import device_memory_for
        meter = device_memory_for(torch.device("cuda:0"))
        meter.reset_peak()
        assert meter.peak().allocated_bytes == 0
        assert meter.outside_bytes() is None
        assert not torch.cuda.is_initialized()
    """
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=True)


def test_utilization_of_a_busy_device(device: torch.device) -> None:
    matrix = torch.ones(4096, 4096, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        utilization = nvml_utilization(device)
    if utilization is None:
        assert len(caught) == 1
        pytest.skip(str(caught[0].message))
    end = time.monotonic() + 4
    while time.monotonic() < end:
        for _ in range(50):
            matrix @ matrix
        torch.cuda.synchronize(device)
    busy = utilization.percent_since_last_call()
    assert busy is not None
    assert 50 < busy <= 100
    at_once = utilization.percent_since_last_call()
    assert at_once is None or 0 <= at_once <= 100


def test_utilization_when_cuda_sees_one_device_by_uuid(device: torch.device) -> None:
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    script = """if True:
        import warnings
        import torch
        from lightning_batchmem.devices.nvml import nvml_utilization
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reader = nvml_utilization(torch.device("cuda:0"))
        assert (reader is None) == (len(caught) == 1), caught
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": f"GPU-{uuid.removeprefix('GPU-')}"}
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], env=environment, check=True)
