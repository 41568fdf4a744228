"""Steps that run out of memory on one of two ranks, with real processes (gloo)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.guarded_ranks import BOTH, FORWARD, run_cases
from tests.helpers.rank_processes import run_ranks

CASES: dict[str, dict[str, Any]] = {
    "rank 1": {"ranks": [1], "fails": FORWARD},
    "rank 0": {"ranks": [0], "fails": FORWARD},
    "both ranks": {"ranks": [0, 1], "fails": FORWARD},
    "accumulation": {"ranks": [1], "fails": BOTH, "accumulate": 2},
    "several buckets": {"ranks": [1], "fails": FORWARD, "ddp": {"bucket_cap_mb": 0.0001}},
    "views": {
        "ranks": [1],
        "fails": BOTH,
        "accumulate": 2,
        "ddp": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    },
    "unused": {"ranks": [1], "fails": FORWARD, "ddp": {"find_unused_parameters": True}},
    "first batch": {"ranks": [1], "fails": FORWARD, "sizes": [9, 4, 4, 8, 4]},
    "second batch": {"ranks": [1], "fails": {1: "middle"}, "sizes": [4, 9, 4, 8, 4]},
}


def results_of(directory: Path, cases: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    codes, outputs = run_ranks(run_cases, directory, cases)
    files = [directory / f"{rank}.json" for rank in range(2)]
    assert codes == [0, 0], outputs
    return tuple(json.loads(file.read_text()) for file in files)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    return results_of(tmp_path_factory.mktemp("ranks"), CASES)


def flat(values: Any) -> list[float]:
    if isinstance(values, dict):
        return flat([values[key] for key in sorted(values)])
    return (
        [one for value in values for one in flat(value)] if isinstance(values, list) else [values]
    )


@pytest.mark.parametrize("name", CASES)
def test_each_rank_trains_as_with_enough_memory(
    name: str, ranks: tuple[dict[str, Any], ...]
) -> None:
    for rank, found in enumerate(ranks):
        whole, split = found[name]
        assert (whole["error"], split["error"]) == ("", "")
        for key in ("weights", "logged"):
            assert flat(split[key]) == pytest.approx(flat(whole[key]), rel=1e-11, abs=1e-14), key
        runs_in_parts = rank in CASES[name]["ranks"]
        assert (split["oom_splits"] > 0) == runs_in_parts
        assert (len(split["samples"]) > len(whole["samples"])) == runs_in_parts
    assert flat(ranks[0][name][1]["weights"]) == flat(ranks[1][name][1]["weights"])


def test_an_error_in_a_backward_pass_that_exchanges_gradients_is_raised(tmp_path: Path) -> None:
    case = {"ranks": [1], "fails": {3: "backward"}, "ends": True}
    healthy, failed = (found["one"][0] for found in results_of(tmp_path, {"one": case}))
    assert failed["error"].startswith("OutOfMemoryError: CUDA out of memory")
    assert failed["notes"] == [
        "OomGuard: memory ran out in a backward pass that exchanges gradients with the other ranks,"
        " which cannot be repeated. Use a smaller batch size."
    ]
    assert healthy["error"]


def test_an_error_after_a_collective_of_the_step_is_raised(tmp_path: Path) -> None:
    case = {"ranks": [1], "fails": {3: "forward"}, "gathers": True, "ends": True}
    healthy, failed = (found["one"][0] for found in results_of(tmp_path, {"one": case}))
    assert failed["error"].startswith("CollectiveFoundError: The step ends before c10d.")
    assert failed["notes"] == [
        "OomGuard: memory ran out on this rank, and the parts of its batch cannot take part in the"
        " exchanges of training_step. Use a smaller batch size.",
        "OomGuard: this error came while a batch was split or ran in parts, after OutOfMemoryError:"
        " CUDA out of memory. Tried to allocate 20.00 MiB",
    ]
    assert healthy["error"]


def test_a_static_graph_is_not_guarded(tmp_path: Path) -> None:
    static = {"static_graph": True}
    case = {"ranks": [1], "fails": {3: "forward"}, "ddp": static, "ends": True}
    _, failed = (found["one"][0] for found in results_of(tmp_path, {"one": case}))
    assert failed["error"].startswith("OutOfMemoryError: CUDA out of memory")
    assert failed["samples"] == [4, 3, 4, 9]
