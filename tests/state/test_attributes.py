from __future__ import annotations

import io
import itertools
import random
import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import Dataset

from lightning_batchmem._lightning.clean_start import ProjectSnapshot
from lightning_batchmem.state.attributes import LARGEST_ARRAY_BYTES, AttributeState


@dataclass
class Tracker:
    """An object of the user's, with objects inside."""

    values: list[Any] = field(default_factory=list)
    inner: dict[str, Any] = field(default_factory=dict)
    count: int = 0

    def append_two(self):
        self.values.append(2)

    # An iterator of a class of the user's is restored as any other object is.
    def __next__(self):
        self.count += 1
        return self.count


@dataclass(eq=False)
class Hashable:
    values: list[int]


@dataclass(slots=True)
class Slotted:
    values: list[int]


class Unset:
    """Has a slot without a value."""

    __slots__ = ("count",)


@dataclass(frozen=True, slots=True)
class FrozenCache:
    """Has a slot that a method fills later."""

    cached: int = field(init=False)

    def fill(self):
        object.__setattr__(self, "cached", 1)


class Module(LightningModule):
    """Has one attribute, whatever a test wants."""

    def __init__(self, value):
        super().__init__()
        self.value = value


def append(value):
    value.append(1)


def fill(value):
    value["new"] = 1
    value.pop("old")


def grow(value):
    value.values.append(2)
    value.inner["deep"].append(3)
    value.count += 1
    value.extra = 1


@pytest.mark.parametrize(
    ("value", "disturb", "look"),
    [
        ([1, 2], append, list),
        ({"old": 1, "other": 2}, fill, lambda v: list(v.items())),
        (defaultdict(int, old=1), fill, dict),
        ({1, 2}, lambda v: v.add(3), set),
        (
            {Hashable([1])},
            lambda v: next(iter(v)).values.append(2),
            lambda v: [list(item.values) for item in v],
        ),
        (bytearray(b"ab"), lambda v: v.append(3), bytes),
        (
            Tracker([1], {"deep": [1]}),
            grow,
            lambda v: (list(v.values), str(v.inner), v.count, "extra" in vars(v)),
        ),
        (([1],), lambda v: v[0].append(2), lambda v: v[0][:]),
        (np.zeros(3), lambda v: v.__iadd__(1), np.ndarray.tolist),
        (
            np.array([[1], "text"], object),
            lambda v: v.__setitem__(1, v[0].append(2)),
            lambda v: [list(v[0]), v[1]],
        ),
        (random.Random(0), random.Random.random, random.Random.getstate),
        (
            np.random.RandomState(0),
            lambda v: v.rand(),
            lambda v: [*v.get_state()[1].tolist(), v.get_state()[2]],
        ),
        (
            Slotted([1]),
            lambda v: setattr(v, "values", v.values.append(2)),
            lambda v: list(v.values or []),
        ),
        (FrozenCache(), lambda v: v.fill(), lambda v: getattr(v, "cached", None)),
        (Unset(), lambda v: setattr(v, "count", 1), lambda v: getattr(v, "count", None)),
        (Tracker([1], {"deep": [1]}).append_two, lambda v: v(), lambda v: list(v.__self__.values)),
        (Tracker(), next, lambda v: v.count),
        (partial(append, []), lambda v: v(), lambda v: list(v.args[0])),
        (np.random.default_rng(0), lambda v: v.random(), lambda v: v.bit_generator.state),
        (np.random.PCG64(0), lambda v: v.random_raw(), lambda v: v.state),
        (torch.Generator(), lambda v: torch.rand(1, generator=v), lambda v: v.get_state().tolist()),
        (torch.eye(3).to_sparse(), lambda v: v.values().add_(1), lambda v: v.to_dense().tolist()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_contents_are_restored_in_the_same_object(value, disturb, look):
    module = Module(value)
    before = look(value)
    kept = ProjectSnapshot(module)
    disturb(module.value)
    assert look(value) != before
    kept.restore_or_warn()
    assert module.value is value
    assert look(value) == before


def test_unregistered_and_shared_objects_are_met_once():
    teacher = nn.Linear(2, 2)
    module = Module([teacher, {"again": teacher}])
    # Both attributes refer to one list.
    module.other = module.value
    # The list contains itself.
    module.value.append(module.value)
    kept = AttributeState([module])
    assert set(map(id, kept.tensors)) == set(map(id, teacher.parameters()))
    module.value.clear()
    teacher.weight = nn.Parameter(torch.zeros(2, 2))
    kept.restore()
    assert module.other is module.value
    assert module.value[0] is teacher
    assert any(teacher.weight is tensor for tensor in kept.tensors)


class InClass(Dataset):
    count = 0
    seen: ClassVar = []


class Deep(LightningModule):
    history: ClassVar = [1]

    def __init__(self):
        super().__init__()
        self.data = InClass()
        self.view = MappingProxyType({"rows": []})
        self.cached = lru_cache(lambda: [1])
        self.behind = weakref.ref(self.data)

    def count(self, into=[]):  # noqa: B006
        into.append(1)
        Deep.count.calls = len(into)
        return into


def test_what_is_no_attribute_of_an_instance_is_neither_restored_nor_named():
    module = Deep()
    kept = ProjectSnapshot(module)
    InClass.count += 1
    for container in (InClass.seen, Deep.history, module.view["rows"]):
        container.append(2)
    module.count()
    module.cached()
    module.behind().extra = 1
    kept.restore_or_warn()
    assert (InClass.count, InClass.seen, Deep.history) == (1, [2], [1, 2])
    assert (module.view["rows"], module.cached.cache_info().currsize) == ([2], 1)
    assert (module.data.extra, Deep.count.calls, module.count()) == (1, 1, [1, 1])
    assert kept.attributes.not_restorable == []


class Run:
    def __init__(self):
        self.lock = threading.Lock()


class Hides:
    """Raises an error where its attributes are read."""

    @property
    def __dict__(self):
        raise RuntimeError("no")


TOO_LARGE = LARGEST_ARRAY_BYTES + 4


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (iter([1]), "an iterator, list_iterator"),
        (itertools.cycle([1]), "an iterator, cycle"),
        ((i for i in [1]), "an iterator, generator"),
        (io.StringIO(), "an iterator, StringIO"),
        (np.empty(TOO_LARGE, np.uint8), "an array of 67,108,868 bytes"),
        # The tensor has two elements, but the bytes of its whole storage count.
        (torch.empty(TOO_LARGE, dtype=torch.uint8)[:2], "a tensor of 67,108,868 bytes"),
        (Run(), "it holds a lock, a thread, a file or a socket"),
        (Hides(), "RuntimeError"),
        (random.SystemRandom(), "NotImplementedError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_object_that_is_not_restored_is_named_and_the_others_are_restored(value, why):
    module = Module({"refuses": value, "other": [1]})
    # A parameter of any size is restored.
    module.weight = nn.Parameter(torch.zeros(LARGEST_ARRAY_BYTES // 4 + 1))
    kept = ProjectSnapshot(module)
    module.weight.data += 1
    module.value["other"].append(2)
    kept.restore_or_warn()
    assert kept.attributes.not_restorable == [f"Module.value['refuses'] ({why})"]
    assert module.value["other"] == [1]
    assert not module.weight.any()


def test_weights_and_structure_are_restored_when_the_walk_ends_early(monkeypatch):
    monkeypatch.setattr("lightning_batchmem.state.attributes.MOST_OBJECTS", 100)
    module = Module(nn.Linear(2, 2))
    data = LightningDataModule()
    module.rows = [[index] for index in range(1000)]
    data.rows = [[index] for index in range(1000)]
    weight = module.value.weight
    before = weight.detach().clone()
    kept = ProjectSnapshot(module, datamodules=[data])
    weight.data += 1
    module.value.weight = nn.Parameter(torch.zeros(2, 2))
    module.value.eval()
    module.late = 1
    kept.restore_or_warn()
    assert module.value.weight is weight
    assert torch.equal(weight, before)
    assert module.value.training
    assert not hasattr(module, "late")
    assert any("(more than 100)" in what for what in kept.attributes.not_restorable)


def test_a_buffer_written_with_its_graph_is_restored():
    module = Module(nn.Linear(1, 1))
    module.register_buffer("last", torch.zeros(1))
    kept = ProjectSnapshot(module)
    module.last.copy_(module.value(torch.ones(1)))
    assert module.last.grad_fn is not None
    kept.restore_or_warn()
    assert module.last.grad_fn is None
    assert not module.last.requires_grad
    assert module.last.item() == 0


class Refuses(list):
    """Raises an error where it is cleared."""

    def clear(self):
        raise TypeError("no")


def test_an_object_that_refuses_to_be_restored_is_a_warning():
    module = Module([Refuses([1]), [1]])
    kept = ProjectSnapshot(module)
    for value in module.value:
        value.append(2)
    with pytest.warns(UserWarning, match=r"could not restore: Module\.value\[0\] \(TypeError\)"):
        kept.restore_or_warn()
    assert module.value[1] == [1]
