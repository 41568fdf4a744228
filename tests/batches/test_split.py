from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import pytest
import torch

from lightning_batchmem.batches.split import (
    has_number_of_samples,
    split,
    splittable_samples,
)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_cannot_be_split(layout):
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    batch = {"x": torch.nested.nested_tensor(rows, layout=layout), "n": 2}
    assert splittable_samples(batch) is None
    assert not has_number_of_samples(batch)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "of the batch"
    scale: torch.Tensor = field(default_factory=lambda: torch.tensor(2.0))


class Custom:
    """Lightning moves such a batch with its own method."""

    def __init__(self, x, lengths):
        self.x = x
        self.lengths = lengths

    def to(self, device):
        return self


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("samples", "num_parts", "expected"),
    [
        (8, 2, [4, 4]),
        (9, 2, [4, 5]),
        (9, 4, [2, 2, 2, 3]),
        (3, 3, [1, 1, 1]),
        (7, 5, [1, 1, 2, 1, 2]),
    ],
)
def test_parts_differ_by_at_most_one_sample(samples, num_parts, expected):
    x = torch.arange(2 * samples).reshape(samples, 2)
    parts = split(x, num_parts)
    assert [part.samples for part in parts] == expected
    assert torch.equal(torch.cat([part.batch for part in parts]), x)


def test_every_container_is_split_and_its_tensors_are_views():
    x = torch.arange(5.0).reshape(5, 1)
    texts = ["a", "b", "c", "d", "e"]
    batch = {
        "pair": Pair(x, [x + 1, (x + 2,)]),
        "ordered": OrderedDict(x=x),
        "user": UserDict(x=x),
        "frozen": Frozen(x),
        "custom": Custom(x, np.arange(5)),
        "texts": tuple(texts),
        "nested": {"texts": texts, "seed": 7, "words": ["x", "y"]},
        "epoch": torch.tensor(3),
    }
    assert splittable_samples(batch) == 5
    first, second = (part.batch for part in split(batch, 2))
    assert isinstance(first["pair"], Pair)
    assert second["pair"].y[1][0].tolist() == [[4], [5], [6]]
    assert [type(first[key]) for key in batch] == [type(value) for value in batch.values()]
    for part in (first["ordered"]["x"], first["user"]["x"], first["frozen"].x, first["custom"].x):
        assert part.tolist() == [[0], [1]]
        assert part.data_ptr() == x.data_ptr()
    assert second["custom"].lengths.tolist() == [2, 3, 4]
    assert (first["texts"], second["texts"]) == (("a", "b"), ("c", "d", "e"))
    assert second["nested"] == {"texts": ["c", "d", "e"], "seed": 7, "words": ["x", "y"]}
    assert second["epoch"] is batch["epoch"]
    assert second["frozen"].scale is batch["frozen"].scale
    # The whole batch is as before.
    assert (batch["texts"], len(batch["frozen"].x)) == (tuple(texts), 5)


def test_objects_that_cannot_be_copied_are_in_every_part():
    batch = {"x": torch.zeros(4), "lock": Lock(), "more": [iter(())]}
    for part in split(batch, 2):
        assert part.batch["lock"] is batch["lock"]
        assert part.batch["more"][0] is batch["more"][0]
        assert part.batch["more"] is not batch["more"]


def test_a_batch_that_refers_to_itself():
    batch = {"x": torch.zeros(4)}
    batch["self"] = batch
    part = split(batch, 2)[0].batch
    assert part["self"] is part
    assert len(part["x"]) == 2


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.zeros(4, 2), "edges": torch.zeros(2, 9)},
        torch.tensor(1.0),
        ["text"] * 4,
        torch.eye(4).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ],
    ids=["edges", "number", "texts", "sparse", "nested"],
)
def test_what_has_no_common_first_dimension(batch):
    assert splittable_samples(batch) is None


@pytest.mark.parametrize("number", [5, np.int64(5), torch.tensor(5)])
def test_the_number_of_samples_in_a_batch(number):
    x = torch.zeros(5, 2)
    assert has_number_of_samples({"x": x, "more": [{"n": number}, x]})
    assert not has_number_of_samples({"x": x, "n": number + 1})
    # These are of single samples.
    assert not has_number_of_samples((x, [5, 4, 3, 2, 1], torch.full((5,), 5)))
