"""Does one process stand for a rank of two? Peaks of each step, beside two ranks that are there.

One Lightning script trains under DDP, FSDP1, FSDP2 and DeepSpeed, in three ways:

- gloo: two processes that exchange by gloo, each on a device of the simulated GPU. This is the
  truth here, because nothing stands for a rank.
- apart: two processes with the NCCL of the simulated GPU, which exchanges nothing. The first one is
  read; the other ends where it needs a value of the first.
- alone: one process as rank 0 of two, as ``simulate`` runs it.

``Values`` is on in all of them, since DeepSpeed decides about a step by values. Between the steps
is a pause, so that NCCL's watchdog has dropped what has ended (it looks every 100 ms).

An environment with a CUDA build of torch (Linux, x86-64), and DeepSpeed for its rows:

    pip install -c constraints-cuda.txt -e ".[test]"
    DS_BUILD_OPS=0 pip install -c constraints-cuda.txt -e ".[deepspeed]"
    # 4 minutes on two cores
    python -m benchmarks.ranks_apart
    python -m benchmarks.ranks_apart --only ddp fsdp2
    # write benchmarks/results/cuda-stub/ranks_apart.md
    python -m benchmarks.ranks_apart --write
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.common import (
    ROOT,
    command_line,
    machine,
    markdown,
    one_line,
    silence,
    write_page,
)
from benchmarks.networks.published import Gpt, GptLayer, GptSettings

CHILD = "RANKS_APART_CHILD"
"""Environment variable of a process on the stub: what it runs, as JSON."""

RESULTS = ROOT / "benchmarks" / "results" / "cuda-stub" / "ranks_apart.md"
RANKS = 2
STEPS = 4
SAMPLES = 16
PAUSE_SECONDS = 0.5
MOST_SECONDS = 120
MIB = 2**20
GPT = GptSettings(
    torch_classes=True, sdpa=True, vocabulary=4096, tokens=64, width=512, heads=8, layers=8
)

Make = Callable[[dict[str, Any]], Strategy]


def _deepspeed(stage: int) -> Make:
    buckets: dict[str, Any] = dict.fromkeys(
        ("allgather_bucket_size", "reduce_bucket_size"), 5_000_000
    )
    return lambda backend: DeepSpeedStrategy(stage=stage, **buckets, **backend)


WAYS: dict[str, Make] = {
    "ddp": lambda backend: DDPStrategy(**backend),
    "ddp, gradients in buckets": lambda backend: DDPStrategy(
        gradient_as_bucket_view=True, **backend
    ),
    "fsdp, FULL_SHARD": lambda backend: FSDPStrategy(auto_wrap_policy={GptLayer}, **backend),
    "fsdp, SHARD_GRAD_OP": lambda backend: FSDPStrategy(
        auto_wrap_policy={GptLayer}, sharding_strategy="SHARD_GRAD_OP", **backend
    ),
    "fsdp2": lambda backend: ModelParallelStrategy(RANKS, 1, **backend),
    "deepspeed 1": _deepspeed(1),
    "deepspeed 2": _deepspeed(2),
    "deepspeed 3": _deepspeed(3),
}


class Language(LightningModule):
    """A GPT of 30 million parameters, whose loss is logged by all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Gpt(GPT)

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            assert self.device_mesh is not None
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, ids: Tensor, _: int) -> Tensor:
        logits = self.model(ids)
        loss = functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class LivePeaks(Callback):
    """The most bytes that live in each step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(PAUSE_SECONDS)
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(torch.cuda.max_memory_allocated())


def trained(way: str, backend: str) -> dict[str, Any]:
    """Train on this rank, and return the live peak of each step and the reserved bytes."""
    peaks = LivePeaks()
    options = {"process_group_backend": backend}
    is_written: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(
        accelerator="gpu",
        devices=RANKS,
        strategy=WAYS[way](options),
        callbacks=[peaks],
        max_steps=STEPS,
        **is_written,
    )
    samples: Any = [torch.zeros(GPT.tokens, dtype=torch.long)] * (SAMPLES * RANKS * STEPS)
    trainer.fit(Language(), DataLoader(samples, batch_size=SAMPLES))
    return {"steps": peaks.steps, "reserved": torch.cuda.max_memory_reserved()}


def run_here() -> None:
    """Train in each way on the rank of this process, and print what was found."""
    silence()
    task = json.loads(os.environ[CHILD])
    for way, port in task["ways"]:
        child = os.fork()
        if not child:
            _run_way(way, port, task)
        _, status = os.waitpid(child, 0)
        if status:
            error = f"ended with {os.waitstatus_to_exitcode(status)}"
            print(json.dumps({"way": way, "error": error}), flush=True)


def _run_way(way: str, port: int, task: Mapping[str, Any]) -> None:
    """Train in this copy of the process, and end it."""
    from lightning_batchmem.simulated_gpu.child import set_rank_variables
    from lightning_batchmem.simulated_gpu.one_rank import meet_nobody
    from lightning_batchmem.simulated_gpu.values import Values

    signal.alarm(MOST_SECONDS)
    output = os.dup(1)
    os.dup2(2, 1)
    set_rank_variables(RANKS, RANKS)
    rank = str(task["rank"])
    os.environ.update(RANK=rank, LOCAL_RANK=rank, MASTER_PORT=str(port))
    if task["case"] == "alone":
        meet_nobody(RANKS)
    Values().enter()
    try:
        found = trained(way, "gloo" if task["case"] == "gloo" else "nccl")
    # A way that ends with an error is a row of the table.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        found = {"error": one_line(error)}
    os.write(output, (json.dumps({"way": way, **found}) + "\n").encode())
    os._exit(0)


def found_on_stub(case: str, ways: Sequence[str]) -> list[dict[str, dict[str, Any]]]:
    """What each rank found in each way."""
    with_ports = [(way, _free_port()) for way in ways]
    launcher = str(ROOT / "tests" / "cuda_stub" / "run")
    command = [launcher, sys.executable, "-m", "benchmarks.ranks_apart"]
    processes = []
    for rank in range(1 if case == "alone" else RANKS):
        task = {"case": case, "rank": rank, "ways": with_ports}
        variables = {
            **os.environ,
            CHILD: json.dumps(task),
            "CUDA_STUB_DEVICES": str(RANKS),
            "OMP_NUM_THREADS": "1",
            # What DeepSpeed asks for where no compiler of CUDA is found.
            "DS_IGNORE_CUDA_DETECTION": "1",
            "DS_SKIP_CUDA_CHECK": "1",
        }
        process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        processes.append(process)
    found = []
    for process in processes:
        output, _ = process.communicate()
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        found.append({row["way"]: row for row in rows})
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def columns(
    way: str,
    gloo: Sequence[Mapping[str, Any]],
    apart: Mapping[str, Any],
    alone: Mapping[str, Any],
) -> dict[str, str]:
    """A row of the table."""
    errors = [each["error"] for each in (*gloo, apart, alone) if "error" in each]
    if errors:
        return {"way": way, "error": errors[0]}
    first, last = (each["steps"] for each in gloo)
    pairs = list(zip(alone["steps"], first, strict=True))
    step, truth = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
    difference = f"{step - truth:+,} bytes, {step / truth - 1:+.2%}"
    return {
        "way": way,
        "gloo, rank 0 (MiB of each step)": _mib(first),
        "rank 1": _mib(last),
        "alone": _mib(alone["steps"]),
        "largest difference": "equal" if step == truth else difference,
        "apart": "equal" if apart["steps"] == alone["steps"] else _mib(apart["steps"]),
        "reserved: gloo / apart / alone": " / ".join(
            f"{each['reserved'] / MIB:,.0f}" for each in (gloo[0], apart, alone)
        ),
    }


def _mib(steps: Sequence[int]) -> str:
    """The MiB of each step."""
    return " ".join(f"{step / MIB:.2f}" for step in steps)


def main() -> None:
    if CHILD in os.environ:
        run_here()
        return
    parser = command_line(__doc__, WAYS, writes=True)
    chosen = parser.parse_args()
    has_deepspeed = find_spec("deepspeed") is not None
    ways = [way for way in chosen.only if has_deepspeed or "deepspeed" not in way]
    (alone,) = found_on_stub("alone", ways)
    apart = found_on_stub("apart", ways)[0]
    gloo = found_on_stub("gloo", ways)
    none = {"error": "no result"}
    rows = [
        columns(
            way,
            [each.get(way, none) for each in gloo],
            apart.get(way, none),
            alone.get(way, none),
        )
        for way in ways
    ]
    notes = [
        "gloo: two processes that exchange; apart: rank 0 of two processes with the NCCL of the"
        " simulated GPU, beside alone; alone: one process as rank 0 of two.",
        "Under FSDP2 gloo reduces a copy of a layer's gradients (12 MiB here), which lives for some"
        " time: steps are higher by it in some runs, and equal to those of alone in others.",
        f"Command: python -m benchmarks.ranks_apart; {SAMPLES} samples of {GPT.tokens} tokens on"
        f" each rank, float32, AdamW, {STEPS} steps.",
    ]
    text = f"{machine()}\n\n{markdown(rows, notes)}"
    print(text)
    if chosen.write:
        write_page(RESULTS, text)


if __name__ == "__main__":
    main()
