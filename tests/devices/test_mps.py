"""Memory on MPS, with torch's functions replaced: no machine here has the device."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from lightning_batchmem import BatchFinder
from lightning_batchmem.devices.mps import MpsMemory
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.state.recorded_objects import RecordedObjects
from tests.helpers.fake_device import FakeDevice
from tests.helpers.fake_mps import FakeMps
from tests.helpers.lawful import MIB, Lawful, law

GIB = 2**30


@pytest.fixture
def available(monkeypatch):
    """Sets the bytes of the machine that are not in use."""

    def set_available(size_bytes):
        memory = SimpleNamespace(available=size_bytes)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    return set_available


@pytest.fixture
def mps():
    device = FakeDevice(budget_bytes=64 * GIB, base_bytes=GIB)
    device.reserved_ratio = 2
    return FakeMps(device)


def test_readings(mps):
    memory = MpsMemory(mps, mps)
    assert memory.can_reset_peak
    mps.device.use(3 * GIB)
    mps.device.free()
    assert memory.peak() == (4 * GIB, 8 * GIB, None)
    assert memory.current() == (GIB, 2 * GIB, None)
    assert memory.private_bytes() == GIB
    memory.reset_peak()
    assert memory.peak() == memory.current()
    memory.release_cached()
    memory.synchronize()
    assert (mps.device.num_releases, mps.waits) == (1, 1)
    assert (memory.counters(), memory.evictable_bytes()) == ({}, 0)
    with memory.limit_enforced(GIB) as is_enforced:
        assert not is_enforced


def test_nothing_is_held_before_the_device_starts(mps):
    mps.has_started = False
    memory = MpsMemory(mps, mps)
    assert memory.can_reset_peak
    assert memory.peak() == memory.current() == (0, 0, None)


def test_the_budget_is_what_metal_recommends_or_what_the_machine_has(mps, available):
    memory = MpsMemory(mps, mps)
    mps.recommended_bytes = 12 * GIB
    mps.metal_bytes = GIB
    available(100 * GIB)
    assert memory.budget_bytes() == 11 * GIB
    assert (memory.total_bytes(), memory.non_torch_bytes()) == (12 * GIB, GIB)
    available(3 * GIB)
    assert memory.budget_bytes() == 2 * GIB + 3 * GIB


def no_allocator():
    raise RuntimeError("Allocator for mps is not a DeviceAllocator.")


def test_a_torch_that_counts_no_peaks(mps, monkeypatch):
    assert not MpsMemory(SimpleNamespace(), mps).can_reset_peak
    accelerator = SimpleNamespace(
        memory_stats=dict,
        reset_peak_memory_stats=no_allocator,
        current_accelerator=mps.current_accelerator,
    )
    assert not MpsMemory(accelerator, mps).can_reset_peak
    # A build for CUDA has the counters of CUDA.
    monkeypatch.setattr(mps, "current_accelerator", lambda: torch.device("cuda"))
    assert not MpsMemory(mps, mps).can_reset_peak
    # torch 2.5.1 has no such module.
    monkeypatch.delattr(torch, "accelerator", raising=False)
    assert not MpsMemory(mps=mps).can_reset_peak


def test_a_search_stays_below_the_limit_in_every_step(fit, device, mps, available):
    budget_bytes = 500 * MIB
    mps.device = device
    device.reserved_ratio = 1.25
    # The machine would swap, and no step would fail.
    device.budget = 10**6 * MIB
    available(budget_bytes)
    used = []

    def noted_law(size):
        used.append(law(size))
        return law(size)

    module = Lawful(device, noted_law)
    finder = BatchFinder(multiple_of=1, min_steps_per_epoch=None)
    fit(module, finder, MpsMemory(mps, mps))
    plan = finder.plan
    limit_bytes = int(SearchPolicy.limit_share * budget_bytes)
    assert plan.limit_bytes == limit_bytes
    assert max(used) * device.reserved_ratio <= limit_bytes
    assert plan.verified
    assert law(plan.batch_size) * device.reserved_ratio > 0.8 * limit_bytes


def test_the_random_state_is_restored(monkeypatch):
    state = [1]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: list(state))
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda saved: state.__setitem__(0, saved[0]))
    recorded = RecordedObjects([])
    state[0] = 2
    assert recorded.write_back() == []
    assert state == [1]
