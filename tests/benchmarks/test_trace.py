from __future__ import annotations

import inspect
import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder

from benchmarks.trace import COMPARED, LARGEST, cell, differing, digest, finder_of, table
from lightning_batchmem import BatchFinder


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),  # the same bytes
        (np.zeros(2), np.zeros(2, dtype=np.int64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.tensor(1.0), torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))),
        (torch.zeros(2, dtype=torch.bfloat16), torch.tensor([0, 1e-30], dtype=torch.bfloat16)),
        (np.zeros(2), np.array([0, 5e-324])),
        (0.1, 0.1 + 2**-56),
        (1, True),
        (1, "1"),
        (None, "None"),
        ([1, 2], [2, 1]),
        ([1, [2]], [[1], 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([], {}),
    ],
)
def test_digests_differ(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    assert digest({"deep": [one]}) != digest({"deep": [other]})


def test_digests_are_of_values() -> None:
    def state() -> Any:
        random.seed(1)
        return {
            "x": [torch.arange(6).view(2, 3).t(), float("nan")],
            "state": random.getstate(),
            "empty": torch.empty(0),
        }

    assert digest(state()) == digest(state())
    contiguous = torch.arange(6).view(2, 3).t().contiguous()
    assert digest(state()["x"][0]) == digest(contiguous)


def test_the_directory_of_a_run_is_no_difference() -> None:
    assert digest(["/tmp/a/best.ckpt"], hide="/tmp/a") == digest(["/tmp/b/best.ckpt"], hide="/tmp/b")
    assert digest(["/tmp/a/best.ckpt"], hide="/tmp/a") != digest(["/tmp/b/last.ckpt"], hide="/tmp/b")


def test_an_unknown_type_is_not_compared_by_its_address() -> None:
    with pytest.raises(TypeError, match="plain values, got object"):
        digest({"a": [object()]})


def test_what_differs_is_named_in_order() -> None:
    digests = dict.fromkeys(COMPARED, "same")
    assert differing(digests, dict(digests)) == []
    assert differing({**digests, "files": "one", "weights": "one"}, digests) == ["weights", "files"]
    with pytest.raises(KeyError):
        differing({}, digests)


def test_finders_are_bounded_alike() -> None:
    ours, lightnings = finder_of("BatchFinder"), finder_of("binsearch")
    assert isinstance(ours, BatchFinder)
    assert isinstance(lightnings, BatchSizeFinder)
    assert ours._options.max_batch_size == LARGEST
    assert lightnings._mode == "binsearch"
    if "max_val" in inspect.signature(BatchSizeFinder).parameters:
        assert lightnings._max_val == LARGEST
    else:
        assert lightnings._init_val * 2**lightnings._max_trials == LARGEST
    assert finder_of("no finder") is None


def test_table() -> None:
    same = {"error": None, "batch_size": 64, "differs": []}
    other = {"error": None, "batch_size": 60, "differs": ["weights", "files"]}
    refused = {"error": "MisconfigurationException: not here"}
    results = {
        "Adam": {"ours": same, "power": {**other, "batch_size": 64}, "binsearch": other},
        "passed": {"ours": same, "power": refused, "binsearch": refused},
    }
    assert cell(same) == "identical"
    assert table(results).splitlines() == [
        "| way to train | ours | power | binsearch |",
        "|---|---|---|---|",
        "| Adam | identical | weights, files | weights, files |",
        "| passed | identical | error | error |",
        "| all | 2 of 2 identical | 0 of 2 identical | 0 of 2 identical |",
        "",
        "- power and binsearch, passed: MisconfigurationException: not here",
        "- Sizes found: ours 64, power 64, binsearch 60.",
    ]
