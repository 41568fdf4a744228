from __future__ import annotations

from collections import UserDict, UserList, deque, namedtuple
from dataclasses import dataclass, field

import torch
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_batchmem.devices.tensors import (
    copied,
    has_own_tensors,
    is_on,
    samples_in,
    tensors_in,
)


@dataclass
class Sample:
    image: torch.Tensor
    name: str


class OwnBatch:
    def __init__(self, image):
        self.image = image

    def to(self, device, **_):
        return self


@dataclass
class Later:
    image: torch.Tensor
    mask: torch.Tensor = field(init=False)


Pair = namedtuple("Pair", "image label")
ones = torch.ones(3, 2)


COUNTED_BY_LIGHTNING_TOO = (
    ones,
    [ones, ones],
    Pair(ones, torch.ones(3)),
    {"x": ones, "y": {"z": (ones,)}},
)
COUNTED = (
    UserDict(image=ones),
    Sample(ones, "name"),
    OwnBatch(ones),
    {"x": ones, "names": ["a", "b", "c"]},
    (ones, torch.tensor(0.5)),
    [ones, 7, None],
    Later(ones),
    deque([ones]),
    UserList([ones]),
    # Images of several sizes, and their labels.
    ([torch.ones(2, size) for size in (4, 5, 6)], ones),
    {"image": [torch.ones(2, 2)] * 3, "boxes": [torch.ones(size, 4) for size in (1, 2, 3)]},
)
UNKNOWN = (None, "text", ["a", "b"], torch.tensor(1.0), (ones, torch.ones(4)), {}, Sample, [])


def test_samples_are_the_common_first_dimension_or_unknown():
    for batch in COUNTED_BY_LIGHTNING_TOO:
        assert samples_in(batch) == extract_batch_size(batch) == 3
    assert [samples_in(batch) for batch in COUNTED] == [3] * len(COUNTED)
    assert [samples_in(batch) for batch in UNKNOWN] == [None] * len(UNKNOWN)


def test_iterators_are_not_consumed():
    batch = iter([ones])
    assert tensors_in(batch) == []
    assert next(batch) is ones


def test_a_batch_may_refer_to_itself_and_to_its_model():
    class Own:
        def __init__(self):
            self.x = torch.ones(4, 2)
            self.me = self
            self.model = torch.nn.Linear(3, 3)

        def to(self, device): ...

    assert [tuple(tensor.shape) for tensor in tensors_in(Own())] == [(4, 2)]
    shared = [torch.ones(2)]
    shapes = [tuple(tensor.shape) for tensor in tensors_in([torch.ones(1), [shared, shared]])]
    assert shapes == [(1,), (2,), (2,)]


def test_a_copy_does_not_keep_the_storage_of_a_view():
    sample = {"image": torch.ones(1000)[:2], "names": ["a"]}
    copy = copied(sample)
    assert copy["image"].untyped_storage().nbytes() == 8
    shared = copied(sample, share_tensors=True)
    assert shared["image"] is sample["image"]
    assert shared["names"] == ["a"]
    assert shared["names"] is not sample["names"]


def test_a_device_without_an_index_is_any_of_its_type():
    assert is_on(torch.device("cuda:1"), torch.device("cuda"))
    assert not is_on(torch.device("cuda:1"), torch.device("cuda:0"))
    assert not is_on(torch.device("cpu"), torch.device("cuda"))


class OwnTensor(torch.nn.Parameter):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


def test_parameters_of_a_type_of_their_own_are_noticed():
    module = torch.nn.Linear(2, 2)
    assert not has_own_tensors(module)
    module.bias = torch.Tensor._make_subclass(OwnTensor, torch.ones(2), True)
    assert has_own_tensors(module)
