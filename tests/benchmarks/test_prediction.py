from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from benchmarks.prediction import STEPS, compared, figures, largest_samples, table, unprobed_sizes
from lightning_batchmem.plan.records import MIB


def row(batch_size: int, *, predicted: float | None, upper: float | None, measured: float | None) -> dict[str, Any]:
    def in_bytes(value: float | None) -> float | None:
        return None if value is None else value * MIB

    return {
        "batch_size": batch_size,
        "predicted_bytes": in_bytes(predicted),
        "upper_bytes": in_bytes(upper),
        "measured_bytes": in_bytes(measured),
        "error": "the process ended with -9: " if measured is None else None,
    }


def search(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "chosen": rows[-1]["batch_size"],
        "limited_by": "max_batch_size",
        "limit_bytes": 2048 * MIB,
        "smallest_held_bytes": 60 * MIB,
        "tried": [2, 3, rows[-1]["batch_size"]],
        "rows": list(rows),
    }


@pytest.mark.parametrize(
    ("chosen", "tried", "sizes"),
    [
        (100, [2, 3, 100], [50, 90]),
        (100, [2, 3, 50, 90, 100], [49, 89]),
        (6, [2, 3, 6], [4, 5]),
        (4, [2, 4], [3]),
        (3, [2, 3], []),
    ],
)
def test_sizes_that_were_not_probed(chosen: int, tried: list[int], sizes: list[int]) -> None:
    assert unprobed_sizes(chosen, tried) == sizes


def test_an_error_and_where_the_truth_lies() -> None:
    found = search(
        row(50, predicted=90, upper=100, measured=100),
        row(90, predicted=90, upper=100, measured=101),
        row(95, predicted=90, upper=100, measured=79),
        row(100, predicted=90, upper=100, measured=50),
    )
    at_bound, above, below, smallest = compared(found)
    assert at_bound == {"error": pytest.approx(-0.1), "above": False, "below": False, "of_growth": pytest.approx(-0.25)}
    assert (above["above"], above["below"]) == (True, False)
    assert (below["above"], below["below"]) == (False, True)
    assert "of_growth" not in smallest  # it has not grown beyond the smallest probe


def test_figures() -> None:
    predictions = compared(
        search(
            row(50, predicted=98, upper=110, measured=100),
            row(60, predicted=103, upper=110, measured=100),
            row(90, predicted=95, upper=99, measured=100),
            row(100, predicted=104, upper=106, measured=100),
        )
    )
    assert figures(predictions) == "4 | 3.5% | -5.0% | 8.8% | 50% | 25% | 25% | 50%"


def test_what_has_no_truth_or_no_prediction_is_said_and_not_counted() -> None:
    found = search(
        row(50, predicted=90, upper=100, measured=100),
        row(90, predicted=95, upper=105, measured=None),
        row(100, predicted=None, upper=None, measured=120),
    )
    lines = table({"net": [found, {"error": "no end after 600 s"}]}).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:5] == ["net", "100 (max batch size)", "2,048", "120", "1"]
    assert lines[3].startswith("| all | | | | 1 |")
    assert lines[5:] == [
        "- net, search: no end after 600 s",
        "- net, training with 90: the process ended with -9: ",
        "- net, 100: no prediction",
    ]
    assert {line.count("|") for line in lines[:4]} == {13}


def test_a_workload_without_a_search_has_no_figures() -> None:
    lines = table({"net": [{"error": "no end after 600 s"}]}).splitlines()
    assert lines[2] == "| net | none: see below | unknown | none | 0" + " | none" * 7 + " |"


class Ragged(LightningModule):
    def train_dataloader(self) -> DataLoader[Any]:
        def stacked(samples: list[torch.Tensor]) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence([sample[0] for sample in samples])

        return DataLoader([(torch.ones(3),), (torch.ones(7),), (torch.ones(5),)], batch_size=2, collate_fn=stacked)


def test_a_loader_of_nothing_but_the_largest() -> None:
    batches = list(largest_samples(Ragged(), batch_size=4))
    assert len(batches) == STEPS
    assert {tuple(batch.shape) for batch in batches} == {(7, 4)}
    assert all(batch.min() == 1 for batch in batches)
