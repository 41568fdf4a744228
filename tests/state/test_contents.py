from __future__ import annotations

import io
import mmap
import multiprocessing

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import Dataset

from lightning_batchmem._lightning.clean_start import ProjectSnapshot
from lightning_batchmem.state.contents import refill


class Data(Dataset):
    """Has one attribute, whatever a test wants."""


# What makes an object, what a step does with it, and what is compared.
OWN = {
    "a shared value": (
        lambda: multiprocessing.Value("i", 5),
        lambda v: setattr(v, "value", 7),
        lambda v: v.value,
    ),
    "a shared array": (
        lambda: multiprocessing.Array("d", [5, 6]),
        lambda v: v.__setitem__(0, 7),
        list,
    ),
    "a shared tensor": (
        lambda: torch.zeros(2).share_memory_(),
        lambda v: v.add_(1),
        torch.Tensor.tolist,
    ),
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


@pytest.mark.parametrize(
    ("make", "why"), [(lambda: mmap.mmap(-1, 8), "mmap"), (lambda: io.BytesIO(b"ab"), "BytesIO")]
)
def test_memory_that_is_not_an_object_of_python_is_named(make, why):
    module = LightningModule()
    module.owner = [make()]
    assert ProjectSnapshot(module).not_restorable == [f"LightningModule.owner[0] ({why})"]


def test_a_data_set_with_a_memory_map_is_restored_around_it_without_a_warning():
    module = LightningModule()
    module.owner = Data()
    module.owner.value = mmap.mmap(-1, 8)
    module.owner.reads = [0]
    kept = ProjectSnapshot(module)
    module.owner.reads[0] += 1
    kept.restore_or_warn()
    assert module.owner.reads == [0]
    assert kept.not_restorable == []


def test_the_members_of_a_set_are_restored_where_the_order_cannot_be():
    members = set(range(10))
    before = list(members)
    members.pop()
    members.add(11)
    refill(members, before)
    assert members == set(range(10))
