from __future__ import annotations

import ctypes
import io
import mmap
import multiprocessing
from array import array
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, Dataset

from lightning_batchmem._lightning.clean_start import ProjectSnapshot


class Point(ctypes.Structure):
    # A name is not a kind of value, although P stands for a pointer.
    _fields_ = (("P", ctypes.c_int), ("x", ctypes.c_double * 2))


class Data(Dataset):
    """Has one attribute, whatever a test wants."""


def shared_block():
    block = SharedMemory(create=True, size=8)
    block.unlink()
    return block


def first(value):
    value[0] = 7


def push(value):
    value.append(7)


# What makes an object, what a step does with it, and what is compared.
OWN = {
    "a shared value": (
        lambda: multiprocessing.Value("i", 5),
        lambda v: setattr(v, "value", 7),
        lambda v: v.value,
    ),
    "a shared array": (lambda: multiprocessing.Array("i", [5, 6]), first, list),
    "a shared array without a lock": (lambda: multiprocessing.RawArray("d", 2), first, list),
    "a shared structure": (
        lambda: multiprocessing.Value(Point, 1, (2, 3)),
        lambda v: setattr(v, "P", 7),
        lambda v: v.P,
    ),
    "shared memory": (shared_block, lambda v: first(v.buf), lambda v: bytes(v.buf)),
    "a shared tensor": (lambda: torch.zeros(2).share_memory_(), first, torch.Tensor.tolist),
    "a memory map": (lambda: mmap.mmap(-1, 8), first, lambda v: v[:]),
    "a view": (lambda: memoryview(bytearray(b"ab")), first, bytes),
    "an array": (lambda: array("i", [5, 6]), push, list),
    "an empty bytearray": (bytearray, push, bytes),
    "bytes like a file": (
        lambda: io.BytesIO(b"ab"),
        lambda v: v.write(b"xyz"),
        lambda v: v.getvalue(),
    ),
    "text like a file": (lambda: io.StringIO("ab"), lambda v: v.read(1), lambda v: v.tell()),
    # The test closes it.
    "a file": (lambda: open(__file__, "rb"), lambda v: v.read(9), lambda v: v.tell()),  # noqa: SIM115
}


@pytest.mark.parametrize("is_data", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_what_is_outside_of_attributes_is_restored(name, is_data):
    make, change, look = OWN[name]
    module = LightningModule()
    value = make()
    module.owner = Data() if is_data else [value]
    if is_data:
        module.owner.value = value
    before = look(value)
    kept = ProjectSnapshot(module)
    change(value)
    assert look(value) != before
    kept.restore_or_warn()
    assert look(value) == before
    assert kept.not_restorable == []
    if hasattr(value, "close"):
        value.close()


def test_a_shared_value_of_others_is_not_written():
    """All shared values of a process are in one block of memory."""
    mine, other = multiprocessing.Value("i", 1), multiprocessing.Value("i", 2)
    module = LightningModule()
    module.value = mine
    kept = ProjectSnapshot(module)
    mine.value = other.value = 7
    kept.restore_or_warn()
    assert (mine.value, other.value) == (1, 7)


def test_a_pointer_is_neither_restored_nor_named():
    module = LightningModule()
    module.value = ctypes.py_object([1])
    kept = ProjectSnapshot(module)
    module.value.value = [2]
    kept.restore_or_warn()
    assert module.value.value == [2]
    assert kept.not_restorable == []


def test_memory_that_a_step_has_closed_is_a_warning():
    module = LightningModule()
    module.value = mmap.mmap(-1, 8)
    kept = ProjectSnapshot(module)
    module.value.close()
    with pytest.warns(UserWarning, match=r"could not restore: .*\.value \(its size\)"):
        kept.restore_or_warn()


def test_much_memory_is_named_where_it_is_not_data():
    module = LightningModule()
    module.value = bytearray(64 * 2**20 + 1)
    data = Data()
    data.value = mmap.mmap(-1, 64 * 2**20 + 1)
    kept = ProjectSnapshot(module, [DataLoader(data)])
    assert kept.not_restorable == ["LightningModule.value (memory of 67,108,865 bytes)"]
