"""Copies of collate functions that are methods."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_batchmem.batches.collate import copied_collate, is_large


class Texts(Dataset):
    def __init__(self):
        self.texts = [[index] for index in range(20_000)]
        self.base = Dataset()
        self.network = nn.Linear(1, 1)
        self.table = torch.zeros(2**24 + 1)
        self.shapes = (torch.zeros(2), self.table)
        self.order = torch.Generator()
        self.calls = []

    def collate(self, samples):
        self.calls.append(len(samples))
        self.texts.append([0])
        torch.rand(1, generator=self.order)
        return samples


def test_the_state_of_the_object_is_copied_but_not_its_data():
    texts = Texts()
    copied = copied_collate(texts.collate, [])
    copied([1])
    owner = copied.__self__
    assert type(owner) is Texts
    assert (owner.calls, texts.calls) == ([1], [])
    assert not torch.equal(owner.order.get_state(), texts.order.get_state())
    assert (len(owner.texts), len(texts.texts)) == (20_001, 20_000)
    for name in ("base", "network", "table", "shapes"):
        assert getattr(owner, name) is getattr(texts, name)
    assert owner.texts[5] is texts.texts[5]


def test_an_object_whose_state_is_restored_is_not_copied():
    texts = Texts()
    assert copied_collate(texts.collate, [texts]).__self__ is texts
    network = nn.Identity()
    assert copied_collate(network.forward, []).__self__ is network


class Counts:
    calls = 0

    @classmethod
    def of_class(cls, samples):
        return samples

    def collate(self, samples):
        self.calls += 1
        return samples


def test_objects_of_other_kinds(recwarn):
    assert copied_collate(Counts.of_class, []) == Counts.of_class
    counts = Counts()
    copied_collate(counts.collate, [])([1])
    assert counts.calls == 0
    assert not recwarn


def test_an_attribute_that_cannot_be_copied_is_a_warning():
    counts = Counts()
    counts.calls = 0
    counts.lock = threading.Lock()
    with pytest.warns(UserWarning, match="The 'lock' of the object of collate_fn cannot be copied"):
        copied = copied_collate(counts.collate, [])
    copied([1])
    assert (counts.calls, copied.__self__.calls) == (0, 1)
    assert copied.__self__.lock is counts.lock


def test_bytes_may_be_an_integer_of_numpy():
    assert is_large(SimpleNamespace(nbytes=np.int64(2**40)))
    assert not is_large(SimpleNamespace(nbytes=np.int64(1)))
