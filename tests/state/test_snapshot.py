"""State of a program without Lightning: recorded, and written back in place."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_batchmem.state.contents import LARGEST_COPIED_BYTES
from lightning_batchmem.state.saved_storages import SavedStorages
from lightning_batchmem.state.snapshot import Snapshot, freeze, restored_parts


def test_large_tensors_of_optimizers_and_named_objects_are_restored():
    count = LARGEST_COPIED_BYTES // 4 + 1
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[layer.weight]["buffer"] = torch.zeros(count)
    average = {"weights": torch.zeros(count)}
    snapshot = Snapshot([layer], [optimizer], {"state[0]": average})
    assert snapshot.not_restorable == []
    tensors = optimizer.state[layer.weight]["buffer"], average["weights"]
    for tensor in tensors:
        tensor[-1] = 1
    average["weights"] = None
    assert snapshot.restore() == []
    assert average["weights"] is tensors[1]
    assert [tensor[-1] for tensor in tensors] == [0, 0]


def test_a_gradient_is_restored_again_after_a_step_changed_it():
    layer = nn.Linear(1, 1)
    layer.weight.grad = torch.ones(1, 1)
    snapshot = Snapshot([layer])
    for _ in range(2):
        layer.weight.grad.fill_(5)
        layer.bias.grad = torch.ones(1)
        snapshot.restore()
        assert (layer.weight.grad, layer.bias.grad) == (torch.ones(1, 1), None)


def test_an_interrupt_ends_no_restoring(monkeypatch):
    layer = nn.Linear(1, 1)
    layer.steps = [0]
    before = [parameter.clone() for parameter in layer.parameters()]
    snapshot = Snapshot([layer])
    layer.steps.append(1)
    nn.init.constant_(layer.weight, 5)
    write_back = SavedStorages.write_back

    def interrupted(storages):
        monkeypatch.setattr(SavedStorages, "write_back", write_back)
        raise KeyboardInterrupt

    monkeypatch.setattr(SavedStorages, "write_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        snapshot.restore()
    assert [parameter.clone() for parameter in layer.parameters()] == before
    assert layer.steps == [0]


def test_random_numbers_begin_again():
    def numbers():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    snapshot = Snapshot([])
    before = numbers()
    snapshot.restore()
    assert numbers() == before


def test_named_objects_that_are_not_walked_are_in_the_message():
    class Trainer:
        count = 0

    trainer = Trainer()
    snapshot = Snapshot([], [], {"state[0]": trainer}, [trainer])
    assert snapshot.not_restorable == ["state[0] (Trainer)"]


def test_a_frozen_scheduler_steps_again_afterwards():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=2)
    snapshot = Snapshot([], [optimizer], {"state[0]": scheduler})
    freeze(snapshot.attributes.schedulers)
    for _ in range(5):
        scheduler.step()
    assert scheduler.last_epoch == 0
    snapshot.restore()
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_a_long_list_of_a_part_is_restored_and_its_items_are_left_alone():
    part = SimpleNamespace(rows=[[0] for _ in range(10_001)], few=[[0]])
    rows = list(part.rows)
    with restored_parts([("part", part)]) as restored:
        part.rows[5].append(1)
        part.rows.reverse()
        part.few[0].append(1)
        part.few.append(2)
        part.new = 1
    assert restored.not_restorable == []
    assert all(one is other for one, other in zip(part.rows, rows, strict=True))
    assert (part.rows[5], part.few, hasattr(part, "new")) == ([0, 1], [[0]], False)


def test_parts_are_restored_after_an_interrupt(monkeypatch):
    part = [1]
    restored = restored_parts([("part", part)])
    write_back = SavedStorages.write_back
    calls = []

    def interrupted(storages):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        write_back(storages)

    monkeypatch.setattr(SavedStorages, "write_back", interrupted)
    with pytest.raises(KeyboardInterrupt), restored:
        part.append(2)
    assert (part, len(calls)) == ([1], 2)
