"""Searches on several ranks, with real processes (gloo): one answer, and nobody left waiting."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lightning_batchmem.devices.base import MemoryStats
from lightning_batchmem.measure.ranks import _TELL_SECONDS, Ranks, own_budget_bytes, worst_of_all
from lightning_batchmem.plan.records import Trial
from tests.search_ranks import train_as_rank

MIB = 2**20
ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 60


@dataclass(frozen=True)
class Ended:
    codes: list[int | None]
    said: list[str]
    seen: list[dict[str, Any]]


@pytest.fixture(scope="module")
def forks() -> Iterator[Any]:
    """Where ranks come from: a process that has imported torch and Lightning once, for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.search_ranks"])
        yield context


@pytest.fixture
def search(forks: Any, tmp_path: Path) -> Any:
    """Train, on ranks that the test starts, and wait for the end of each; one that does not end is a failure."""

    def run(name: str = "run", **asked: Any) -> Ended:
        directory = tmp_path / name
        directory.mkdir()
        asked = {"ranks": 2, "budgets": [400] * 3, **asked}
        port = free_port()
        ranks = [
            forks.Process(target=train_as_rank, args=(asked, directory, rank, port)) for rank in range(asked["ranks"])
        ]
        for rank in ranks:
            rank.start()
        wait_for_all([rank.pid for rank in ranks])
        for rank in ranks:
            rank.join(5)
        files = sorted(directory.glob("rank*.json"))
        return Ended(
            [rank.exitcode for rank in ranks],
            [(directory / f"rank{rank}.out").read_text() for rank in range(len(ranks))],
            [json.loads(file.read_text()) for file in files],
        )

    return run


def wait_for_all(groups: list[int], *, seconds: float = WAIT_SECONDS) -> None:
    """Wait until no process of these groups is left, workers too; kill what is."""
    until = time.monotonic() + seconds
    try:
        while left := alive(groups):
            assert time.monotonic() < until, f"still there: {left}"
            time.sleep(0.2)
    finally:
        for group in groups:
            if alive([group]):
                os.killpg(group, signal.SIGKILL)


def alive(groups: list[int]) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) in groups and process.status() != psutil.STATUS_ZOMBIE:
                found.append(str(process))
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Device:
    """What a search asks a meter for before it has run anything."""

    def __init__(self, name: str, budget_bytes: int, held_bytes: int) -> None:
        self.name, self._budget_bytes, self._held_bytes = name, budget_bytes, held_bytes

    def budget_bytes(self) -> int:
        return self._budget_bytes

    def current(self) -> MemoryStats:
        return MemoryStats(self._held_bytes, None)


def trainer_of(**attributes: Any) -> Any:
    strategy = SimpleNamespace(root_device=torch.device("cpu"), **attributes)
    return SimpleNamespace(world_size=1, global_rank=0, strategy=strategy)


def test_one_rank_exchanges_with_nobody():
    ranks = Ranks(trainer_of())
    assert (ranks.size, ranks.rank) == (1, 0)
    assert ranks.exchange(1, 2.5) == [[1, 2.5]]
    assert ranks.exchange() == [[]]


def test_one_rank_keeps_its_own_error():
    ranks = Ranks(trainer_of())
    error = ValueError("the user's own")
    with pytest.raises(ValueError, match="the user's own") as caught, ranks.fail_together(), ranks.collective_step():
        raise error
    assert caught.value is error
    assert ranks.in_step  # it has failed in one


def test_a_step_that_went_well_is_over():
    ranks = Ranks(trainer_of())
    with ranks.collective_step():
        assert ranks.in_step
    assert not ranks.in_step


class Rows:
    """Ranks whose exchange is written down: what each of the others gave beside this one."""

    size = 3

    def __init__(self, *others: list[float]) -> None:
        self._others = others

    def exchange(self, *numbers: float) -> list[list[float]]:
        rows = [[float(number) for number in numbers], *self._others]
        assert {len(row) for row in rows} == {len(numbers)}
        return rows

    def hear_from(self, rank: int, text: str) -> str:
        return text or f"what {rank} says"


TRIAL = Trial(8, "ok", {"forward": 50, "backward": 70}, noise_bytes=3, peak_reserved_bytes=90, step_seconds=0.5)


def test_one_rank_agrees_with_itself():
    assert worst_of_all(TRIAL, Ranks(trainer_of())) is TRIAL


def test_the_worst_of_all_ranks_is_what_they_agree_on():
    #         size, out, noise, loose, fixed, workers, measured, full, samples, reserved, seconds, phases
    low = [8.0, 0.0, 1.0, -1.0, 4.0, 0.0, 2.0, 3.0, 16.0, -1.0, 0.25, 10.0, 20.0, -1.0, -1.0]
    high = [8.0, 0.0, 9.0, 0.25, 7.0, 5.0, 1.0, 2.0, 24.0, 200.0, -1.0, 60.0, 65.0, 40.0, -1.0]
    own = replace(TRIAL, measured_steps=4, full_steps=5, samples_run=40, worker_bytes=2, fixed_bytes=6)
    assert worst_of_all(own, Rows(low, high)) == Trial(  # type: ignore[arg-type]
        8,
        "ok",
        {"forward": 60, "backward": 70, "optimizer_step": 40},
        noise_bytes=9,
        peak_reserved_bytes=200,
        step_seconds=0.5,
        measured_steps=1,
        full_steps=2,
        samples_run=40,
        worker_bytes=5,
        fixed_bytes=4,
        loose_share=0.25,
    )


def test_what_no_rank_has_stays_missing():
    nothing = [8.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    trial = worst_of_all(Trial(8, "ok", {}), Rows(nothing, nothing))  # type: ignore[arg-type]
    assert (trial.phase_peak_bytes, trial.peak_reserved_bytes, trial.step_seconds) == ({}, None, None)
    assert trial.loose_share is None


def test_out_of_memory_on_one_rank_is_so_for_all_and_says_where():
    fine = [8.0, 0.0, 0.0, -1.0, 0.0, 0.0, 1.0, 1.0, 8.0, -1.0, 0.1, 10.0, 20.0, -1.0, -1.0]
    trial = worst_of_all(TRIAL, Rows(fine, [8.0, 1.0, *fine[2:]]))  # type: ignore[arg-type]
    assert (trial.outcome, trial.error) == ("out_of_memory", "on rank 2: what 2 says")
    trial = worst_of_all(replace(TRIAL, outcome="out_of_memory", error="its own"), Rows(fine, fine))  # type: ignore[arg-type]
    assert (trial.outcome, trial.error) == ("out_of_memory", "on rank 0: its own")


def test_ranks_that_ran_different_sizes_are_a_mistake_of_ours():
    other = [4.0, *[0.0] * 14]
    with pytest.raises(RuntimeError, match=r"different sizes, \[4.0, 8.0\]; please report this"):
        worst_of_all(TRIAL, Rows(other, other))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "processes", "own_bytes"),
    [("host", {}, 900), ("host", {"num_processes": 1}, 900), ("host", {"num_processes": 4}, 300), ("cuda", {}, 900)],
)
def test_ranks_share_what_is_left_of_the_host(name: str, processes: dict[str, int], own_bytes: int):
    device_memory: Any = Device(name, budget_bytes=900, held_bytes=100)
    assert own_budget_bytes(device_memory, trainer_of(**processes)) == own_bytes


def test_a_device_is_a_rank_s_own():
    device_memory: Any = Device("cuda", budget_bytes=900, held_bytes=100)
    assert own_budget_bytes(device_memory, trainer_of(num_processes=4)) == 900


def same_plan(ended: Ended, *, ranks: int = 2) -> dict[str, Any]:
    """The plan of all ranks, which train with it."""
    assert set(ended.codes) == {0}, ended.said
    plans = [seen["plan"] for seen in ended.seen]
    assert len(plans) == ranks
    for plan in plans:
        assert plan == plans[0]
    assert [seen["sizes"][0] for seen in ended.seen] == [plans[0]["batch_size"]] * len(plans)
    return plans[0]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "budgets", "batch_size"),
    [
        ("ddp", [300, 300], 192),
        ("ddp", [400, 300], 192),
        ("ddp", [300, 400], 192),
        ("ddp", [200, 200, 200], 96),
        ("ddp", [400, 300, 200], 96),
        ("fsdp2", [400, 300], 192),
    ],
)
def test_the_rank_with_the_least_memory_decides(search, strategy: str, budgets: list[int], batch_size: int):
    plan = same_plan(search(ranks=len(budgets), strategy=strategy, budgets=budgets), ranks=len(budgets))
    assert (plan["batch_size"], plan["limited_by"]) == (batch_size, "memory")
    assert plan["limit_bytes"] == min(budgets) * MIB


SMALL_BUCKETS = {"bucket_cap_mb": 0.0001}
AS_PROJECTS_DO = {
    "data": "datamodule",
    "validates": True,
    "scheduled": True,  # over the optimizer steps that are to come
    "steps": -1,
    "trainer": {"accumulate_grad_batches": 2, "max_epochs": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"ranks": 3, "ddp": SMALL_BUCKETS}, id="ddp, several buckets"),
        pytest.param(
            {"ranks": 3, "unused": True, "ddp": {"find_unused_parameters": True, "gradient_as_bucket_view": True}},
            id="ddp, unused parameters, gradients are views",
        ),
        pytest.param(
            {"ranks": 3, "ddp": {**SMALL_BUCKETS, "static_graph": True, "gradient_as_bucket_view": True}},
            id="ddp, static graph",
        ),
        pytest.param({"ranks": 3, "ddp": SMALL_BUCKETS, **AS_PROJECTS_DO}, id="ddp, as projects do"),
        pytest.param({"data": "stream"}, id="ddp, a stream on each rank"),
        pytest.param({"strategy": "fsdp2"}, id="fsdp2"),
        pytest.param({"strategy": "fsdp2", **AS_PROJECTS_DO}, id="fsdp2, as projects do"),
    ],
)
def test_training_is_that_with_the_size_hard_coded(search, asked: dict[str, Any]):
    asked = {"steps": 12, **asked}
    found = search("searched", finder={"max_batch_size": 24}, **asked)
    assert same_plan(found, ranks=asked.get("ranks", 2))["batch_size"] == 24
    hard_coded = search("hard-coded", search=False, batch_size=24, **asked)
    assert set(hard_coded.codes) == {0}
    for searched, coded in zip(found.seen, hard_coded.seen, strict=True):
        for name in ("sizes", "evaluated", "global_step", "left"):
            assert searched[name] == coded[name], name
    batches = {seen["left"]["batches"] for seen in found.seen}
    assert len(batches) == len(found.seen)  # each rank has samples of its own


@pytest.mark.slow
def test_a_sharded_model_leaves_room_for_more_samples(search):
    """With the bytes of real tensors: 0.5 MiB of weights, as much of gradients and twice as much of Adam's moments."""
    asked = {"live_bytes": True, "width": 128, "samples": 2000, "budgets": [3, 3], "steps": 1}
    plans = {name: same_plan(search(name, strategy=name, **asked)) for name in ("ddp", "fsdp2")}
    fixed_bytes = {
        name: max(line["intercept"] for line in plan["memory"]["lines"].values()) for name, plan in plans.items()
    }
    assert 2.5 * MIB < fixed_bytes["ddp"] < 2.8 * MIB  # DDP's buckets are a second copy of the gradients
    assert 0.4 < fixed_bytes["fsdp2"] / fixed_bytes["ddp"] < 0.55
    assert [plan["limited_by"] for plan in plans.values()] == ["memory", "memory"]
    assert plans["fsdp2"]["batch_size"] > 3 * plans["ddp"]["batch_size"]


@pytest.mark.slow
def test_the_rank_with_the_fewest_samples_bounds_the_size(search):
    """600 on one and 300 on the other, as a sampler of the project's own may give them."""
    trainer = {"use_distributed_sampler": False}
    plan = same_plan(search(data="uneven", budgets=[900, 900], trainer=trainer, steps=1))
    assert (plan["batch_size"], plan["limited_by"]) == (296, "dataset")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "entry"), [("ddp", "validate"), ("fsdp2", "test")])
def test_an_evaluation_is_that_with_the_size_hard_coded(search, strategy: str, entry: str):
    found = search("searched", strategy=strategy, entry=entry, budgets=[300, 250])
    hard_coded = search("hard-coded", strategy=strategy, entry=entry, search=False, batch_size=144)
    assert set(found.codes) == set(hard_coded.codes) == {0}, found.said
    for searched, coded in zip(found.seen, hard_coded.seen, strict=True):
        assert (searched["plan"]["batch_size"], searched["plan"]["limited_by"]) == (144, "memory")
        assert searched["evaluated"] == coded["evaluated"] == [144, 144, 12]
        assert searched["left"] == coded["left"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_resumed_run_goes_on_with_the_plan_of_its_checkpoint(search, tmp_path, strategy: str):
    """Beside a MemoryProfiler and a ModelCheckpoint, whose checkpoint under FSDP2 is a directory of shards."""
    asked = {"strategy": strategy, "profiled": True, "budgets": [300, 250]}
    first = search("first", **asked)
    plan = same_plan(first)
    assert (plan["batch_size"], plan["limited_by"]) == (144, "memory")
    directory, checkpoint = tmp_path / "first", tmp_path / "first" / "last.ckpt"
    assert "Peaks of 2 ranks: " in first.said[0]
    assert (directory / "memory_per_batch.csv").read_text().count("\n") == 5
    assert json.loads((directory / "batch_plan.json").read_text())["batch_size"] == 144
    assert checkpoint.is_dir() == (strategy == "fsdp2")

    resumed = search("resumed", **asked, steps=8, resume=str(checkpoint))
    assert "although" not in resumed.said[0]  # nothing has changed
    if strategy == "fsdp2":  # loads its checkpoint after the search, and so searches again
        assert same_plan(resumed)["batch_size"] == 144
    else:
        assert same_plan(resumed) == plan
    for seen in resumed.seen:
        assert (seen["probes"] > 0) == (strategy == "fsdp2")
        assert (len(seen["sizes"]), seen["global_step"]) == (4, 8)


@pytest.mark.slow
@pytest.mark.parametrize("on_rank", [0, 1])
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_out_of_memory_at_the_first_size_is_told_by_all(search, where: str, on_rank: int):
    ended = search(trouble="out of memory", where=where, on_rank=on_rank)
    assert ended.codes == [1, 1]
    for said in ended.said:
        assert f"ran out of memory (on rank {on_rank}: OutOfMemoryError: CUDA out of memory (made up))" in said
    assert ended.seen == []


@pytest.mark.slow
@pytest.mark.parametrize(("on_rank", "sync"), [(0, False), (1, False), (1, True)])
def test_out_of_memory_at_a_later_size_makes_all_step_down(search, on_rank: int, sync: bool):
    ended = search(trouble="out of memory", where="backward", at_step=11, on_rank=on_rank, sync=sync)
    errors = [[trial["error"] for trial in seen["plan"]["trials"] if trial["error"]] for seen in ended.seen]
    assert errors == [[f"on rank {on_rank}: OutOfMemoryError: CUDA out of memory (made up)"]] * 2
    plan = same_plan(ended)
    (failed,) = [trial["batch_size"] for trial in plan["trials"] if trial["outcome"] == "out_of_memory"]
    assert 4 < plan["batch_size"] < failed
    assert [len(seen["sizes"]) for seen in ended.seen] == [4, 4]


@pytest.mark.slow
def test_a_rank_that_needs_more_decides_whatever_the_steps_exchange_by_themselves(search):
    """``self.log(sync_dist=True)``, ``self.all_gather``: a rank must not wait in one for another that has gone on."""
    plan = same_plan(search(more=300, sync=True, validates=True))
    assert plan["batch_size"] < 50
    assert "out_of_memory" in {trial["outcome"] for trial in plan["trials"]}
    assert "evaluation" in plan["memory"]["lines"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("finder", "trainer"),
    [({"target_batch_size": 96}, {}), ({"max_batch_size": 12}, {"accumulate_grad_batches": 2})],
    ids=["target_batch_size", "accumulate_grad_batches"],
)
def test_the_samples_of_a_step_are_counted_over_all_ranks_of_all_nodes(search, finder: Any, trainer: Any):
    finder = {**finder, "lr_scaling": "linear", "base_batch_size": 48}
    plan = same_plan(search(ranks=4, nodes=2, budgets=[400] * 4, finder=finder, trainer=trainer), ranks=4)
    assert plan["batch_size"] * 4 * plan["accumulate_grad_batches"] == plan["effective_batch_size"] == 96
    assert plan["learning_rate"] == 2 * plan["learning_rate_before"]


SIGTERM, SIGINT, SIGKILL, ERROR, OUT = "SIGTERM", "SIGINT", "SIGKILL", "error", "out of memory"
REASONS = {
    SIGTERM: "SIGTERMException",
    SIGINT: "KeyboardInterrupt",
    ERROR: "ValueError: the user's own error",
    OUT: "OutOfMemoryError: CUDA out of memory (made up)",
}
IN_CHECK = 15
"""The first of the steps that ranks take together under DDP: the sizes before it take 8 and three times 2."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "trouble", "where", "at_step", "on_rank"),
    [
        ("ddp", ERROR, "forward", 3, 1),
        ("ddp", ERROR, "optimizer", 3, 0),
        ("ddp", SIGTERM, "forward", 3, 1),
        ("ddp", SIGTERM, "backward", 3, 0),
        ("ddp", ERROR, "backward", IN_CHECK, 1),
        ("ddp", OUT, "forward", IN_CHECK, 1),
        ("ddp", SIGTERM, "forward", IN_CHECK, 1),
        ("fsdp2", OUT, "forward", 3, 1),
        ("fsdp2", OUT, "backward", 3, 1),
        ("fsdp2", OUT, "optimizer", 3, 1),
        ("fsdp2", ERROR, "forward", 3, 1),
        ("fsdp2", SIGTERM, "backward", 3, 1),
        ("ddp", SIGINT, "forward", 3, 0),
        ("fsdp2", SIGINT, "forward", 3, 0),
        ("ddp", ERROR, "train_dataloader", 1, 1),
        # before the search, while the others wait in it, and again after it
        ("ddp", ERROR, "configure_optimizers", 1, 1),
        ("fsdp2", ERROR, "configure_optimizers", 1, 0),
        ("ddp", ERROR, "configure_optimizers", 2, 1),
        # where the store of the reason is, which ends with it
        ("ddp", OUT, "backward", IN_CHECK, 0),
        ("fsdp2", ERROR, "forward", 3, 0),
    ],
)
def test_trouble_on_one_rank_ends_all_with_its_reason(
    search, strategy: str, trouble: str, where: str, at_step: int, on_rank: int
):
    ended = search(strategy=strategy, trouble=trouble, where=where, at_step=at_step, on_rank=on_rank)
    assert f"RankFailedError: rank {on_rank} ended the search: {REASONS[trouble]}" in ended.said[1 - on_rank]
    assert ended.codes[1 - on_rank] == 1
    # Lightning leaves by itself after SIGTERM
    assert ended.codes[on_rank] == (0 if trouble == SIGTERM else 1)
    if trouble not in (SIGTERM, SIGINT):
        assert [line.endswith(REASONS[trouble]) for line in ended.said[on_rank].splitlines()].count(True) == 1
        assert "RankFailedError" not in ended.said[on_rank]  # its own error is what its user sees
    assert ended.seen == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "where", "at_step"), [("ddp", "configure_optimizers", 1), ("fsdp2", "forward", 3)]
)
def test_ranks_that_fail_alike_do_not_wait_for_each_other(search, strategy: str, where: str, at_step: int):
    begin = time.monotonic()
    ended = search(ranks=3, strategy=strategy, trouble=ERROR, where=where, at_step=at_step, on_rank="all")
    assert time.monotonic() - begin < _TELL_SECONDS
    assert ended.codes == [1, 1, 1]
    for said in ended.said:
        assert "ValueError: the user's own error" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "on_rank", "at_step"), [("ddp", 1, 3), ("ddp", 0, 3), ("ddp", 1, IN_CHECK), ("fsdp2", 1, 3)]
)
def test_a_rank_that_is_killed_leaves_nobody_waiting(search, strategy: str, on_rank: int, at_step: int):
    ended = search(strategy=strategy, trouble=SIGKILL, where="backward", on_rank=on_rank, at_step=at_step)
    assert ended.codes[on_rank] == -signal.SIGKILL
    assert ended.codes[1 - on_rank] == 1
    if on_rank == 1 and (strategy == "fsdp2" or at_step == IN_CHECK):  # rank zero keeps what the ranks know
        assert "perhaps gone: rank 1\n" in ended.said[0]
    assert ended.seen == []


def run_commands(directory: Path, *commands: list[str], wait_seconds: float = WAIT_SECONDS) -> Ended:
    """Run these beside each other, each in a process group of its own, of which nothing may stay."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = []
    for index, command in enumerate(commands):
        with (directory / f"command{index}.out").open("w") as said:
            started.append(
                subprocess.Popen(
                    command, cwd=directory, env=environment, stdout=said, stderr=said, start_new_session=True
                )
            )
    try:
        until = time.monotonic() + wait_seconds
        codes = [process.wait(max(0.1, until - time.monotonic())) for process in started]
    finally:
        wait_for_all([process.pid for process in started], seconds=10)
        for process in started:
            process.wait(5)
    said_texts = [path.read_text() for path in sorted(directory.glob("command*.out"))]
    return Ended(codes, said_texts, [json.loads(file.read_text()) for file in sorted(directory.glob("rank*.json"))])


def script(directory: Path, **asked: Any) -> list[str]:
    return [str(ROOT / "tests" / "search_ranks.py"), json.dumps(asked), str(directory)]


def in_interpreter(directory: Path, **asked: Any) -> list[str]:
    """As in a notebook: Lightning takes an interpreter with a prompt for one."""
    program = (
        "import sys; sys.ps1 = '>>> '\n"
        "from pathlib import Path\n"
        "from tests.search_ranks import train\n"
        f"train({asked!r}, Path({str(directory)!r}))"
    )
    return ["-c", program]


@pytest.mark.slow
def test_two_machines_of_torchrun_have_one_plan(tmp_path):
    arguments = (
        f"-m torch.distributed.run --nnodes=2 --nproc-per-node=1 --master-addr=127.0.0.1 --master-port={free_port()}"
    )
    training = script(tmp_path, ranks=2, nodes=2, budgets=[400, 300])
    ended = run_commands(
        tmp_path, *([sys.executable, *arguments.split(), f"--node-rank={node}", *training] for node in range(2))
    )
    assert same_plan(ended)["batch_size"] == 192
    assert ["after fit: 192" in said for said in ended.said] == [True, True]


@pytest.mark.slow
def test_lightning_s_own_launcher_of_scripts(tmp_path):
    training = script(tmp_path, ranks=2, budgets=[300, 400])
    ended = run_commands(tmp_path, [sys.executable, *training])
    assert same_plan(ended)["batch_size"] == 192
    assert ended.said[0].count("after fit: 192") == 2  # each rank is the script


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [ERROR, SIGKILL])
def test_lightning_s_own_launcher_of_scripts_ends_all(tmp_path, trouble: str):
    training = script(tmp_path, ranks=2, budgets=[400, 400], strategy="fsdp2", trouble=trouble, where="backward")
    ended = run_commands(tmp_path, [sys.executable, *training])
    assert ended.codes[0] != 0
    assert ended.seen == []
    if trouble == ERROR:
        assert "RankFailedError: rank 1 ended the search: ValueError: the user's own error" in ended.said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "as_started"), [("ddp_spawn", script), ("ddp_fork", script), ("ddp_notebook", in_interpreter)]
)
def test_a_training_that_starts_its_ranks_from_within(tmp_path, strategy: str, as_started: Any):
    training = as_started(tmp_path, ranks=2, strategy=strategy, finder={"max_batch_size": 16})
    ended = run_commands(tmp_path, [sys.executable, *training])
    plan = same_plan(ended)
    assert (plan["batch_size"], plan["limited_by"]) == (16, "max_batch_size")
    # the finder that has the plan is a copy in the ranks, which are gone; a checkpoint and the table have it
    assert "after fit: None" in ended.said[0]
    assert "16 samples: max_batch_size is 16" in ended.said[0]


@pytest.mark.slow
def test_lightning_refuses_the_launcher_of_scripts_in_a_notebook(tmp_path):
    ended = run_commands(tmp_path, [sys.executable, *in_interpreter(tmp_path, ranks=2)])
    assert ended.codes == [1]
    assert "choose a notebook-compatible strategy: `Trainer(strategy='ddp_notebook')`" in ended.said[0]
