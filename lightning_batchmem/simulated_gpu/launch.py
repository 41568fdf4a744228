"""Start programs on simulated GPUs, and read what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from lightning_batchmem.check import MeasuredStep
from lightning_batchmem.plan.json_fields import from_json
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.script import Script, ended_with_children
from lightning_batchmem.simulated_gpu.build import LIBRARY, library_folder
from lightning_batchmem.simulated_gpu.gpus import (
    Gpu,
    architecture_for,
    kernels_missing_text,
    nccl_bytes,
)

# The library ends a process with this code, after a sentence (EX_SOFTWARE of sysexits.h).
_NOT_MODELLED = 70

# A program that names its devices is started again with them, and one of DeepSpeed after each size
# that does not fit.
_MOST_STARTS = 8

# Of what a program without a search has printed.
_LAST_LINES = 20


@dataclass(frozen=True)
class World:
    """What a command gives of the processes that train together; ``None``: as the program has it.

    Args:
        devices: GPUs of each node.
        nodes: the number of nodes.
        nccl_bytes: bytes of each GPU that NCCL takes.
    """

    devices: int | None = None
    nodes: int | None = None
    nccl_bytes: int | None = None


AS_THE_PROGRAM = World()


@dataclass(frozen=True)
class FoundWorld:
    """The processes that train together, of which the first one ran.

    Args:
        devices: GPUs of each node.
        nodes: the number of nodes.
        nccl_bytes: bytes of each GPU that NCCL was assumed to take.
        nccl_source: where this number comes from.
        gathered_bytes: weights that a rank gathers in forward and frees in backward.
    """

    devices: int
    nodes: int
    nccl_bytes: int
    nccl_source: str
    gathered_bytes: int | None


@dataclass(frozen=True)
class Outcome:
    """What a program found on one GPU: a plan or the memory of a step, or why there is none.

    Args:
        gpu: the GPU.
        plan: the plan of the search.
        assumptions: notes about the simulation, which a plan has too.
        multiple_of: sizes are multiples of it.
        nothing_fits: why no size fits.
        error: why there was no search.
        memory: the memory of a step, of the memory test.
        asked: what the command gave of the processes that train together.
        world: the processes that train together; ``None`` for one.
    """

    gpu: Gpu
    plan: Plan | None = None
    assumptions: tuple[str, ...] = ()
    multiple_of: int = 1
    nothing_fits: str = ""
    error: str = ""
    memory: MeasuredStep | None = None
    asked: World = AS_THE_PROGRAM
    world: FoundWorld | None = None

    @property
    def devices(self) -> str:
        """The GPUs of a node, such as ``8``, and the number of nodes, as in ``8 x 4``."""
        known = self.world or self.asked
        nodes = f" x {known.nodes}" if known.nodes not in (None, 1) else ""
        return f"{known.devices or 1}{nodes}"

    @property
    def name(self) -> str:
        """The name of the GPU, and how many of them where the command says it."""
        return self.gpu.name if self.asked.devices is None else f"{self.gpu.name} x {self.devices}"


def kernels_of(gpu: Gpu) -> tuple[Path, int]:
    """The folder of the library of a simulated GPU, and the architecture whose kernels run on it.

    Raises:
        ValueError: if the library cannot be made here, or this build of torch has no kernels for
            the GPU.
    """
    folder = library_folder()
    architecture = architecture_for(gpu, _architectures())
    if architecture is None:
        raise ValueError(kernels_missing_text(gpu, torch.__version__, torch.version.cuda or "0"))
    return folder, architecture


def run(
    program: Script,
    gpu: Gpu,
    context_bytes: int,
    options: Mapping[str, Any],
    world: World = AS_THE_PROGRAM,
    *,
    shows_output: bool = True,
) -> Outcome:
    """Run the program in a new process on one simulated GPU. What it writes stays.

    Args:
        program: the program.
        gpu: the GPU.
        context_bytes: bytes of the device that the CUDA context takes.
        options: the arguments of BatchFinder that the user gave.
        world: the processes that train together; the first one runs.
        shows_output: whether what the program prints goes to this terminal. Otherwise only its
            last lines do, and only if there is no search.

    Raises:
        ValueError: as in :func:`kernels_of`.
    """
    folder, architecture = kernels_of(gpu)
    with (
        ended_with_children(),
        tempfile.TemporaryDirectory(prefix="lightning-batchmem-") as directory,
        (Path(directory) / "output").open("w+", encoding="utf-8", errors="replace") as output,
    ):
        files = {name: Path(directory) / name for name in ("request", "result", "report", "plan")}
        request = {
            **asdict(program),
            "options": dict(options),
            "gpu": gpu.name,
            "result": str(files["result"]),
            "kept_plan": str(files["plan"]),
        }
        variables = {
            **_variables(folder, gpu, context_bytes, files["report"]),
            "CUDA_STUB_KERNELS": str(architecture),
        }
        current = world
        for _ in range(_MOST_STARTS):
            code = _started(
                {**request, **asdict(current)},
                files["request"],
                {**variables, **_variables_of_ranks(gpu, current)},
                _settings(folder, current),
                None if shows_output else output,
            )
            again = _start_again(files["result"])
            if again is None:
                break
            current = replace(current, **again)
        else:
            text = f"{program.target} was started {_MOST_STARTS} times, and no size fits yet"
            return Outcome(gpu, nothing_fits=text, asked=world)
        outcome = _outcome(program, gpu, code, files, world)
        if outcome.error:
            output.seek(0)
            sys.stderr.writelines(deque(output, _LAST_LINES))
        return outcome


def _started(
    request: Mapping[str, Any],
    path: Path,
    variables: Mapping[str, str],
    settings: Mapping[str, str],
    output: IO[str] | None,
) -> int:
    """Start the process with a request in a file, and return its exit code."""
    # Programs that the program starts get these values back.
    environment = {name: os.environ.get(name) for name in variables}
    path.write_text(json.dumps({**request, "environment": environment}), encoding="utf-8")
    child = Path(__file__).with_name("child.py")
    # The command is the user's own program.
    return subprocess.run(  # noqa: S603
        [sys.executable, str(child), str(path)],
        env={**os.environ, **settings, **variables},
        stdout=output,
        stderr=output,
        check=False,
    ).returncode


def _start_again(path: Path) -> dict[str, int] | None:
    """With which world a process asks for another start; ``None`` if it has a result."""
    if not path.exists():
        return None
    again: dict[str, int] | None = json.loads(path.read_text(encoding="utf-8")).get("start_again")
    if again is not None:
        path.unlink()
    return again


def _architectures() -> list[str]:
    """The architectures for which this build of torch has kernels."""
    # torch.cuda.get_arch_list is empty without a device. This name is private in torch 2.5.1 to
    # 2.14.
    flags: str | None = torch._C._cuda_getArchFlags()
    return (flags or "").split()


def _variables(folder: Path, gpu: Gpu, context_bytes: int, report: Path) -> dict[str, str]:
    """The variables by which the library is loaded, and its settings."""
    major, minor = gpu.capability
    variables = {
        # Without its folder, which may have spaces.
        "LD_PRELOAD": _joined(LIBRARY, "LD_PRELOAD"),
        "LD_LIBRARY_PATH": _joined(str(folder), "LD_LIBRARY_PATH"),
        "CUDA_STUB_BYTES": str(gpu.memory_bytes),
        "CUDA_STUB_CAPABILITY": f"{major}.{minor}",
        "CUDA_STUB_CONTEXT_MIB": str(context_bytes / 2**20),
        "CUDA_STUB_NAME": f"simulated {gpu.name}",
        "CUDA_STUB_REPORT": str(report),
    }
    if gpu.multiprocessors is not None:
        variables["CUDA_STUB_SMS"] = str(gpu.multiprocessors)
    if gpu.l2_cache_bytes is not None:
        variables["CUDA_STUB_L2_MIB"] = str(gpu.l2_cache_bytes / 2**20)
    return variables


def _variables_of_ranks(gpu: Gpu, world: World) -> dict[str, str]:
    """The settings of the library for the ranks that train together."""
    devices = world.devices or 1
    each_bytes, first_bytes, _ = nccl_bytes(gpu, devices, world.nodes or 1)
    if world.nccl_bytes is not None:
        each_bytes, first_bytes = 0, world.nccl_bytes
    return {
        "CUDA_STUB_DEVICES": str(devices),
        "CUDA_STUB_NCCL_MIB": str(each_bytes / 2**20),
        "CUDA_STUB_NCCL_FIRST_MIB": str(first_bytes / 2**20),
    }


def _settings(folder: Path, world: World) -> dict[str, str]:
    """Variables of torch that the program keeps; the user's own values come first."""
    settings = {
        # torch warns of each failed allocation, and a search has some.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Threads wait for each other, and there is nothing to compute.
        "OMP_NUM_THREADS": "1",
    }
    own = {name: os.environ.get(name, value) for name, value in settings.items()}
    return {
        **own,
        # The user's own value names GPUs of this machine.
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(world.devices or 1))),
        # Triton looks for the driver here, and otherwise in the cache of the loader.
        "TRITON_LIBCUDA_PATH": str(folder),
        # Otherwise a question for devices would forbid loader workers that are forked.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def _joined(path: str, variable: str) -> str:
    return os.pathsep.join(filter(None, [path, os.environ.get(variable)]))


def _outcome(
    program: Script, gpu: Gpu, code: int, files: Mapping[str, Path], asked: World
) -> Outcome:
    """What the process left behind."""
    if files["result"].exists():
        result = json.loads(files["result"].read_text(encoding="utf-8"))
        if "plan" in result:
            result["plan"] = Plan.from_json(json.dumps(result["plan"]))
        if "memory" in result:
            result["memory"] = from_json(MeasuredStep, json.dumps(result["memory"]))
        if found := result.pop("world", None):
            _, _, source = nccl_bytes(gpu, found["devices"], found["nodes"])
            source = source if asked.nccl_bytes is None else "as given"
            result["world"] = FoundWorld(**found, nccl_source=source)
        assumptions = tuple(result.pop("assumptions", ()))
        return Outcome(gpu, assumptions=assumptions, asked=asked, **result)
    if code == _NOT_MODELLED and files["report"].exists():
        text = files["report"].read_text(encoding="utf-8").strip()
        return Outcome(gpu, error=text, asked=asked)
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    elif code > 0:
        how = f"ended with exit code {code} before Trainer.fit"
    else:
        how = "ended without a call of Trainer.fit"
    return Outcome(gpu, error=f"{program.target} {how}", asked=asked)
