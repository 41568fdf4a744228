import warnings
from collections import UserList
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch

from lightning_batchmem.devices.foreign_values import begin_run, error_text, value_or_none
from lightning_batchmem.devices.tensors import samples_in, tensors_in


def fail(error=None):
    raise error or KeyError("x")


def test_an_error_is_no_value_and_one_warning_for_a_run():
    assert value_or_none("The size", lambda one: one + 1, 2) == 3
    with pytest.warns(UserWarning, match="The size cannot be read: KeyError: 'x'"):
        assert value_or_none("The size", fail) is None
    assert value_or_none("The size", fail) is None
    with pytest.warns(UserWarning, match="The name cannot"):
        assert value_or_none("The name", fail) is None
    begin_run()
    with pytest.warns(UserWarning, match="The size cannot be read: OSError"):
        assert value_or_none("The size", fail, OSError()) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_a_process_still_ends_it(error):
    with pytest.raises(type(error)):
        value_or_none("The size", fail, error)


def test_the_text_of_an_error_that_has_none():
    class SilentError(Exception):
        def __str__(self):
            raise AttributeError

    assert [error_text(SilentError()), error_text(ValueError("a\nb"))] == [
        "SilentError",
        "ValueError: a",
    ]


class Pairs(UserList):
    """Makes its items when they are read."""

    def __getitem__(self, index):
        return Pairs([0, 0])


def test_a_batch_without_an_end_has_no_tensors_that_are_known():
    with pytest.warns(UserWarning, match="cannot be read: RecursionError"):
        assert tensors_in([torch.ones(1), Pairs([0, 0])]) == []
    # There is one warning in a run.
    assert tensors_in(Pairs([0, 0])) == []


class Column(UserList):
    """A column of a table, whose rows are read when they are needed."""

    reads = 0

    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        self.reads += 1
        return 1


def test_a_batch_with_a_long_column_is_not_read_through():
    column = Column()
    assert len(tensors_in([torch.ones(1), column])) == 1
    assert column.reads == 10_000


NESTED = "ignore:The PyTorch API of nested tensors"


def nested(layout=torch.strided):
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


@dataclass
class Record:
    x: object
    y: object = None


class Broken(Record):
    y = property(lambda self: fail(), lambda self, value: None)


class Graphs(Record):
    num_graphs = property(lambda self: fail(RuntimeError("no graphs")))


class Lazy(Mapping):
    """Reads its items when they are asked for."""

    def __getitem__(self, key):
        raise OSError("gone")

    def __iter__(self):
        return iter("ab")

    def __len__(self):
        return 2


class Rows(UserList):
    def __iter__(self):
        raise RuntimeError("closed")


class Dynamic:
    """Finds its attributes in a dictionary, and has a forgotten error for others."""

    def __init__(self):
        self.items = {"x": 1}

    def __getattr__(self, name):
        return vars(self)["items"][name]


X = torch.ones(4, 2)


@pytest.mark.filterwarnings(NESTED)
@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (nested, 1),
        (lambda: [nested()], 1),
        (lambda: {"x": nested(), "n": torch.tensor([1, 2])}, 2),
        (lambda: Broken(X), 1),
        (lambda: [Broken(X), X], 2),
        (lambda: Graphs(X), 1),
        (lambda: {"a": X, "lazy": Lazy()}, 1),
        (lambda: (X, Rows([X])), 1),
        (lambda: [X, Dynamic()], 1),
    ],
)
def test_a_batch_that_cannot_be_read_never_raises(make, tensors):
    batch = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples_in(batch)
        assert len(tensors_in(batch)) == tensors
        samples_in(batch)
    texts = [str(one.message) for one in caught]
    assert 1 <= len(texts) == len(set(texts)) <= 2
    assert all("cannot be read: " in text for text in texts)
