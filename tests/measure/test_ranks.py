"""Searches on several ranks, with real processes (gloo)."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lightning_batchmem.devices.base import MemoryStats
from lightning_batchmem.measure.ranks import Ranks, own_budget_bytes
from lightning_batchmem.plan.records import Trial
from tests.search_ranks import MIB, Case, run_rank

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 240
END_SECONDS = 60
SHARDS_HERE = hasattr(torch.distributed.fsdp, "fully_shard")
needs_fsdp2 = pytest.mark.skipif(not SHARDS_HERE, reason="FSDP2 of torch 2.5 needs GPUs")


def trainer_of(**attributes: Any) -> Any:
    strategy = SimpleNamespace(root_device=torch.device("cpu"), **attributes)
    return SimpleNamespace(world_size=1, global_rank=0, strategy=strategy)


def test_one_rank_exchanges_nothing_and_keeps_its_error():
    ranks, trial, error = Ranks(trainer_of()), Trial(8, "ok", {"forward": 50}), ValueError("the user's own error")
    assert ranks.exchange(3) == [3]
    assert ranks.worst_of_all(trial) is trial
    with pytest.raises(ValueError, match="the user's own error") as caught, ranks.fail_together():
        raise error
    assert caught.value is error


@pytest.mark.parametrize(("name", "processes", "own_bytes"), [("host", 1, 900), ("host", 4, 300), ("cuda", 4, 900)])
def test_ranks_of_one_node_share_the_memory_of_the_host(name: str, processes: int, own_bytes: int):
    device: Any = SimpleNamespace(name=name, budget_bytes=lambda: 900, current=lambda: MemoryStats(100))
    assert own_budget_bytes(device, trainer_of(num_processes=processes)) == own_bytes


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_until_gone(directory: Path, pids: list[int], *, seconds: float) -> None:
    """Wait for the end of these processes and of all ranks that have started; end those that are left."""
    until = time.monotonic() + seconds
    while True:
        ranks = [int(text) for file in directory.glob("*.pid") if (text := file.read_text())]
        left = [pid for pid in {*pids, *ranks} if is_running(pid)]
        if not left:
            return
        if time.monotonic() > until:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            output = "\n".join(file.read_text()[-3000:] for file in sorted(directory.glob("*.out")))
            raise AssertionError(f"{len(left)} processes did not end:\n{output}")
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


Launch = Callable[..., tuple[list[int | None], dict[str, list[dict[str, Any]]], list[str]]]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Run cases on ranks; returns exit codes, what the ranks saw in each case, and their output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.search_ranks"])  # torch and Lightning are imported once

        def run(cases: dict[str, Case], ranks: int = 2) -> Any:
            directory, port = tmp_path_factory.mktemp("ranks"), free_port()
            processes = [
                context.Process(target=run_rank, args=(cases, directory, rank, ranks, port)) for rank in range(ranks)
            ]
            for process in processes:
                process.start()
            wait_until_gone(directory, [process.pid for process in processes], seconds=WAIT_SECONDS)
            for process in processes:
                process.join(5)
            seen = [json.loads(file.read_text()) for file in sorted(directory.glob("*.json"))]
            output = [(directory / f"{rank}.out").read_text() for rank in range(ranks)]
            of_case = {name: [one[name] for one in seen if name in one] for name in cases}
            return [process.exitcode for process in processes], of_case, output

        yield run


def fails(error: str, where: str, size: int, **more: Any) -> dict[str, Any]:
    return {"error": error, "where": where, "size": size, **more}


OUT = "OutOfMemoryError"
SMALL_BUCKETS = {"bucket_cap_mb": 0.0001}
AS_PROJECTS_DO = {
    "validates": True,
    "scheduled": True,  # over the optimizer steps that are to come
    "steps": -1,
    "trainer": {"accumulate_grad_batches": 2, "max_epochs": 2},
}
AT_24 = {"finder": {"max_batch_size": 24}, "steps": 8}  # with the memory of the host

TWO_RANKS: dict[str, Case] = {
    "equal budgets": {"budgets": [300, 300]},
    "less on rank 0": {"budgets": [300, 400]},
    "less on rank 1": {"budgets": [400, 300]},
    **{
        f"{OUT} in {where}": {"budgets": [400, 400], "fails": fails(OUT, where, 100)}
        for where in ("forward", "backward", "optimizer")
    },
    "nothing fits": {"budgets": [400, 400], "fails": fails(OUT, "backward", 1)},
    "error on rank 0": {"budgets": [400, 400], "fails": fails("ValueError", "backward", 8, rank=0)},
    "error on rank 1": {"budgets": [400, 400], "fails": fails("ValueError", "optimizer", 8)},
    "error in the first step": {"collectives": True, "budgets": [400, 400], "fails": fails("ValueError", "forward", 1)},
    "error before the search": {"budgets": [400, 400], "fails": fails("ValueError", "configure_optimizers", 0)},
    "exchanges": {"budgets": [400, 400], "exchanges": True, "validates": True, "more_on_rank_1": 300},
    "collectives": {"budgets": [400, 300], "collectives": True},
    "target": {
        "budgets": [400, 400],
        "finder": {"target_batch_size": 96, "lr_scaling": "linear", "base_batch_size": 48},
    },
    "saves": {"budgets": [300, 250], "saves": True, "steps": 4},
    "resumes": {"budgets": [300, 250], "saves": True, "resumes": True, "steps": 6},
    "validate": {"budgets": [300, 250], "validates": True, "entry": "validate"},
    "ddp with collectives": {"collectives": True, **AT_24},
}
FSDP2: dict[str, Case] = {
    "fsdp2 budgets": {"strategy": "fsdp2", "budgets": [400, 300]},
    "fsdp2": {"strategy": "fsdp2", **AT_24, **AS_PROJECTS_DO},
}
THREE_RANKS: dict[str, Case] = {
    "three budgets": {"budgets": [400, 300, 200]},
    "ddp": {"ddp": SMALL_BUCKETS, **AT_24, **AS_PROJECTS_DO},
    "ddp with options": {
        "ddp": {"find_unused_parameters": True, "gradient_as_bucket_view": True, **SMALL_BUCKETS},
        **AT_24,
    },
}


def with_hard_coded(cases: dict[str, Case]) -> dict[str, Case]:
    """The cases that search up to 24 samples, and each of them again with that size hard-coded."""
    coded = {
        f"{name}, hard-coded": {**case, "search": False, "batch_size": 24}
        for name, case in cases.items()
        if case.get("finder", {}).get("max_batch_size") == 24
    }
    return {**cases, **coded}


@pytest.fixture(scope="module")
def seen(launch: Launch) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw in each case; all cases of as many ranks run in one process group."""
    found = {}
    for cases, ranks in ((TWO_RANKS | (FSDP2 if SHARDS_HERE else {}), 2), (THREE_RANKS, 3)):
        codes, of_case, output = launch(with_hard_coded(cases), ranks)
        assert codes == [0] * ranks, output
        found.update(of_case)
    return found


def same_plan(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan of all ranks, which they train with."""
    plans = [one.get("plan") or one for one in of_ranks]
    assert all(plan == plans[0] for plan in plans), plans
    assert {(one["left"]["sizes"] or one["left"]["evaluated"])[0] for one in of_ranks} == {plans[0]["batch_size"]}
    return plans[0]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "least"),
    [
        ("equal budgets", 300),
        ("less on rank 0", 300),
        ("less on rank 1", 300),
        ("three budgets", 200),
        ("collectives", 300),
        pytest.param("fsdp2 budgets", 300, marks=needs_fsdp2),
    ],
)
def test_the_rank_with_the_least_memory_decides(seen, case: str, least: int):
    plan = same_plan(seen[case])
    share = 0.85 if case in ("collectives", "fsdp2 budgets") else 0.94  # of the limit, 0.95 of the budget
    assert (plan["limited_by"], plan["limit_bytes"]) == ("memory", int(0.95 * least * MIB))
    assert share - 0.03 < (100 + plan["batch_size"]) * MIB / plan["limit_bytes"] <= share
    assert [trial["kind"] for trial in plan["trials"]].count("rehearsal") == (1 if share == 0.85 else 2)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_out_of_memory_on_one_rank_makes_all_step_down(seen, where: str):
    plan = same_plan(seen[f"{OUT} in {where}"])
    failed = [trial for trial in plan["trials"] if trial["outcome"] == "out_of_memory"]
    assert {trial["error"] for trial in failed} == {"on rank 1: OutOfMemoryError: CUDA out of memory (made up)"}
    assert 50 < plan["batch_size"] < min(trial["batch_size"] for trial in failed)


@pytest.mark.slow
def test_no_size_fits_on_one_rank(seen):
    for one in seen["nothing fits"]:
        assert one["error"].startswith("RuntimeError: Nothing fits: 2 samples, the smallest size allowed")
        assert "rank 1: OutOfMemoryError: CUDA out of memory (made up)" in one["error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "rank"),
    [("error on rank 0", 0), ("error on rank 1", 1), ("error in the first step", 1), ("error before the search", 1)],
)
def test_an_error_between_steps_reaches_the_other_rank(seen, case: str, rank: int):
    own, other = seen[case][rank]["error"], seen[case][1 - rank]["error"]
    assert own == "ValueError: the user's own error"
    assert other == f"RankFailedError: rank {rank} ended the search: {own}"


@pytest.mark.slow
def test_exchanges_through_lightning_do_not_make_a_step_collective(seen):
    plan = same_plan(seen["exchanges"])
    assert plan["batch_size"] <= 50  # more runs out of memory on rank 1
    assert "out_of_memory" in {trial["outcome"] for trial in plan["trials"]}
    assert "evaluation" in plan["memory"]["lines"]


@pytest.mark.slow
def test_target_and_learning_rate_count_the_samples_of_all_ranks(seen):
    plan = same_plan(seen["target"])
    assert plan["batch_size"] * 2 * plan["accumulate_grad_batches"] == plan["effective_batch_size"] == 96
    assert plan["learning_rate"] == 2 * plan["learning_rate_before"]


@pytest.mark.slow
def test_a_resumed_run_continues_without_a_search(seen):
    plan = same_plan(seen["saves"])
    for one in seen["resumes"]:
        assert (one["plan"], one["releases"], one["left"]["steps"]) == (plan, 0, 6)
        assert one["left"]["sizes"] == [plan["batch_size"]] * 2


@pytest.mark.slow
def test_an_evaluation_has_one_plan(seen):
    plan = same_plan(seen["validate"])
    assert plan["limit_bytes"] == int(0.95 * 250 * MIB)
    assert [one["left"]["evaluated"][0] for one in seen["validate"]] == [plan["batch_size"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["ddp", "ddp with options", "ddp with collectives", pytest.param("fsdp2", marks=needs_fsdp2)]
)
def test_training_is_that_with_the_size_hard_coded(seen, case: str):
    assert same_plan(seen[case])["batch_size"] == 24
    coded = seen[f"{case}, hard-coded"]
    assert [one["left"] for one in seen[case]] == [one["left"] for one in coded]
    batches = [one["batches"] for one in seen[case]]
    assert batches == [one["batches"] for one in coded]
    assert len(set(batches)) == len(batches)  # each rank has other samples


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"collectives": True, "fails": fails(OUT, "forward", 8)}, id="the user's own collectives"),
        pytest.param({"fails": fails(OUT, "backward", 8, synchronized=True)}, id="the synchronized step"),
    ],
)
def test_out_of_memory_in_a_collective_step_ends_both_ranks(launch, case: Case):
    codes, _, output = launch({"case": {"budgets": [400, 400], "ends": True, **case}})
    assert codes == [1, 1]
    assert "RankFailedError" not in output[1]
    assert "CUDA out of memory (made up)" in output[1]
    assert "that all ranks take together" in output[1]


@pytest.mark.slow
def test_a_rank_that_is_killed_between_steps_ends_the_other(launch):
    codes, _, output = launch({"case": {"budgets": [400, 400], "ends": True, "fails": fails("SIGKILL", "backward", 8)}})
    assert codes == [1, -signal.SIGKILL]
    assert "RankFailedError: another rank ended without a message; rank 0 waited for it" in output[0]


SCRIPT = [str(ROOT / "tests" / "search_ranks.py")]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *SCRIPT]


@pytest.mark.slow
@pytest.mark.parametrize("error", ["ValueError", "SIGKILL"])
@pytest.mark.parametrize("launcher", [TORCHRUN, SCRIPT], ids=["torchrun", "Lightning"])
def test_the_launcher_ends_all_ranks(tmp_path: Path, launcher: list[str], error: str):
    case = {"collectives": True, "budgets": [400, 400], "fails": fails(error, "backward", 8)}
    command = [sys.executable, *launcher, json.dumps(case), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "command.out").open("w") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output)
        wait_until_gone(tmp_path, [process.pid], seconds=WAIT_SECONDS)
    assert time.time() - float((tmp_path / "failed_at").read_text()) < END_SECONDS
    assert process.wait(5) != 0
    assert len(list(tmp_path.glob("*.pid"))) == 2
