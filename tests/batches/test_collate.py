"""Copies of collate functions that are methods."""

import functools
import threading
import warnings
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
    copied = copied_collate(texts.collate, {})
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
    assert copied_collate(texts.collate, by_id(texts)).__self__ is texts
    network = nn.Identity()
    assert copied_collate(network.forward, {}).__self__ is network


def by_id(*values):
    return {id(value): value for value in values}


def test_the_method_of_an_object_in_a_partial(recwarn):
    """As pyannote's tasks have it: the object leads to the module, which is restored."""
    counts = Counts()
    counts.lock = threading.Lock()
    given = functools.partial(counts.collate, flags=["train"])
    shared = copied_collate(given, by_id(counts))
    assert shared.func.__self__ is counts
    copied = copied_collate(given, {})
    copied([1])
    assert counts.calls == 0
    assert copied.collate.func.__self__.calls == 1
    assert copied.collate.keywords["flags"] is not given.keywords["flags"]
    assert not recwarn


def test_parts_of_an_object_that_are_restored_are_not_copied():
    class Holder:
        def __init__(self):
            self.module_state = [1]
            self.own_state = [1]

        def collate(self, samples):
            return samples

    holder = Holder()
    owner = copied_collate(holder.collate, by_id(holder.module_state)).__self__
    assert owner.module_state is holder.module_state
    assert owner.own_state is not holder.own_state


class Counts:
    calls = 0

    @classmethod
    def of_class(cls, samples):
        return samples

    def collate(self, samples, flags=()):
        self.calls += 1
        return samples


def test_objects_of_other_kinds(recwarn):
    assert copied_collate(Counts.of_class, {}) == Counts.of_class
    counts = Counts()
    copied_collate(counts.collate, {})([1])
    assert counts.calls == 0
    assert not recwarn


def test_an_attribute_that_cannot_be_copied_is_shared(recwarn):
    counts = Counts()
    counts.calls = 0
    counts.lock = threading.Lock()
    copied = copied_collate(counts.collate, {})
    copied([1])
    assert (counts.calls, copied.collate.__self__.calls) == (0, 1)
    assert copied.collate.__self__.lock is counts.lock
    assert not recwarn


class Client:
    """Cannot be copied, because it has a lock."""

    def __init__(self):
        self.lock = threading.Lock()
        self.requests = 0


class Asks:
    def __init__(self, client):
        self.client = client

    def collate(self, samples):
        if isinstance(self.client, Client):
            self.client.requests += 1
        else:
            self.client.append(threading.Lock())
        return samples


@pytest.mark.parametrize("client", [Client(), [threading.Lock()]])
def test_a_shared_part_that_changes_is_one_warning(client):
    copied = copied_collate(Asks(client).collate, {})
    message = "The 'client' of the object of collate_fn cannot be copied. Changes"
    with pytest.warns(UserWarning, match=message):
        copied([1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied([1])


def test_an_iterator_that_cannot_be_copied_is_a_warning():
    """Nobody sees it change."""
    counts = Counts()
    counts.numbers = (number for number in range(3))
    message = "The 'numbers' of the object of collate_fn cannot be copied"
    with pytest.warns(UserWarning, match=message):
        copied_collate(counts.collate, {})


def test_bytes_may_be_an_integer_of_numpy():
    assert is_large(SimpleNamespace(nbytes=np.int64(2**40)))
    assert not is_large(SimpleNamespace(nbytes=np.int64(1)))


def test_containers_that_contain_themselves_are_data():
    rows = [1]
    rows.append(rows)
    assert is_large(rows)
