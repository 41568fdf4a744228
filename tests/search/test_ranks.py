"""Searches on several ranks, with real processes (gloo)."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch.distributed.fsdp

from lightning_batchmem.plan.records import Trial, TrialMemory
from lightning_batchmem.search.ranks import Ranks
from tests.helpers.rank_processes import WAIT_SECONDS, run_ranks
from tests.helpers.search_ranks import MIB, run_cases

ROOT = Path(__file__).parents[2]
# torch 2.5 has no fully_shard in this module, and its FSDP2 needs GPUs.
SHARDS_HERE = hasattr(torch.distributed.fsdp, "fully_shard")


def test_one_rank_exchanges_nothing_and_keeps_its_error():
    ranks = Ranks(rank=0, size=1)
    trial = Trial(8, "ok", TrialMemory({"forward": 50}))
    assert (ranks.exchange(3), ranks.worst_of(trial)) == ([3], trial)
    assert ranks.named("an error") == "an error"
    with pytest.raises(ValueError, match="the user's own error"), ranks.fail_together():
        raise ValueError("the user's own error")


def test_an_error_names_its_rank_if_there_are_several():
    assert Ranks(rank=1, size=2).named("an error") == "on rank 1: an error"
    assert Ranks(rank=1, size=2).named("") == ""


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Run cases on ranks; returns exit codes, the results of the ranks by case, and the output."""

    def run(cases, ranks=2):
        directory = tmp_path_factory.mktemp("ranks")
        codes, output = run_ranks(run_cases, directory, cases, ranks, ranks=ranks)
        seen = [json.loads(file.read_text()) for file in sorted(directory.glob("*.json"))]
        return codes, {name: [one[name] for one in seen] for name in cases if seen}, output

    return run


def fails(error, where, size, **more):
    """A failure on rank 1, or another, in every step of at least this size."""
    return {"fails": {"error": error, "where": where, "size": size, **more}}


OUT = "OutOfMemoryError"


# Without budgets, the ranks measure the memory of the host.
# The network has 193 parameters of four bytes.
def texts_of(plan):
    """The notes in the JSON of a plan."""
    return " ".join(note["text"] for note in plan["notes"])


LESS_THAN_LIMIT = "The search left 0.001 MiB of the limit free"
UP_TO_24 = {"finder": {"max_batch_size": 24}, "budgets": None}
VALIDATES = {"limit_val_batches": 1.0}
EPOCHS = {"accumulate_grad_batches": 2, "max_steps": -1, "max_epochs": 2}
ACCUMULATES = {**EPOCHS, **VALIDATES}
TWO_RANKS = {
    "less on rank 0": {"budgets": [300, 400]},
    **{f"{OUT} in {where}": fails(OUT, where, 100) for where in ("backward", "optimizer")},
    "nothing fits": fails(OUT, "backward", 1),
    "error on rank 0": fails("ValueError", "backward", 8, rank=0),
    "error on rank 1": fails("ValueError", "optimizer", 8),
    "error in the first step": {"collectives": True, **fails("ValueError", "forward", 1)},
    "error before the search": fails("ValueError", "configure_optimizers", 0),
    "error in the checks before it": fails("ValueError", "check", 0),
    "exchanges": {"exchanges": True, "trainer": VALIDATES, **fails(OUT, "forward", 51)},
    "collectives": {"budgets": [400, 300], "collectives": True, "varies": 0},
    "collectives of an epoch": {"collectives_of_epoch": True, "varies": 0},
    "target": {"finder": {"target_batch_size": 96, "lr_scaling": "linear"}},
    "own size": {
        "finder": {"objective": "auto", "min_steps_per_epoch": "auto"},
        "batch_size": 8,
        "step_seconds": 0.02,
    },
    "own size does not fit on rank 1": {
        "finder": {"objective": "auto", "min_steps_per_epoch": "auto"},
        "budgets": [400, 250],
        "batch_size": 160,
        "trainer": {"limit_train_batches": 3, "max_steps": 2},
    },
    "saves": {"budgets": [300, 250], "saves": True},
    "resumes": {"budgets": [300, 250], "resumes": True, "trainer": {"max_steps": 5}},
    "resumes as before": {
        "budgets": [300, 250],
        "resumes": True,
        "trainer": {"max_steps": 5},
        "finder": {"search_on_resume": "if_changed"},
    },
    "resumes with less on rank 1": {
        "budgets": [300, 200],
        "resumes": True,
        "trainer": {"max_steps": 5},
        "finder": {"search_on_resume": "if_changed"},
    },
    "reuses": {"budgets": [300, 250], "reuses": True},
    "reuses with less on rank 1": {"budgets": [300, 200], "reuses": True},
    "shared memory": {"is_shared": True},
    "shared memory of workers": {"is_shared": True, "strategy": "workers"},
    "validate": {"budgets": [300, 250], "entry": "validate", "trainer": VALIDATES},
    **{
        f"unfrozen by {how}": {"unfreezes": how, "trainer": {"max_steps": -1, "max_epochs": 2}}
        for how in ("callback", "later")
    },
    "unfrozen by a text": {
        "unfreezes": "later",
        "later": "tests.helpers.search_ranks:unfreeze",
        "trainer": {"max_steps": -1, "max_epochs": 2},
    },
    **{
        f"rank {rank} keeps in {stage}{', collectives' if collectives else ''}": {
            "keeps": [stage, rank],
            "collectives": collectives,
            "trainer": {"max_steps": -1, "max_epochs": 2, "limit_val_batches": 10},
            **UP_TO_24,
        }
        for stage, rank in (("training", 0), ("validation", 1))
        for collectives in (False, True)
    },
    "ddp": {"ddp": {"bucket_cap_mb": 0.0001}, "trainer": ACCUMULATES, **UP_TO_24},
    "ddp with views": {
        "ddp": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
        "collectives": True,
        **UP_TO_24,
    },
}
for hook in ("loader", "own class", "made at first"):
    # A text is not a number that the search could set.
    case = {"hook": hook, "batch_size": "4", "trainer": EPOCHS}
    TWO_RANKS[f"hook: {hook}"] = {**case, **UP_TO_24}
OPTIONAL = {
    "optional, error before the search": fails("ValueError", "check", 0),
    "optional, error in a trial": fails("ValueError", "backward", 8),
    "optional, nothing fits": {"budgets": [200, 400], "finder": {"min_batch_size": 128}},
}
for name, case in OPTIONAL.items():
    TWO_RANKS[name] = {"optional": True, **case}
    TWO_RANKS[f"{name}, coded"] = {**TWO_RANKS[name], "search": False, "fails": {}}
BUDGET = {
    "max_tokens": 12,
    "finder": {"budget": True, "batch_arg_name": "max_tokens", "max_batch_size": 24},
    "budgets": None,
    "trainer": {**ACCUMULATES, "use_distributed_sampler": False},
}
TWO_RANKS["max_tokens"] = BUDGET
TWO_RANKS["max_tokens, coded"] = {**BUDGET, "search": False, "max_tokens": 24}
TWO_RANKS["max_tokens that Lightning would divide"] = {**BUDGET, "trainer": {}}
BY_LAYERS = {"auto_wrap_policy": "linear layers"}
FSDP = {
    "fsdp": BY_LAYERS,
    "fsdp, one flat parameter": {"use_orig_params": False},
    "fsdp, flat parameters": {**BY_LAYERS, "use_orig_params": False},
    "fsdp, SHARD_GRAD_OP": {**BY_LAYERS, "sharding_strategy": "SHARD_GRAD_OP"},
    "fsdp, NO_SHARD": {
        **BY_LAYERS,
        "sharding_strategy": "NO_SHARD",
        "use_orig_params": False,
    },
}
TWO_RANKS["fsdp budgets"] = {"strategy": "fsdp", "budgets": [400, 300], "fsdp": BY_LAYERS}
for name, options in FSDP.items():
    case = {"strategy": "fsdp", "fsdp": options, **UP_TO_24}
    TWO_RANKS[name] = {**case, "trainer": ACCUMULATES}
    TWO_RANKS[f"{name}, found before"] = {**case, "find": True, "trainer": VALIDATES}
TWO_RANKS["workers, fsdp"] = {"strategy": "workers, fsdp", "fsdp": BY_LAYERS, **UP_TO_24}
if SHARDS_HERE:
    for name in ("fsdp2", "fsdp2 by name", "workers, fsdp2"):
        case = {"strategy": name, **UP_TO_24}
        TWO_RANKS[f"{name}, found before"] = {**case, "find": True, "trainer": VALIDATES}
    TWO_RANKS["fsdp2 by name"] = {"strategy": "fsdp2 by name", **UP_TO_24}
    TWO_RANKS["fsdp2 budgets"] = {"strategy": "fsdp2", "budgets": [400, 300]}
    TWO_RANKS["fsdp2"] = {"strategy": "fsdp2", "trainer": ACCUMULATES, **UP_TO_24}
THREE_RANKS = {"three budgets": {"budgets": [400, 200, 300]}}
ALL = TWO_RANKS | THREE_RANKS
UP_TO_24_CASES = [name for name, case in ALL.items() if case.items() >= UP_TO_24.items()]


@pytest.fixture(scope="module")
def seen(launch):
    """The results of each rank in each case; cases with as many ranks share a process group."""
    found = {}
    hard_coded = {"search": False, "batch_size": "24"}
    coded = {f"{name}, coded": {**ALL[name], **hard_coded} for name in UP_TO_24_CASES}
    for cases, ranks in ((TWO_RANKS | coded, 2), (THREE_RANKS, 3)):
        codes, of_cases, output = launch(cases, ranks)
        assert codes == [0] * ranks, output
        found.update(of_cases)
    return found


@pytest.mark.parametrize("how", ["callback", "later", "a text"])
def test_a_size_for_a_later_state_is_one_on_all_ranks(seen, how):
    plan = same_plan(seen[f"unfrozen by {how}"])
    filling = (plan["limit_bytes"] / MIB - 100) / 2
    assert 0.9 < plan["batch_size"] / filling <= 0.97
    assert plan["chosen"]["is_verified"]
    assert plan["chosen"]["state"]


@pytest.mark.parametrize(
    ("case", "batches"), [("rank 0 keeps in training", 13), ("rank 1 keeps in validation", 10)]
)
@pytest.mark.parametrize("more", ["", ", collectives"])
def test_what_only_one_rank_keeps_counts_on_all(seen, case, batches, more):
    case += more
    plan = same_plan(seen[case])
    assert plan["trials"][-1]["growth"] == {
        "batch_bytes": MIB,
        "batches": batches,
        "batches_run": 8 if "training" in case else 9,
        "is_of_epoch": True,
        "is_of_validation": "validation" in case,
    }
    assert plan["chosen"]["is_verified"]


def same_plan(of_ranks):
    """The plan of all ranks, which they train with."""
    plans = [one.get("plan") or one for one in of_ranks]
    assert all(plan == plans[0] for plan in plans), plans
    assert {one["sizes"][0] for one in of_ranks} == {plans[0]["batch_size"]}
    return plans[0]


@pytest.mark.parametrize(
    "case",
    [
        name
        for name, case in ALL.items()
        if case.get("budgets")
        and name not in ("resumes", "resumes as before", "own size does not fit on rank 1")
        and not name.startswith("optional")
    ],
)
def test_the_rank_with_the_least_memory_decides(seen, case):
    plan = same_plan(seen[case])
    least = min(ALL[case]["budgets"])
    is_collective = case in ("collectives", "fsdp budgets", "fsdp2 budgets")
    # The chosen size is such a share of the size that fills the limit, which is 0.95 of the budget.
    least_share, most_share = (0.82, 0.85) if is_collective else (0.90, 0.97)
    assert (plan["chosen"]["limited_by"], plan["limit_bytes"]) == (
        "memory",
        int(0.95 * least * MIB),
    )
    filling = plan["limit_bytes"] / MIB - 100
    assert least_share < plan["batch_size"] / filling <= most_share
    kinds = [trial["kind"] for trial in plan["trials"]]
    assert kinds.count("rehearsal") == (1 if is_collective else 2)


@pytest.mark.parametrize("case", ["shared memory", "shared memory of workers"])
def test_the_ranks_of_a_machine_divide_memory_that_they_share(seen, case):
    plan = same_plan(seen[case])
    assert plan["recipe"]["effective_batch_size"] == 2 * plan["batch_size"]
    assert plan["limit_bytes"] == 400 / 2 * MIB
    assert LESS_THAN_LIMIT in texts_of(plan)


@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_out_of_memory_on_one_rank_makes_all_step_down(seen, where):
    plan = same_plan(seen[f"{OUT} in {where}"])
    failed = [trial for trial in plan["trials"] if trial["outcome"] == "out_of_memory"]
    assert {trial["error"] for trial in failed} == {"on rank 1: OutOfMemoryError: made up"}
    assert 50 < plan["batch_size"] < min(trial["batch_size"] for trial in failed)


def test_no_size_fits_on_one_rank(seen):
    for one in seen["nothing fits"]:
        start = "NothingFitsError: Nothing fits: 2 samples, the smallest size allowed"
        assert one["error"].startswith(start)
        assert "on rank 1: OutOfMemoryError: made up" in one["error"]
        assert LESS_THAN_LIMIT in one["error"]


@pytest.mark.parametrize("case", [name for name in ALL if name.startswith("error")])
def test_an_error_between_steps_reaches_the_other_rank(seen, case):
    rank = ALL[case]["fails"].get("rank", 1)
    assert seen[case][rank]["error"] == "ValueError: made up"
    error = f"RankFailedError: rank {rank} ended the search: ValueError: made up"
    assert seen[case][1 - rank]["error"] == error


def test_exchanges_through_lightning_do_not_make_a_step_collective(seen):
    plan = same_plan(seen["exchanges"])
    assert plan["batch_size"] <= 50
    assert "out_of_memory" in {trial["outcome"] for trial in plan["trials"]}
    assert "evaluation" in plan["memory"]["lines"]


def test_ranks_take_as_many_collective_steps_when_only_one_repeats_them(seen):
    plan = same_plan(seen["collectives"])
    # Without repeated steps there are seven, and a short training has no more than ten.
    assert plan["trials"][-1]["full_steps"] == 10


def test_a_hook_of_an_epoch_that_needs_all_ranks_makes_steps_collective(seen):
    plan = same_plan(seen["collectives of an epoch"])
    assert [trial["kind"] for trial in plan["trials"]].count("rehearsal") == 1


def test_target_and_learning_rate_count_the_samples_of_all_ranks(seen):
    plan = same_plan(seen["target"])
    samples = plan["batch_size"] * 2 * plan["recipe"]["accumulate_grad_batches"]
    assert samples == plan["recipe"]["effective_batch_size"] == 96
    # Before the search an optimizer step had 4 samples on each of 2 ranks.
    assert plan["recipe"]["learning_rate"] == 96 / 8 * plan["project_recipe"]["learning_rate"]


def test_by_default_all_ranks_raise_their_size_by_half(seen):
    plan = same_plan(seen["own size"])
    assert (plan["batch_size"], plan["chosen"]["limited_by"]) == (12, "recipe")
    assert plan["training"].startswith(
        "3 steps of 16 (2 ranks x 8) -> 24 (2 ranks x 12) samples: 1.5 times the samples"
    )
    own, chosen = plan["chosen"]["speeds"]
    assert (own["batch_size"], chosen["batch_size"]) == (8, 12)


def test_all_ranks_accumulate_where_the_own_size_does_not_fit_on_one_of_them(seen):
    plan = same_plan(seen["own size does not fit on rank 1"])
    assert (plan["batch_size"], plan["recipe"]["accumulate_grad_batches"]) == (80, 2)
    assert plan["recipe"]["effective_batch_size"] == 320
    assert plan["recipe"]["trainer_settings"] == {"limit_train_batches": 6}


@pytest.mark.parametrize("case", ["resumes", "resumes as before"])
def test_a_resumed_run_continues_without_a_search(seen, case):
    plan = same_plan(seen["saves"])
    assert same_plan(seen[case]) == plan
    assert [(one["releases"], one["left"]["steps"]) for one in seen[case]] == [(0, 5)] * 2


def test_all_ranks_search_again_where_one_of_them_has_less(seen):
    found = seen["resumes with less on rank 1"]
    assert all(one["releases"] > 0 for one in found)
    assert same_plan(found)["batch_size"] < same_plan(seen["saves"])["batch_size"]


def test_the_first_rank_decides_whether_an_earlier_plan_is_used_again(seen):
    plan = same_plan(seen["saves"])
    again = same_plan(seen["reuses"])
    why = "the size of an earlier plan, which passed a rehearsal on this device."
    assert again["chosen"]["why"] == why
    rehearsals = [trial for trial in again["trials"] if trial["kind"] == "rehearsal"]
    # One is of this size, and the other failed or was of a smaller size.
    assert len(rehearsals) == 2
    assert again["limit_bytes"] == plan["limit_bytes"]
    searched = same_plan(seen["reuses with less on rank 1"])
    assert "The earlier plan was not used: the limit was" in texts_of(searched)
    assert searched["batch_size"] < plan["batch_size"]


@pytest.mark.parametrize("case", UP_TO_24_CASES)
def test_training_is_that_with_the_size_hard_coded(seen, case):
    assert same_plan(seen[case])["batch_size"] == 24
    for name in ("left", "sizes", "batches"):
        assert [one[name] for one in seen[case]] == [one[name] for one in seen[f"{case}, coded"]]
    # The ranks have different samples.
    assert len({one["batches"] for one in seen[case]}) == len(seen[case])
    assert [one["not_restored"] for one in seen[case]] == [[]] * len(seen[case])


def test_the_parameters_of_a_plan_are_those_before_they_are_sharded(seen):
    assert same_plan(seen["fsdp, one flat parameter"])["parameters"] == "193 in 6 tensors"
    assert same_plan(seen["fsdp"])["parameters"] == "193 in 6 tensors"


@pytest.mark.parametrize("hook", ["loader", "own class", "made at first"])
def test_a_constant_in_a_hook_is_set_on_all_ranks(seen, hook):
    plan = same_plan(seen[f"hook: {hook}"])
    assert (plan["batch_size"], plan["place"]) == (24, "train_dataloader()")


@pytest.mark.parametrize("case", OPTIONAL)
def test_an_optional_search_that_fails_leaves_the_training_of_all_ranks(seen, case):
    for one, coded in zip(seen[case], seen[f"{case}, coded"], strict=True):
        assert one["plan"] is None
        for name in ("left", "sizes", "batches"):
            assert one[name] == coded[name]
    # Lightning's warnings are those of rank 0.
    assert [len(one["warnings"]) for one in seen[case]] == [1, 0]


def test_a_training_with_a_budget_is_that_with_the_budget_hard_coded(seen):
    of_ranks = seen["max_tokens"]
    plans = [one["plan"] for one in of_ranks]
    assert plans[0] == plans[1]
    assert (plans[0]["batch_size"], plans[0]["budget_name"]) == (24, "max_tokens")
    for name in ("left", "sizes", "batches"):
        assert [one[name] for one in of_ranks] == [one[name] for one in seen["max_tokens, coded"]]
    assert len(of_ranks[0]["sizes"]) == len(of_ranks[1]["sizes"])
    assert of_ranks[0]["batches"] != of_ranks[1]["batches"]


def test_a_sampler_that_lightning_would_replace_is_refused(seen):
    for one in seen["max_tokens that Lightning would divide"]:
        assert "Trainer must have use_distributed_sampler=False" in one["error"]


def test_out_of_memory_in_a_collective_step_ends_both_ranks(launch):
    case = {"ends": True, "collectives": True, **fails(OUT, "forward", 8)}
    codes, _, output = launch({"case": case})
    assert codes == [1, 1]
    assert "that all ranks take together" in output[0]
    assert "RankFailedError" not in output[1]


def test_a_rank_that_is_killed_between_steps_ends_the_other(launch):
    codes, _, output = launch({"case": {"ends": True, **fails("SIGKILL", "backward", 8)}})
    assert codes == [1, -signal.SIGKILL]
    assert "RankLostError: another rank ended without a message" in output[0]


SCRIPT = [str(ROOT / "tests" / "helpers" / "search_ranks.py")]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *SCRIPT]


def lives(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(
    ("launcher", "error"),
    [(TORCHRUN, "ValueError"), (SCRIPT, "SIGKILL")],
    ids=["torchrun", "Lightning"],
)
def test_the_launcher_ends_all_ranks(tmp_path, launcher, error):
    case = {"collectives": True, **fails(error, "backward", 8)}
    timeout = ["timeout", "--kill-after=5", str(WAIT_SECONDS)]
    command = [*timeout, sys.executable, *launcher, json.dumps(case), tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False)
    assert time.time() - float((tmp_path / "failed_at").read_text()) < 60
    # The status is 124 where `timeout` ended the launcher.
    assert done.returncode not in (0, 124)
    pids = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert not any(map(lives, pids))
