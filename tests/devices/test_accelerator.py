"""CUDA readings with patched functions of torch.cuda; tests/gpu runs them on a device."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from lightning_batchmem.devices.accelerator import CudaMemory, CudaTimer, cuda_utilization
from lightning_batchmem.devices.base import MemoryStats

GIB = 1 << 30
DEVICE = torch.device("cuda", 1)


@pytest.fixture
def driver(monkeypatch):
    """State behind the patched functions, for device 1."""
    driver = SimpleNamespace(
        calls=[],
        free_bytes=20 * GIB,
        fraction=1.0,
        is_integrated=0,
        requested=(2 * GIB, 8 * GIB),
        backend="native",
    )
    driver.settings = {"expandable_segments": False}

    def stats(device):
        assert device == DEVICE
        return {
            "allocated_bytes": {
                "all": {"current": 3 * GIB, "peak": 9 * GIB},
                "large_pool": {"peak": 1},
            },
            "reserved_bytes": {"all": {"current": 4 * GIB, "peak": 12 * GIB}},
            "requested_bytes": {
                "all": dict(zip(("current", "peak"), driver.requested, strict=True))
            },
            "num_ooms": 2,
            "num_alloc_retries": 5,
            "num_device_free": 3,
            "num_device_alloc": 77,
        }

    def mem_get_info(device):
        assert device == DEVICE
        return driver.free_bytes, 80 * GIB

    def set_fraction(fraction, device):
        assert device == DEVICE
        assert 0 <= fraction <= 1
        driver.fraction = fraction

    functions = {
        "memory_stats_as_nested_dict": stats,
        "mem_get_info": mem_get_info,
        "is_initialized": lambda: True,
        "reset_peak_memory_stats": lambda device: driver.calls.append(f"reset {device}"),
        "empty_cache": lambda: driver.calls.append("empty"),
        "synchronize": lambda device: driver.calls.append(f"synchronize {device}"),
        "get_device_properties": lambda device: SimpleNamespace(is_integrated=driver.is_integrated),
        "get_per_process_memory_fraction": lambda device: driver.fraction,
        "set_per_process_memory_fraction": set_fraction,
        "get_allocator_backend": lambda: driver.backend,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function, raising=False)
    monkeypatch.setattr(
        torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": driver.settings}
    )
    return driver


def test_readings_are_the_counters_of_the_allocator(driver):
    device_memory = CudaMemory(DEVICE)
    assert device_memory.peak() == MemoryStats(9 * GIB, 12 * GIB, 8 * GIB)
    assert device_memory.current() == MemoryStats(3 * GIB, 4 * GIB, 2 * GIB)
    assert device_memory.private_bytes() == 3 * GIB
    assert device_memory.counters() == {"num_ooms": 2, "num_alloc_retries": 5, "num_device_free": 3}
    # An allocator that does not count requested bytes reports 0.
    driver.requested = (0, 0)
    assert device_memory.peak().requested_bytes is None


def test_only_synchronize_synchronizes(driver):
    device_memory = CudaMemory(DEVICE)
    device_memory.reset_peak()
    device_memory.peak()
    device_memory.current()
    device_memory.counters()
    device_memory.budget_bytes()
    device_memory.non_torch_bytes()
    with device_memory.limit_enforced(GIB):
        pass
    assert driver.calls == ["reset cuda:1"]
    device_memory.release_cached()
    device_memory.synchronize()
    assert driver.calls == ["reset cuda:1", "empty", "synchronize cuda:1"]


@pytest.mark.parametrize(
    ("changes", "budget_gib"),
    [({}, 24), ({"fraction": 0.125}, 10), ({"is_integrated": 1}, 10), ({"fraction": 0.5}, 24)],
)
def test_budget_is_free_and_reserved_memory_within_the_limits(
    driver, monkeypatch, changes, budget_gib
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=6 * GIB))
    vars(driver).update(changes)
    assert CudaMemory(DEVICE).budget_bytes() == budget_gib * GIB


def test_a_torch_without_the_getter_has_a_budget_and_enforces_nothing(driver, monkeypatch):
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert CudaMemory(DEVICE).budget_bytes() == 24 * GIB
    with CudaMemory(DEVICE).limit_enforced(8 * GIB) as is_enforced:
        assert not is_enforced
        assert driver.fraction == 1.0


# With 20 GiB free, 60 GiB are in use; this process has reserved 4 of them.
@pytest.mark.parametrize(("free_gib", "other_gib"), [(20, 56), (76, 0), (77, None)])
def test_memory_outside_the_allocator(driver, free_gib, other_gib):
    driver.free_bytes = free_gib * GIB
    assert CudaMemory(DEVICE).non_torch_bytes() == (None if other_gib is None else other_gib * GIB)


@pytest.mark.parametrize(
    ("previous", "limit_gib", "fraction"), [(1.0, 20, 0.25), (0.5, 60, 0.5), (1.0, 200, 1.0)]
)
def test_the_limit_is_enforced_and_the_previous_one_restored(driver, previous, limit_gib, fraction):
    driver.fraction = previous
    fractions = []

    def fail_under_the_limit():
        with CudaMemory(DEVICE).limit_enforced(limit_gib * GIB) as is_enforced:
            fractions.append(driver.fraction if is_enforced else None)
            raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        fail_under_the_limit()
    assert fractions == [fraction]
    assert driver.fraction == previous


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {"expandable_segments": True}},
        {"settings": {"expandable_segments": False, "garbage_collection_threshold": 0.8}},
        {"settings": {}},
        {"backend": "cudaMallocAsync"},
    ],
)
def test_the_limit_is_not_enforced_where_it_would_be_wrong(driver, changes):
    vars(driver).update(changes)
    with CudaMemory(DEVICE).limit_enforced(8 * GIB) as is_enforced:
        assert not is_enforced
        assert driver.fraction == 1.0


def test_utilization_is_that_of_the_driver_and_missing_where_it_cannot_be_read(monkeypatch):
    def fail(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 0)
    utilization = cuda_utilization(DEVICE)
    assert (utilization.key, utilization.percent()) == ("gpu_pct", 0)
    monkeypatch.setattr(torch.cuda, "utilization", fail)
    assert utilization.percent() is None
    with pytest.warns(UserWarning, match="GPU utilization cannot be read"):
        assert cuda_utilization(DEVICE) is None


class Event:
    """An event 10 ms after the one before it.

    The device has reached it once the test sets ``is_reached``.
    """

    count = 0

    def __init__(self, enable_timing=False):
        assert enable_timing
        self.is_reached = False

    def record(self, stream):
        assert stream == "stream of cuda:1"
        Event.count += 1
        self.at_ms = 10.0 * Event.count

    def query(self):
        return self.is_reached

    def elapsed_time(self, end):
        assert self.is_reached, "torch raises"
        assert end.is_reached, "torch raises"
        return end.at_ms - self.at_ms


def test_seconds_are_known_once_the_device_has_reached_both_events(monkeypatch):
    """Events of another stream may be reached in the other order."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device=None: pytest.fail("waited for the device")
    )
    timer = CudaTimer(DEVICE)
    earlier = timer.mark()
    later = timer.mark()
    for reached in ((False, False), (True, False), (False, True), (True, True)):
        earlier.is_reached, later.is_reached = reached
        assert timer.seconds_between(earlier, later) == (0.01 if all(reached) else None)
