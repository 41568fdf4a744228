"""Attributes that may be the batch size of a project."""

import functools
from argparse import Namespace
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_batchmem._lightning import place_search
from lightning_batchmem._lightning.place_search import MOST_CANDIDATES


class Everything:
    """Ids of objects, all of which are restored."""

    def __contains__(self, key):
        return True


EVERYTHING = Everything()


def candidate_paths(roots, sizes, restored=EVERYTHING):
    return place_search.candidate_paths(roots, sizes, restored)


@dataclass
class Loading:
    micro_bs: int = 4


def test_names_of_a_batch_come_before_equal_numbers():
    root = SimpleNamespace(
        width=32, samples=32, val_batch=7, train_batch_size=32, opt=Namespace(bs=5), other=9
    )
    assert candidate_paths([root], [32]) == [
        "train_batch_size",
        "val_batch",
        "opt.bs",
        "width",
        "samples",
    ]


def test_objects_that_are_walked():
    class Slotted:
        __slots__ = ("batch", "unset")
        BATCH_OF_CLASS = 3

        def __init__(self):
            self.batch = 4

        @property
        def batch_of_property(self):
            raise AssertionError("a property may do work")

    root = SimpleNamespace(
        slotted=Slotted(),
        entries={"data": {"batch_size": 4, "not a name of an attribute": 4, 4: 4}},
        loading=Loading(),
        # These lead nowhere.
        deep={"a": {"b": {"batch_size": 4}}},
        listed=[SimpleNamespace(batch_size=4)],
        array=np.ones(4),
        tensor=torch.ones(4),
        function=functools.partial(int, 4),
    )
    root.itself = root
    assert set(candidate_paths([root], [4])) == {
        "slotted.batch",
        "slotted.BATCH_OF_CLASS",
        "entries.data.batch_size",
        "loading.micro_bs",
    }


@pytest.mark.parametrize(
    "name",
    ["rank", "batch_seed", "max_epochs", "fold", "num_workers", "n_jobs", "num_threads", "cpus"],
)
def test_numbers_that_are_never_set(name):
    assert candidate_paths([{name: 4}], [4]) == []


@pytest.mark.parametrize(
    ("name", "is_batch"),
    [
        ("bs", True),
        ("_bs", True),
        ("train_bs", True),
        ("mbs", True),
        ("bsz", True),
        ("bsize", True),
        ("BatchSize", True),
        ("n_obs", False),
        ("absolute", False),
        ("jobs_bs_x", False),
    ],
)
def test_names_of_a_batch(name, is_batch):
    # The value is no size of a loader, so only the name counts.
    assert candidate_paths([{name: 5}], [4]) == ([name] if is_batch else [])


@pytest.mark.parametrize("value", [True, 0, -4, 4.0, "4", None, torch.tensor(4)])
def test_values_that_are_no_sizes(value):
    assert candidate_paths([{"batch_size": value}], [4]) == []


def test_whole_numbers_of_numpy():
    assert candidate_paths([{"batch_size": np.int64(4)}], [4]) == ["batch_size"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = 4
        self.batch = 4


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"batch_size": 8, "width": 4})
        self.block = Block()
        self.layer = nn.Linear(4, 4)


def test_widths_of_layers_are_no_sizes():
    module = Net()
    assert candidate_paths([module, module.hparams], [4]) == ["block.batch", "batch_size", "width"]


def test_at_most_eight():
    root = {f"batch_{index}": index + 1 for index in range(20)}
    paths = candidate_paths([root], [15])
    assert len(paths) == MOST_CANDIDATES == 8
    assert paths[0] == "batch_14"


def test_one_object_under_two_names():
    shared = Namespace(batch_size=4)
    assert candidate_paths([{"first": shared, "second": shared}], [4]) == ["first.batch_size"]


def test_an_attribute_that_raises():
    class Raises:
        def __init__(self):
            self.__dict__["batch_size"] = 4
            self.__dict__["width"] = 4

        def __getattribute__(self, name):
            if name == "batch_size":
                raise RuntimeError("of the user")
            return object.__getattribute__(self, name)

    assert candidate_paths([Raises()], [4]) == ["width"]


def test_objects_that_are_not_restored_are_left_alone():
    restored, other = SimpleNamespace(batch_size=4), SimpleNamespace(batch_size=4)
    root = {"restored": restored, "other": other}
    assert candidate_paths([root], [4], {id(restored)}) == ["restored.batch_size"]


class Closed(dict):
    def __iter__(self):
        raise RuntimeError("closed file")


class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("outside of context")


def test_objects_that_cannot_be_looked_at():
    root = {"closed": Closed(batch_size=4), "proxy": Proxy(), "batch_size": 4}
    assert candidate_paths([root], [4]) == ["batch_size"]
