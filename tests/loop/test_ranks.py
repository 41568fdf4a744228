"""Searches of loops on two processes (gloo)."""

import json

import pytest
import torch.distributed.fsdp

from tests.helpers.lawful import MIB, found_size
from tests.helpers.loop_ranks import run_cases
from tests.helpers.rank_processes import run_ranks

# torch 2.5 has no fully_shard in this module, and its FSDP2 needs GPUs.
SHARDS_HERE = hasattr(torch.distributed.fsdp, "fully_shard")

LIMITED = {"options": {"max_batch_size": 64}}
CASES = {
    "plain": {},
    "plain alone": {"search": False},
    "collectives": {"collectives": True},
    "collectives alone": {"collectives": True, "search": False},
    # The steps of a wrapped model may not run out of memory.
    "ddp": {"wrapper": "ddp", **LIMITED},
    "ddp alone": {"wrapper": "ddp", "search": False},
    "fails": {"fails_at": 8},
}
for name, use_orig_params in (("fsdp", True), ("fsdp, flat parameters", False)):
    case = {"wrapper": "fsdp", "use_orig_params": use_orig_params}
    CASES[name] = {**case, **LIMITED}
    CASES[f"{name} alone"] = {**case, "search": False}
if SHARDS_HERE:
    CASES["fsdp2"] = {"wrapper": "fsdp2", **LIMITED}
    CASES["fsdp2 alone"] = {"wrapper": "fsdp2", "search": False}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The results of both ranks by case."""
    directory = tmp_path_factory.mktemp("ranks")
    codes, outputs = run_ranks(run_cases, directory, CASES)
    assert codes == [0, 0], outputs
    ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: [rank[name] for rank in ranks] for name in CASES}


@pytest.mark.parametrize("name", [name for name in CASES if f"{name} alone" in CASES])
def test_all_ranks_have_one_plan_and_train_as_without_a_search(name, seen):
    one, other = seen[name]
    assert one["plan"] == other["plan"]
    assert one["plan"]["chosen"]["is_verified"]
    size = one["plan"]["batch_size"]
    # The second rank has the least room. Steps that all ranks take together leave more free.
    largest = found_size(400 * MIB)
    assert size == 64 if "options" in CASES[name] else 0.8 * largest < size <= largest
    assert (size == largest) == (name == "plain")
    assert one["plan"]["recipe"]["ranks"] == 2
    # The search finds the user's own collectives, but not those of a wrapper.
    assert one["is_collective"] == ("wrapper" in CASES[name])
    for searched, alone in zip(seen[name], seen[f"{name} alone"], strict=True):
        assert searched["left"] == alone["left"]
        # Each rank has written back what all ranks have in shared memory.
        assert searched["counted"] == 0


def test_an_error_on_one_rank_ends_the_search_on_all(seen):
    errors = [rank["error"] for rank in seen["fails"]]
    assert errors == [
        "RankFailedError: rank 1 ended the search: LookupError: of the user",
        "LookupError: of the user",
    ]
