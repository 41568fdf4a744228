"""Copies of collate functions that are methods."""

import functools
import queue
import threading
from collections import defaultdict, deque
from copy import copy
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
    assert copied.func.__self__.calls == 1
    assert copied.keywords["flags"] is not given.keywords["flags"]
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
    assert (counts.calls, copied.__self__.calls) == (0, 1)
    assert copied.__self__.lock is counts.lock
    assert not recwarn


class Client:
    """Cannot be copied, because it has a lock; what it counts lies deeper."""

    def __init__(self):
        self.lock = threading.Lock()
        self.ready = threading.Condition()
        self.requests = 0
        self.stats = {"calls": 0, "sizes": [[0]], "lock": threading.Lock()}

    def ask(self, size):
        with self.lock, self.stats["lock"], self.ready:
            self.requests += 1
            self.stats["calls"] += 1
            self.stats["sizes"][0].append(size)

    def contents(self):
        return self.requests, self.stats["calls"], self.stats["sizes"]


class Asks:
    def __init__(self, client):
        self.client = client
        self.clients = [client, (client,), {"it": client}]
        self.lock = client.lock

    def __call__(self, samples):
        self.client.ask(len(samples))
        for client in (self.clients[0], self.clients[1][0], self.clients[2]["it"]):
            assert client is self.client
        return self.client.contents()

    collate = __call__


@pytest.mark.parametrize("method", ["__call__", "collate"])
@pytest.mark.parametrize("bound", [False, True])
def test_an_object_that_cannot_be_copied_is_shared(method, bound, recwarn):
    """The snapshot of the project restores it: ``test_contract.py`` has such a case."""
    asks = Asks(Client())
    given = asks.collate if method == "collate" else asks
    copied = copied_collate(functools.partial(given) if bound else given, {})
    # The state goes on from call to call, as in a training.
    assert copied([1]) == (1, 1, [[0, 1]])
    assert copied([1, 2]) == (2, 2, [[0, 1, 2]])
    assert asks.client.contents() == (2, 2, [[0, 1, 2]])
    assert not recwarn


def test_a_queue_that_others_may_use_is_shared_with_a_warning():
    counts = Counts()
    counts.queue = queue.Queue()
    with pytest.warns(UserWarning, match="The 'queue' of the object of collate_fn cannot be"):
        copied = copied_collate(counts.collate, {})
    assert copied.__self__.queue is counts.queue


class Refuses:
    """Fails to be copied after a part of it was copied."""

    def __init__(self, shared):
        self.shared = shared
        self.iterator = threading.Lock()


def test_no_copy_is_used_that_is_not_complete():
    shared = {"lock": threading.Lock(), "n": 1}
    counts = Counts()
    counts.parts = [shared, Refuses(shared)]
    counts.shared = shared
    owner = copied_collate(counts.collate, {}).__self__
    assert owner.shared == shared
    assert owner.shared is owner.parts[0]
    assert owner.shared is not shared


class Slots:
    __slots__ = ("lock",)

    def __init__(self):
        self.lock = threading.Lock()


class Chain:
    def __init__(self, last):
        self.next = last
        for _ in range(2000):
            end = copy(self)
            self.next = end


@pytest.mark.parametrize(
    "value",
    [
        (number for number in range(3)),
        deque([threading.Lock()]),
        defaultdict(int, lock=threading.Lock()),
        {threading.Lock()},
        Slots(),
        Chain(None),
        Chain(threading.Lock()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_copied_and_is_not_seen_to_change_is_a_warning(value):
    counts = Counts()
    counts.calls = 0
    counts.value = value
    message = "The 'value' of the object of collate_fn cannot be copied"
    with pytest.warns(UserWarning, match=message) as caught:
        copied = copied_collate(counts.collate, {})
    assert len(caught) == 1
    copied([1])
    assert copied.__self__.value is value
    assert counts.calls == 0


def test_bytes_may_be_an_integer_of_numpy():
    assert is_large(SimpleNamespace(nbytes=np.int64(2**40)))
    assert not is_large(SimpleNamespace(nbytes=np.int64(1)))


def test_containers_that_contain_themselves_are_data():
    rows = [1]
    rows.append(rows)
    assert is_large(rows)
