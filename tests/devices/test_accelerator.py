"""Readings of a device module that is made by hand; tests/gpu reads those of CUDA."""

import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from lightning_batchmem.devices.accelerator import (
    AcceleratorMemory,
    cuda_utilization,
    replays_graphs,
)
from lightning_batchmem.devices.base import MemoryStats

GIB = 1 << 30
DEVICE = torch.device("cuda", 1)
STATS = {
    "allocated_bytes": {"all": {"current": 3 * GIB, "peak": 9 * GIB}, "large_pool": {}},
    "reserved_bytes": {"all": {"current": 4 * GIB, "peak": 12 * GIB}},
    "requested_bytes": {"all": {"current": 2 * GIB, "peak": 8 * GIB}},
    "num_ooms": 2,
    "num_alloc_retries": 5,
    "num_device_free": 3,
    "num_device_alloc": 77,
}


class Module:
    """Functions of ``torch.cuda`` for device 1, which has 80 GiB."""

    def __init__(self, **changes):
        self.stats = STATS
        self.free_bytes = 20 * GIB
        self.fraction = 1.0
        self.properties = SimpleNamespace(is_integrated=0)
        self.backend = "native"
        self.settings = {"expandable_segments": False}
        self.segments = []
        vars(self).update(changes)
        self.memory_snapshot = lambda: self.segments
        self.memory = SimpleNamespace(_snapshot=lambda: {"allocator_settings": self.settings})
        self.get_allocator_backend = lambda: self.backend
        self.get_per_process_memory_fraction = lambda device: self.fraction

    def is_initialized(self):
        return self.stats != {}

    def memory_stats_as_nested_dict(self, device):
        assert device == DEVICE.index
        return self.stats

    def mem_get_info(self, device):
        assert device == DEVICE.index
        return self.free_bytes, 80 * GIB

    def get_device_properties(self, device):
        assert device == DEVICE.index
        return self.properties

    def set_per_process_memory_fraction(self, fraction, device):
        assert device == DEVICE.index
        assert 0 <= fraction <= 1
        self.fraction = fraction


def memory(**changes):
    return AcceleratorMemory(DEVICE, Module(**changes))


def test_readings_are_the_counters_of_the_allocator():
    device_memory = memory()
    assert device_memory.peak() == MemoryStats(9 * GIB, 12 * GIB, 8 * GIB)
    assert device_memory.current() == MemoryStats(3 * GIB, 4 * GIB, 2 * GIB)
    assert device_memory.counters() == {"num_ooms": 2, "num_alloc_retries": 5, "num_device_free": 3}
    # An allocator that does not count requested bytes reports 0.
    uncounted = {**STATS, "requested_bytes": {"all": {"current": 0, "peak": 0}}}
    assert memory(stats=uncounted).peak() == MemoryStats(9 * GIB, 12 * GIB, None)


def test_before_the_device_starts_nothing_is_in_use_and_no_peak_is_reset():
    device_memory = memory(stats={}, reset_peak_memory_stats=lambda device: pytest.fail("reset"))
    device_memory.reset_peak()
    assert device_memory.peak() == MemoryStats(0, 0, 0)
    assert device_memory.counters() == {}
    assert device_memory.non_torch_bytes() is None


@pytest.mark.parametrize(
    ("changes", "budget_gib"),
    [
        ({}, 24),
        ({"fraction": 0.125}, 10),
        ({"fraction": 0.5}, 24),
        ({"properties": SimpleNamespace(is_integrated=1)}, 10),
    ],
)
def test_budget_is_free_and_reserved_memory_within_the_limits(monkeypatch, changes, budget_gib):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=6 * GIB))
    assert memory(**changes).available_bytes() == budget_gib * GIB


# With 20 GiB free, 60 GiB are in use; this process has reserved 4 of them.
@pytest.mark.parametrize(("free_gib", "other_gib"), [(20, 56), (76, 0), (77, None)])
def test_memory_outside_the_allocator(free_gib, other_gib):
    other_bytes = None if other_gib is None else other_gib * GIB
    assert memory(free_bytes=free_gib * GIB).non_torch_bytes() == other_bytes


@pytest.mark.parametrize(
    ("previous", "limit_gib", "fraction"), [(1.0, 20, 0.25), (0.5, 60, 0.5), (1.0, 200, 1.0)]
)
def test_the_limit_is_enforced_and_the_previous_one_restored(previous, limit_gib, fraction):
    module = Module(fraction=previous)
    fractions = []

    def fail_under_the_limit():
        with AcceleratorMemory(DEVICE, module).limit_enforced(limit_gib * GIB) as is_enforced:
            fractions.append(module.fraction if is_enforced else None)
            raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        fail_under_the_limit()
    assert fractions == [fraction]
    assert module.fraction == previous


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {"expandable_segments": False, "garbage_collection_threshold": 0.8}},
        {"settings": {}},
        {"backend": "cudaMallocAsync"},
    ],
)
def test_the_limit_is_not_enforced_where_it_would_be_wrong(changes):
    module = Module(**changes)
    with AcceleratorMemory(DEVICE, module).limit_enforced(8 * GIB) as is_enforced:
        assert not is_enforced
        assert module.fraction == 1.0


@pytest.mark.parametrize("is_expandable", [True, False])
def test_the_limit_is_enforced_on_expandable_segments(is_expandable):
    module = Module(settings={"expandable_segments": is_expandable})
    device_memory = AcceleratorMemory(DEVICE, module)
    with device_memory.limit_enforced(8 * GIB) as is_enforced:
        assert is_enforced
        assert module.fraction == 0.1
    assert device_memory.has_expandable_segments == is_expandable


def test_without_a_fraction_there_is_a_budget_and_no_limit():
    """It is so in torch 2.5.1."""
    module = Module()
    del module.get_per_process_memory_fraction
    device_memory = AcceleratorMemory(DEVICE, module)
    assert device_memory.available_bytes() == 24 * GIB
    with device_memory.limit_enforced(8 * GIB) as is_enforced:
        assert not is_enforced
        assert module.fraction == 1.0


@pytest.mark.parametrize(
    ("pools", "segments", "has_graphs"),
    [
        ({}, [], False),
        ({(0, 1): {"all": {"current": 0}}}, [], False),
        ({(0, 1): {"all": {"current": 1}}}, [], True),
        # Versions before torch 2.13 do not count pools.
        (None, [{"segment_pool_id": (0, 0)}], False),
        (None, [{"segment_pool_id": (0, 0)}, {"segment_pool_id": [0, 1]}], True),
    ],
)
def test_workspaces_of_cublas_are_freed_unless_a_graph_may_use_them(
    monkeypatch, pools, segments, has_graphs
):
    cleared = []
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: cleared.append(True), raising=False)
    counted = {} if pools is None else {"reserved_bytes_by_private_pools": pools}
    module = Module(stats=STATS | counted, segments=segments, empty_cache=lambda: None)
    device_memory = AcceleratorMemory(DEVICE, module)
    device_memory.release_cached()
    assert bool(cleared) is not has_graphs
    # Whether there are graphs is not known there.
    module.backend = "cudaMallocAsync"
    cleared.clear()
    device_memory.release_cached()
    assert not cleared


def test_utilization_is_that_of_the_driver_and_missing_where_it_cannot_be_read(monkeypatch):
    def fail(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 0)
    utilization = cuda_utilization(DEVICE)
    assert utilization() == 0
    monkeypatch.setattr(torch.cuda, "utilization", fail)
    with pytest.warns(UserWarning, match="GPU utilization cannot be read: .*nvidia-ml-py"):
        assert utilization() is None
    # One warning is enough for a run.
    assert cuda_utilization(DEVICE) is None


@pytest.mark.parametrize(
    ("device", "manager"), [("cuda:1", object()), ("cuda:1", None), ("cpu", 7)]
)
def test_graphs_are_those_of_the_device(monkeypatch, device, manager):
    asked = []

    def get_manager(index, create_if_none_exists):
        asked.append((index, create_if_none_exists))
        return manager

    trees = SimpleNamespace(get_manager=get_manager)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    is_cuda = device != "cpu"
    assert replays_graphs(torch.device(device)) is (is_cuda and manager is not None)
    assert asked == [(1, False)] * is_cuda


def test_without_torch_compile_there_are_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    assert not replays_graphs(torch.device("cuda:0"))
