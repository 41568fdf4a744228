"""CUDA readings with patched functions of torch.cuda; tests/gpu runs them on a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lightning_batchmem.devices.base import MemoryStats
from lightning_batchmem.devices.cuda import CudaMemory, CudaTimer, cuda_utilization

GIB = 1 << 30
DEVICE = torch.device("cuda", 1)


@dataclass
class Driver:
    """State behind the patched functions, for device 1."""

    calls: list[str] = field(default_factory=list)
    free_bytes: int = 20 * GIB
    total_bytes: int = 80 * GIB
    fraction: float = 1.0
    is_integrated: int = 0
    is_initialized: bool = True
    requested: tuple[int, int] = (2 * GIB, 8 * GIB)
    backend: str = "native"
    settings: dict[str, Any] = field(default_factory=lambda: {"expandable_segments": False})

    def stats(self, device: torch.device) -> dict[str, object]:
        assert device == DEVICE
        if not self.is_initialized:
            return {}
        return {
            "allocated_bytes": {"all": {"current": 3 * GIB, "peak": 9 * GIB}, "large_pool": {"peak": 1}},
            "reserved_bytes": {"all": {"current": 4 * GIB, "peak": 12 * GIB}},
            "requested_bytes": {"all": {"current": self.requested[0], "peak": self.requested[1]}},
            "num_ooms": 2,
            "num_alloc_retries": 5,
            "num_device_free": 3,
            "num_device_alloc": 77,
        }

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == DEVICE
        return self.free_bytes, self.total_bytes

    def set_fraction(self, fraction: float, device: torch.device) -> None:
        assert device == DEVICE
        assert 0 <= fraction <= 1
        self.fraction = fraction


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    functions = {
        "memory_stats_as_nested_dict": driver.stats,
        "mem_get_info": driver.mem_get_info,
        "is_initialized": lambda: driver.is_initialized,
        "reset_peak_memory_stats": lambda device: driver.calls.append(f"reset {device}"),
        "empty_cache": lambda: driver.calls.append("empty"),
        "synchronize": lambda device: driver.calls.append(f"synchronize {device}"),
        "get_device_properties": lambda device: SimpleNamespace(is_integrated=driver.is_integrated),
        "get_per_process_memory_fraction": lambda device: driver.fraction,
        "set_per_process_memory_fraction": driver.set_fraction,
        "get_allocator_backend": lambda: driver.backend,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": driver.settings})
    return driver


def test_readings_are_the_counters_of_the_allocator(driver: Driver) -> None:
    device_memory = CudaMemory(DEVICE)
    assert device_memory.peak() == MemoryStats(9 * GIB, 12 * GIB, 8 * GIB)
    assert device_memory.current() == MemoryStats(3 * GIB, 4 * GIB, 2 * GIB)
    assert device_memory.private_bytes() == 3 * GIB
    assert device_memory.counters() == {"num_ooms": 2, "num_alloc_retries": 5, "num_device_free": 3}


def test_requested_bytes_are_missing_where_the_allocator_does_not_count_them(driver: Driver) -> None:
    driver.requested = (0, 0)
    assert CudaMemory(DEVICE).peak().requested_bytes is None


def test_only_synchronize_synchronizes(driver: Driver) -> None:
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
    driver: Driver, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], budget_gib: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=6 * GIB))
    vars(driver).update(changes)
    assert CudaMemory(DEVICE).budget_bytes() == budget_gib * GIB


def test_a_torch_without_the_getter_has_a_budget_and_enforces_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert CudaMemory(DEVICE).budget_bytes() == 24 * GIB
    with CudaMemory(DEVICE).limit_enforced(8 * GIB) as is_enforced:
        assert not is_enforced
        assert driver.fraction == 1.0


# 60 GiB are in use, 4 of them reserved by this process
@pytest.mark.parametrize(("free_gib", "other_gib"), [(20, 56), (76, 0), (77, None)])
def test_memory_outside_the_allocator(driver: Driver, free_gib: int, other_gib: int | None) -> None:
    driver.free_bytes = free_gib * GIB
    assert CudaMemory(DEVICE).non_torch_bytes() == (None if other_gib is None else other_gib * GIB)


def test_before_cuda_starts_nothing_is_held_and_nothing_starts_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.is_initialized = False
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: pytest.fail("started CUDA"))
    device_memory = CudaMemory(DEVICE)
    device_memory.reset_peak()
    assert driver.calls == []
    assert device_memory.peak() == MemoryStats(0, 0, 0)
    assert device_memory.counters() == {}
    assert device_memory.non_torch_bytes() is None


@pytest.mark.parametrize(("previous", "limit_gib", "fraction"), [(1.0, 20, 0.25), (0.5, 60, 0.5), (1.0, 200, 1.0)])
def test_the_limit_is_enforced_and_the_previous_one_restored(
    driver: Driver, previous: float, limit_gib: int, fraction: float
) -> None:
    driver.fraction = previous
    fractions = []

    def fail_under_the_limit() -> None:
        with CudaMemory(DEVICE).limit_enforced(limit_gib * GIB) as is_enforced:
            fractions.append(driver.fraction if is_enforced else None)
            raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        fail_under_the_limit()
    assert fractions == [fraction]
    assert driver.fraction == previous


@pytest.mark.parametrize(
    "changes", [{"settings": {"expandable_segments": True}}, {"settings": {}}, {"backend": "cudaMallocAsync"}]
)
def test_the_limit_is_not_enforced_where_it_would_be_wrong(driver: Driver, changes: dict[str, Any]) -> None:
    vars(driver).update(changes)
    with CudaMemory(DEVICE).limit_enforced(8 * GIB) as is_enforced:
        assert not is_enforced
        assert driver.fraction == 1.0


@pytest.mark.parametrize("percent", [37, 0])
def test_utilization_is_that_of_the_driver(monkeypatch: pytest.MonkeyPatch, percent: int) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: percent)
    utilization = cuda_utilization(DEVICE)
    assert utilization is not None
    assert (utilization.key, utilization.percent()) == ("gpu_pct", percent)


def test_utilization_that_cannot_be_read_is_missing_and_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 50)
    utilization = cuda_utilization(DEVICE)
    assert utilization is not None
    monkeypatch.setattr(torch.cuda, "utilization", fail)
    assert utilization.percent() is None
    with pytest.warns(UserWarning, match="GPU utilization cannot be read"):
        assert cuda_utilization(DEVICE) is None


@dataclass
class Stream:
    """Work of a device: finished up to ``done_ms`` of ``end_ms``."""

    end_ms: float = 0.0
    done_ms: float = 0.0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[int, Stream]:
    """Current streams of devices 0 (the current device) and 1."""
    streams = {0: Stream(), 1: Stream()}

    class Event:
        """As in torch, reading the time between events that are not reached is an error."""

        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self, stream: Stream | None = None) -> None:
            self.stream = streams[0] if stream is None else stream
            self.at_ms = self.stream.end_ms

        def query(self) -> bool:
            return self.stream.done_ms >= self.at_ms

        def elapsed_time(self, end: Event) -> float:
            if not (self.query() and end.query()):
                raise RuntimeError("Both events must be completed before calculating elapsed time.")
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device.index])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: pytest.fail("waited for the device"))
    return streams


def test_seconds_are_known_once_the_device_has_reached_both_events(streams: dict[int, Stream]) -> None:
    timer, stream = CudaTimer(DEVICE), streams[1]
    stream.end_ms = 100.0
    earlier = timer.mark()
    stream.end_ms = 350.0
    later = timer.mark()
    for done_ms, seconds in ((0, None), (100, None), (349, None), (350, 0.25), (900, 0.25)):
        stream.done_ms = done_ms
        assert timer.seconds_between(earlier, later) == seconds


def test_an_event_that_is_not_reached_on_another_stream_is_no_error(streams: dict[int, Stream]) -> None:
    timer = CudaTimer(DEVICE)
    side = streams[1] = Stream(end_ms=500.0)
    earlier = timer.mark()
    streams[1] = Stream(end_ms=510.0, done_ms=510.0)
    later = timer.mark()
    assert timer.seconds_between(earlier, later) is None
    side.done_ms = 500.0
    assert timer.seconds_between(earlier, later) == 0.01
