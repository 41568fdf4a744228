from __future__ import annotations

import warnings
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_batchmem.measure.worst_case import KeepLargest, element_count, warn_if_ragged

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    image: Any
    name: str


@pytest.mark.parametrize(
    ("sample", "count"),
    [
        (torch.zeros(3, 4), 12),
        (torch.tensor(7), 1),
        (np.zeros((2, 5)), 10),
        (np.int64(3), 1),
        (np.bool_(True), 1),
        ("caption", 7),
        (b"bytes", 5),
        (bytearray(4), 4),
        (3, 1),
        (2.5, 1),
        (True, 1),
        ([1, 2, 3], 3),
        ([1.0, True, 3], 3),
        (("ab", "cde"), 5),
        ([[1, 2], [3]], 3),
        ({"a": torch.zeros(4), "b": [torch.zeros(2), "xy"]}, 8),
        (UserDict(a=torch.zeros(4)), 4),
        (Pair(torch.zeros(2), 1), 3),
        (Record(torch.zeros(6), "n"), 7),
        ({1, 2}, 2),
        ([], 0),
        (None, 0),
        (object(), 0),
        (Record, 0),
    ],
    ids=repr,
)
def test_element_count(sample: Any, count: int) -> None:
    assert element_count(sample) == count


def test_only_a_larger_sample_is_handed_on() -> None:
    keep = KeepLargest("longest")
    assert keep(["ab", "abcd", "abc"]) == (3, ["abcd"], 4, "")
    assert keep(["ab", "wxyz"]) == (2, [], 4, "")
    assert keep(["abcdef"]) == (1, ["abcdef"], 6, "")


# A word about samples of many sizes


def sample(elements: int, name: str = "") -> dict[str, Any]:
    return {"x": torch.zeros(elements), "name": name, "label": 1}


@pytest.mark.parametrize(
    ("samples", "largest", "median"),
    [
        ([sample(10)] * 20 + [sample(40)], "41", "11"),
        ([[1] * 10] * 20 + [[1] * 16], "16", "10"),
        ([sample(10, "word " * 20)] * 20 + [sample(10, "word " * 200)], "1,011", "111"),
    ],
    ids=["tensors", "lists", "texts"],
)
def test_samples_of_many_sizes_are_said(samples: list[Any], largest: str, median: str) -> None:
    message = rf'largest of 21 .* has {largest} elements, the median {median}, .*worst_case="longest"'
    with pytest.warns(UserWarning, match=message):
        assert warn_if_ragged(samples)


@pytest.mark.parametrize(
    "samples",
    [
        [sample(10)] * 20,
        [sample(2, "a.png"), sample(2, "a/long/path/to/some/file/of/many.png")],
        [sample(2, "n" * length) for length in range(250)],
        [sample(3 * 32 * 32, "a word " * length) for length in range(50)],
        [sample(100)] * 20 + [sample(150)],
        [{"image": torch.zeros(3, 64, 64), "boxes": torch.zeros(number, 4)} for number in range(50)],
        [3, 4],
        [{"x": None}, {"x": None}, {"x": 3}],
        [object(), object()],
    ],
    ids=["fixed", "paths", "names", "captions", "1.5", "boxes", "numbers", "none", "unknown"],
)
def test_samples_of_about_one_size_never_warn(samples: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not warn_if_ragged(samples)
