from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import random
import socket
import threading
import tracemalloc
import weakref
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, ClassVar
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, Dataset

from lightning_batchmem._lightning.clean_start import ProjectSnapshot
from lightning_batchmem.state import snapshot
from lightning_batchmem.state.contents import LARGEST_COPIED_BYTES, OF_DATA, OF_PROJECT
from lightning_batchmem.state.snapshot import Snapshot


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
        (
            Tracker([1], {"deep": [1]}),
            grow,
            lambda v: (list(v.values), str(v.inner), v.count, "extra" in vars(v)),
        ),
        (([1],), lambda v: v[0].append(2), lambda v: v[0][:]),
        (np.zeros(3), lambda v: v.__iadd__(1), np.ndarray.tolist),
        (
            np.array([[1], "text"], object),
            lambda v: v.__setitem__(1, None),
            list,
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
    kept = Snapshot([module])
    assert {id(saved.tensor) for saved in kept.attributes.tensors} == set(
        map(id, teacher.parameters())
    )
    module.value.clear()
    teacher.weight = nn.Parameter(torch.zeros(2, 2))
    kept.restore()
    assert module.other is module.value
    assert module.value[0] is teacher
    assert any(teacher.weight is saved.tensor for saved in kept.attributes.tensors)


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
    for container in (InClass.seen, Deep.history):
        container.append(2)
    module.count()
    module.cached()
    module.behind().extra = 1
    kept.restore_or_warn()
    assert (InClass.count, InClass.seen, Deep.history) == (1, [2], [1, 2])
    assert module.cached.cache_info().currsize == 1
    assert (vars(module.data), Deep.count.calls, module.count()) == ({}, 1, [1, 1])
    assert kept.not_restorable == []


class Run:
    def __init__(self):
        self.lock = threading.Lock()


class Hides:
    """Raises an error where its attributes are read."""

    @property
    def __dict__(self):
        raise RuntimeError("no")


HOLDS = "it holds a lock, a thread, a file or a socket"
# It is open as long as the tests run.
WRITTEN = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
TOO_LARGE = LARGEST_COPIED_BYTES + 4


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (iter([1]), "list_iterator"),
        (itertools.cycle([1]), "cycle"),
        ((i for i in [1]), "generator"),
        (WRITTEN, "TextIOWrapper"),
        (multiprocessing.get_context("spawn").Event(), HOLDS),
        (queue.Queue(), HOLDS),
        (threading.Thread(), "Thread"),
        (np.empty(TOO_LARGE, np.uint8), "an array of 67,108,868 bytes"),
        # The tensor has two elements, but the bytes of its whole storage count.
        (torch.empty(TOO_LARGE, dtype=torch.uint8)[:2], "a tensor of 67,108,868 bytes"),
        (Run(), HOLDS),
        (Hides(), "RuntimeError"),
        (random.SystemRandom(), "NotImplementedError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_object_that_is_not_restored_is_named_and_the_others_are_restored(value, why):
    module = Module({"refuses": value, "other": [1]})
    # A parameter of any size is restored.
    module.weight = nn.Parameter(torch.zeros(LARGEST_COPIED_BYTES // 4 + 1))
    kept = ProjectSnapshot(module)
    module.weight.data += 1
    module.value["other"].append(2)
    kept.restore_or_warn()
    assert kept.not_restorable == [f"Module.value['refuses'] ({why})"]
    assert module.value["other"] == [1]
    assert not module.weight.any()


def test_weights_and_structure_are_restored_when_the_walk_ends_early(monkeypatch):
    monkeypatch.setattr(snapshot, "OF_PROJECT", replace(OF_PROJECT, most_objects=100))
    module = Module(nn.Linear(2, 2))
    data = LightningDataModule()
    module.rows = [[index] for index in range(1000)]
    module.many = nn.ModuleList(nn.Identity() for _ in range(200))
    last = module.many[-1]
    data.rows = [[index] for index in range(1000)]
    weight = module.value.weight
    before = weight.detach().clone()
    kept = ProjectSnapshot(module, datamodules=[data])
    weight.data += 1
    module.value.weight = nn.Parameter(torch.zeros(2, 2))
    module.value.eval()
    module.late = 1
    last.register_buffer("late", torch.zeros(1))
    last.add_module("child", nn.Identity())
    kept.restore_or_warn()
    assert module.value.weight is weight
    assert not [*last.buffers(), *last.children()]
    assert torch.equal(weight, before)
    assert module.value.training
    assert not hasattr(module, "late")
    assert any("(more than 100)" in what for what in kept.not_restorable)


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


class Refuses:
    """Raises an error where its attribute is set to a smaller value."""

    __slots__ = ("count",)

    def __init__(self):
        object.__setattr__(self, "count", 1)

    def __setattr__(self, name, value):
        raise TypeError("no")


class Clears(list):
    """Does something else where it is filled."""

    def clear(self):
        raise TypeError("no")

    def extend(self, items):
        super().extend(2 * item for item in items)

    def __iter__(self):
        return iter([0])


def test_slots_of_an_object_that_refuses_to_be_changed_are_restored():
    module = Module(Refuses())
    kept = ProjectSnapshot(module)
    before = module.value.count
    object.__setattr__(module.value, "count", 2)
    kept.restore_or_warn()
    assert module.value.count == before


class Packing(OrderedDict):
    """A cache whose values are packed, and which keeps two of them."""

    def __setitem__(self, key, value):
        super().__setitem__(key, ("packed", value))
        while len(self) > 2:
            self.popitem(last=False)


def test_a_cache_is_restored_without_its_own_methods():
    module = Module(Packing(a=1))
    OrderedDict.update(module.value, b=2)
    contents = list(OrderedDict.items(module.value))
    kept = ProjectSnapshot(module)
    module.value["c"] = 3
    module.value.move_to_end("b", last=False)
    kept.restore_or_warn()
    assert list(OrderedDict.items(module.value)) == contents


class First:
    def __init__(self):
        self.n = 1


class Second(First):
    pass


def test_an_object_that_gets_another_class_has_its_own_again():
    module = Module(First())
    kept = ProjectSnapshot(module)
    module.value.m = 2
    module.value.__class__ = Second
    kept.restore_or_warn()
    assert type(module.value) is First
    assert vars(module.value) == {"n": 1}


def test_an_object_that_refuses_to_be_restored_is_a_warning():
    module = Module([np.ones(3), [1]])
    kept = ProjectSnapshot(module)
    module.value[0].dtype = np.int32
    module.value[1].append(2)
    text = r"could not restore: Module\.value\[0\] \(TypeError\)"
    with pytest.warns(UserWarning, match=text):
        kept.restore_or_warn()
    assert module.value[1] == [1]


class Counter:
    """Counts the calls of its method."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *_):
        self.calls += 1
        return [self.calls]


class Dice(random.Random):
    """A random generator that counts its throws."""

    throws = 0

    def throw(self):
        self.throws += 1
        return self.throws + self.random()


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: [1].append, lambda add: add(2) or list(add.__self__)),
        (lambda: random.Random(0).random, lambda draw: draw()),
        (lambda: partial(Counter()), lambda called: called()),
        (lambda: Dice(0), lambda dice: dice.throw()),
        (
            lambda: MappingProxyType({"rows": []}),
            lambda view: view["rows"].append(1) or [*view["rows"]],
        ),
    ],
    ids=[
        "a method of a list",
        "a method of a random generator",
        "the function of a partial",
        "a subclass of a generator",
        "a view of a dict",
    ],
)
def test_what_leads_to_an_object_in_another_way_than_an_attribute(make, use):
    expected = use(make())
    module = Module(make())
    kept = ProjectSnapshot(module)
    use(module.value)
    kept.restore_or_warn()
    assert use(module.value) == expected


def test_a_mock_is_not_asked_for_methods_that_it_would_make():
    module = Module(MagicMock())
    kept = ProjectSnapshot(module)
    module.value.push(1)
    kept.restore_or_warn()
    assert module.value.push.call_count == 0
    assert len(kept.attributes.walked) < 1_000


class SaysLinear(nn.Module):
    @property
    def __class__(self):
        return nn.Linear


def test_a_module_that_says_it_has_another_class():
    module = nn.Sequential(SaysLinear())
    taken = Snapshot([module])
    module[0].count = 1
    assert taken.restore() == []
    assert not hasattr(module[0], "count")


def test_a_container_is_filled_in_the_way_of_python_whatever_its_class_does():
    module = Module(Clears([1]))
    kept = ProjectSnapshot(module)
    list.append(module.value, 2)
    kept.restore_or_warn()
    assert list.__getitem__(module.value, slice(None)) == [1]


class Raises:
    """Raises an error where one special attribute or method of it is used."""

    def __init__(self):
        self.count = 0


def _refuse(*_):
    raise RuntimeError("no")


@pytest.mark.parametrize(
    "name",
    ["__class__", "__dict__", "__eq__", "__hash__", "__len__", "__bool__", "__getattribute__"],
)
def test_an_object_that_raises_is_at_most_a_name_in_the_warning(name):
    is_attribute = name in ("__class__", "__dict__")
    kind = type("Odd", (Raises,), {name: property(_refuse) if is_attribute else _refuse})
    module = Module([kind.__new__(kind), [1]])
    kept = ProjectSnapshot(module)
    module.value[1].append(2)
    kept.restore_or_warn()
    assert module.value[1] == [1]
    is_named = name in ("__class__", "__dict__", "__getattribute__")
    assert kept.not_restorable == ["Module.value[0] (RuntimeError)"] * is_named


class Node:
    """An entry of a linked list."""

    def __init__(self, following):
        self.following = following
        self.count = 0


def test_a_long_chain_takes_linear_memory_and_is_restored():
    taken = []
    for length in (1000, 4000):
        module = Module(None)
        for _ in range(length):
            module.value = Node(module.value)
        last = module.value
        while last.following:
            last = last.following
        tracemalloc.start()
        kept = ProjectSnapshot(module)
        taken.append(tracemalloc.get_traced_memory()[0] / length)
        tracemalloc.stop()
        last.count = 1
        kept.restore_or_warn()
        assert last.count == 0
    assert taken[1] < 1.2 * taken[0]


def test_a_long_path_is_shortened_in_a_message():
    module = Module(Hides())
    for _ in range(1000):
        module.value = Node(module.value)
    [text] = ProjectSnapshot(module).not_restorable
    assert text.startswith("Module.value.following.following")
    assert text.endswith(".following (RuntimeError)")
    assert len(text) < 300


def test_what_a_tensor_carries_is_restored():
    module = Module({"plain": torch.zeros(1)})
    module.register_buffer("table", torch.zeros(1))
    module.weight = nn.Parameter(torch.zeros(LARGEST_COPIED_BYTES // 4 + 1))
    tensors = [module.weight, module.table, module.value["plain"]]
    for tensor in tensors:
        tensor.history = []
    kept = ProjectSnapshot(module)
    for tensor in tensors:
        tensor.history.append(1)
        tensor.late = 1
    kept.restore_or_warn()
    assert [tensor.history for tensor in tensors] == [[], [], []]
    assert not any(hasattr(tensor, "late") for tensor in tensors)
    assert kept.not_restorable == []


def test_a_set_keeps_its_order_where_members_were_only_added():
    members = set(range(100))
    members -= {number for number in range(100) if number not in (1, 8, 20)}
    module = Module(members)
    before = list(members)
    kept = ProjectSnapshot(module)
    members.add(5)
    kept.restore_or_warn()
    assert list(members) == before


def test_a_fake_tensor_has_no_values_to_restore():
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.zeros(2, 3)
    module = Module([fake, [1]])
    kept = ProjectSnapshot(module)
    module.value[1].append(2)
    kept.restore_or_warn()
    assert module.value[1] == [1]
    assert kept.not_restorable == []


class Rows(Dataset):
    """Has much data, and state."""

    def __init__(self):
        self.rows = [[index] for index in range(OF_DATA.most_items + 1)]
        self.table = torch.zeros(LARGEST_COPIED_BYTES // 4)
        self.level = 0
        self.seen = set()
        self.generator = torch.Generator()
        self.lock = None

    def __len__(self):
        return len(self.rows)


def test_data_sets_and_loaders_are_restored_and_large_data_is_left_without_a_warning():
    data = Rows()
    loader = DataLoader(data, batch_size=4)
    held = DataLoader(Rows(), batch_size=4)
    module = Module(held)
    kept = ProjectSnapshot(module, [loader])
    for rows in (data, held.dataset):
        rows.level += 1
        rows.seen.add(1)
        rows.rows[0].append(1)
        torch.rand(1, generator=rows.generator)
    held.added = 1
    kept.restore_or_warn()
    for rows in (data, held.dataset):
        assert (rows.level, rows.seen, rows.rows[0]) == (0, set(), [0, 1])
        assert rows.generator.get_state().equal(torch.Generator().get_state())
    assert not hasattr(held, "added")
    assert kept.not_restorable == []


class Guarded(Dataset):
    """Has a lock, an iterator and an open file beside what a step changes."""

    def __init__(self, path):
        self.seen = [0]
        self.lock = threading.Lock()
        self.turns = itertools.cycle([1, 2])
        self.file = path.open("rb")
        self.own = self

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

    def change(self):
        self.seen[0] += 1
        self.level = 1
        with self.lock:
            return next(self.turns), self.file.read(1)


def test_data_are_restored_around_what_cannot_be_and_only_iterators_of_the_project_are_named(
    tmp_path,
):
    path = tmp_path / "rows"
    path.write_bytes(b"abc")
    data = Guarded(path)
    # Its own iterator has generators and locks. Python 3.14 would pickle the data and their lock.
    loader = DataLoader(
        data, persistent_workers=True, num_workers=1, multiprocessing_context="fork"
    )
    iter(loader)
    module = Module(data)
    kept = ProjectSnapshot(module, [loader])
    data.change()
    loader.sampler.own = data
    kept.restore_or_warn()
    assert (data.seen, data.file.tell(), hasattr(data, "level")) == ([0], 0, False)
    assert not hasattr(loader.sampler, "own")
    assert kept.not_restorable == ["Module.value.turns (cycle)"]
    data.file.close()
    del loader


@pytest.mark.parametrize(
    "part", [threading.Thread(), threading.Condition(), multiprocessing.Pipe()[0]]
)
def test_data_with_which_a_thread_works_stay_as_they_are_and_are_named(part):
    data = InClass()
    data.part = part
    data.rows = [1]
    kept = ProjectSnapshot(Module(data))
    data.rows.append(2)
    kept.restore_or_warn()
    assert data.rows == [1, 2]
    assert kept.not_restorable == [f"Module.value ({HOLDS})"]


@pytest.mark.parametrize(
    "part", [socket.socket(), multiprocessing.Semaphore(), multiprocessing.Lock()]
)
def test_data_are_restored_around_what_other_processes_use(part):
    data = InClass()
    data.part = part
    data.rows = [1]
    kept = ProjectSnapshot(Module(data))
    data.rows.append(2)
    kept.restore_or_warn()
    assert data.rows == [1]
    assert kept.not_restorable == []


def test_a_datamodule_with_a_lock_is_restored():
    data = LightningDataModule()
    data.lock = threading.Lock()
    data.rows = [1]
    kept = ProjectSnapshot(Module(None), datamodules=[data])
    data.rows.append(2)
    kept.restore_or_warn()
    assert data.rows == [1]
    assert kept.not_restorable == []


def test_parts_of_a_parameter_are_restored_and_need_no_room_of_their_own():
    module = Module(None)
    module.weight = nn.Parameter(torch.ones(LARGEST_COPIED_BYTES // 4 + 2))
    # FSDP1 with use_orig_params=False leaves such parts of a flat parameter in the modules.
    module.value = list(module.weight.split(len(module.weight) // 2))
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="is a view and its base"):
        _ = module.value[0].is_leaf
    kept = ProjectSnapshot(module)
    with torch.no_grad():
        module.weight.add_(1)
    kept.restore_or_warn()
    assert kept.not_restorable == []
    assert [float(part.detach().max()) for part in module.value] == [2, 2]


def test_annotations_are_no_objects_of_the_project():
    module = Module({"annotation": dict[str, int], "either": int | None, "other": [1]})
    kept = ProjectSnapshot(module)
    module.value["other"].append(2)
    kept.restore_or_warn()
    assert (module.value["other"], kept.not_restorable) == ([1], [])
