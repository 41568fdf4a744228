from __future__ import annotations

import random
import threading
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from lightning_batchmem._lightning.attributes import LARGEST_ARRAY_BYTES, KeptAttributes


@dataclass
class Tracker:
    """An object of the user's, with objects inside."""

    values: list[Any] = field(default_factory=list)
    inner: dict[str, Any] = field(default_factory=dict)
    count: int = 0


class Module(LightningModule):
    """Has one attribute, whatever a test wants."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def append(value: Any) -> None:
    value.append(1)


def fill(value: Any) -> None:
    value["new"] = 1
    value.pop("old")


def grow(value: Any) -> None:
    value.values.append(2)
    value.inner["deep"].append(3)
    value.count += 1
    value.extra = 1


@pytest.mark.parametrize(
    ("value", "disturb", "look"),
    [
        ([1, 2], append, list),
        (deque([1, 2], maxlen=2), append, list),
        ({"old": 1, "other": 2}, fill, lambda v: list(v.items())),
        (OrderedDict(old=1, other=2), fill, lambda v: list(v.items())),
        (defaultdict(int, old=1), fill, dict),
        ({1, 2}, lambda v: v.add(3), set),
        (
            Tracker([1], {"deep": [1]}),
            grow,
            lambda v: (list(v.values), v.inner["deep"][:], v.count, "extra" in vars(v)),
        ),
        (([1],), lambda v: v[0].append(2), lambda v: v[0][:]),
        (np.zeros(3), lambda v: v.__iadd__(1), np.ndarray.tolist),
        (random.Random(0), random.Random.random, random.Random.getstate),
        (np.random.default_rng(0), lambda v: v.random(), lambda v: v.bit_generator.state),
        (torch.Generator(), lambda v: torch.rand(1, generator=v), lambda v: v.get_state().tolist()),
        (torch.eye(3).to_sparse(), lambda v: v.values().add_(1), lambda v: v.to_dense().tolist()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_contents_come_back_and_the_object_stays_itself(value: Any, disturb: Any, look: Any) -> None:
    module = Module(value)
    before = look(value)
    kept = KeptAttributes([module])
    disturb(module.value)
    assert look(value) != before
    kept.put_back()
    assert module.value is value
    assert look(value) == before


def test_what_is_unregistered_or_shared_is_met_once() -> None:
    teacher = nn.Linear(2, 2)
    module = Module([teacher, {"again": teacher}])
    module.other = module.value  # the same list
    module.value.append(module.value)  # and a circle
    kept = KeptAttributes([module])
    assert {id(tensor) for tensor in kept.tensors} == {id(tensor) for tensor in teacher.parameters()}
    module.value.clear()
    teacher.weight = nn.Parameter(torch.zeros(2, 2))
    kept.put_back()
    assert module.other is module.value
    assert module.value[0] is teacher
    assert any(teacher.weight is tensor for tensor in kept.tensors)


def test_a_data_module_is_kept_too() -> None:
    data = LightningDataModule()
    kept = KeptAttributes([Module(1), data])
    data.cache = [1]
    kept.put_back()
    assert not hasattr(data, "cache")


def test_what_is_not_put_back_is_named() -> None:
    class Run:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.step = 0

    large = torch.empty(LARGEST_ARRAY_BYTES + 4, dtype=torch.uint8)
    module = Module({"large": large, "array": np.empty(LARGEST_ARRAY_BYTES + 4, np.uint8), "run": Run()})
    kept = KeptAttributes([module])
    module.value["run"].step = 5
    kept.put_back()
    assert module.value["run"].step == 5
    assert sorted(kept.passed_over) == [
        "Module.value['array'] (an array of 67,108,868 bytes)",
        "Module.value['large'] (a tensor of 67,108,868 bytes)",
        "Module.value['run'] (it holds a lock, a thread, a file or a socket)",
    ]
    assert not kept.tensors


def test_a_large_parameter_is_kept_all_the_same() -> None:
    module = Module(1)
    module.weight = nn.Parameter(torch.empty(LARGEST_ARRAY_BYTES // 4 + 1))
    assert len(KeptAttributes([module]).tensors) == 1
