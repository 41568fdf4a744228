import gc
import weakref
from functools import partial

import pytest
import torch

from lightning_batchmem.devices.base import Garbage
from lightning_batchmem.devices.host import HostMemory

MIB = 1 << 20


class Knot:
    """An object that leads to itself, so that only a collection frees it."""

    def __init__(self, size_bytes):
        self.knot = self
        self.tensor = torch.ones(size_bytes, dtype=torch.uint8)


@pytest.fixture
def generations():
    """The generations that were collected, one after another."""
    collected = []

    def note(phase, info):
        if phase == "start":
            collected.append(info["generation"])

    gc.callbacks.append(note)
    yield collected
    gc.callbacks.remove(note)


def old_knot(size_bytes):
    """A weak reference to garbage that no collection of young objects finds."""
    knot = Knot(size_bytes)
    gc.collect()
    return weakref.ref(knot)


def test_old_garbage_is_collected_if_it_holds_memory():
    device_memory = HostMemory()
    device_memory.release_cached()
    held_bytes = device_memory.current().allocated_bytes
    knot = old_knot(64 * MIB)
    assert device_memory.current().allocated_bytes > held_bytes + 32 * MIB
    device_memory.release_cached()
    assert knot() is None
    assert device_memory.current().allocated_bytes < held_bytes + 32 * MIB


def test_young_garbage_is_collected_although_nothing_is_held():
    garbage = Garbage(noise_bytes=0)
    garbage.collect(lambda: 10)
    knot = weakref.ref(Knot(1))
    garbage.collect(lambda: 10)
    assert knot() is None


def test_all_objects_are_looked_through_only_where_more_is_in_use(generations):
    garbage = Garbage(noise_bytes=2)

    def generations_at(*values):
        generations.clear()
        for value in values:
            garbage.collect(partial(int, value))
        return generations.copy()

    # Nobody knows what an earlier training has left.
    assert generations_at(10) == [1, 2]
    assert generations_at(12, 9) == [1, 1]
    # It is compared with the least, so that garbage cannot add up.
    assert generations_at(12) == [1, 2]
    # What stays after a full collection is no garbage.
    assert generations_at(14, 12) == [1, 1]
