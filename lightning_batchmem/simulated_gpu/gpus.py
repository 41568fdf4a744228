"""GPUs that can be simulated (``gpus.toml``), and which builds of torch run on them."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_batchmem.plan.options import bytes_in

# What a CUDA context takes of the device's memory today, in a process that trains. Public issues
# name about 300 MiB (pytorch/pytorch#107667), 414 MiB on an A100 (QwenLM/Qwen3-VL#881) and 426 MiB
# on an RTX 6000 Ada (unslothai/unsloth-zoo#1053). The largest is taken: a batch size that is too
# large is the worse error.
CONTEXT_BYTES = 426 * 2**20
CONTEXT_SOURCE = "unslothai/unsloth-zoo#1053, RTX 6000 Ada"

# What NCCL takes for each communicator, on two ranks and on more, outside of torch's allocator.
# Source: NVIDIA/nccl#964 (one communicator on A100s, nvidia-smi). Others read 484 MiB
# (NVIDIA/nccl#2366, RTX 3090) and 1.6 GB (NVIDIA/nccl#864).
_NCCL_BYTES_OF_TWO = 544 * 2**20
_NCCL_BYTES_OF_MORE = 688 * 2**20
# What NVLink SHARP takes besides, once, on a node of more than two GPUs since Hopper.
# Source: vllm-project/vllm#9699 (H100 and H200); NVIDIA/nccl#1685 has 3.3 GB in all on 8 H100.
_NVLS_BYTES = 2304 * 2**20
_OLDEST_CAPABILITY_WITH_NVLS = (9, 0)
# GPUs of workstations, which NVSwitch does not connect.
_FIRST_CAPABILITY_WITHOUT_NVLS = (11, 0)

MOST_DEVICES = 8
"""GPUs of a node. No machine with more of one kind is common."""

# The stub reserves the memory of the device in the addresses of the process, and a process on
# x86-64 Linux has 47 bits of them.
_ADDRESS_SPACE_BYTES = 2**47

_MIB = 2**20

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)", re.ASCII)

# PYTORCH_RELEASES_CODE_CC in torch/cuda/__init__.py of torch 2.14.1: builds with CUDA 12.6 have
# kernels for 5.0 to 9.0, and builds with CUDA 13 for 7.5 and above. From torch 2.11 on, builds with
# CUDA 12.8 have none for 7.0 either (pytorch/pytorch#182250). The first builds for 10.0 and 12.0
# have CUDA 12.8.
_OLDEST_CAPABILITY_OF_CUDA_13 = (7, 5)
_LAST_CUDA_OF_OLD_GPUS = (12, 6)
_OLDEST_CAPABILITY_OF_BLACKWELL = (10, 0)
_FIRST_CUDA_OF_BLACKWELL = (12, 8)


@dataclass(frozen=True)
class Gpu:
    """What CUDA reports of a GPU; ``None`` is a value that is not known.

    ``memory_bytes`` is the total of ``cudaMemGetInfo``, which is less than the number in the name.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int | None
    l2_cache_bytes: int | None


def _gpu_of(entry: dict[str, Any]) -> Gpu:
    return Gpu(
        entry["name"],
        entry["memory_bytes"],
        tuple(entry["capability"]),
        entry.get("multiprocessors"),
        entry.get("l2_cache_bytes"),
    )


_TABLE = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
_GPUS = [_gpu_of(entry) for entry in _TABLE["gpus"]]


def gpu_named(text: str) -> Gpu:
    """The GPU with a name such as ``RTX 4090``, or one of a size such as ``24GiB``."""
    if size_bytes := int(bytes_in(text)):
        return _gpu_of_size(text, size_bytes)
    key = _key(text)
    if key in _GPU_OF_KEY:
        return _GPU_OF_KEY[key]
    for name, choices in _TABLE["names_of_several"].items():
        if key == _key(name):
            raise ValueError(f"{name} is the name of several GPUs: choose {' or '.join(choices)}")
    near = dict.fromkeys(
        _GPU_OF_KEY[near_key].name
        for near_key in difflib.get_close_matches(key, _GPU_OF_KEY, n=6, cutoff=0.7)
    )
    names = f" (near names: {', '.join(list(near)[:3])})" if near else ""
    raise ValueError(
        f"{text!r:.80} is neither a known GPU nor a size such as 24GiB{names}:"
        " see `simulate --list`"
    )


def architecture_for(gpu: Gpu, arch_list: Sequence[str]) -> int | None:
    """The newest of these architectures whose kernels run on the GPU, such as 86; ``None``: none.

    ``torch._C._cuda_getArchFlags().split()`` has them, such as ``sm_90`` and ``compute_120``. An
    entry of another form, such as one of ROCm, runs on no GPU here.
    """
    fitting = [name for name in arch_list if _runs_on(gpu.capability, name)]
    numbers = [int("".join(filter(str.isdigit, name))) for name in fitting]
    return max(numbers, default=None)


def kernels_missing_text(gpu: Gpu, torch_version: str, cuda_version: str) -> str:
    """Why a GPU is refused, and the build of torch to take, if there is one.

    The versions are ``torch.__version__`` and ``torch.version.cuda``, such as ``13.0``.
    """
    major, minor = gpu.capability
    reason = f"no kernels for {gpu.name} ({major}.{minor}) in this build of torch ({torch_version})"
    cuda = tuple(int(part) for part in cuda_version.split("."))
    if gpu.capability < _OLDEST_CAPABILITY_OF_CUDA_13 and cuda > _LAST_CUDA_OF_OLD_GPUS:
        return f"{reason}; use a CUDA 12.6 build"
    if gpu.capability >= _OLDEST_CAPABILITY_OF_BLACKWELL and cuda < _FIRST_CUDA_OF_BLACKWELL:
        return f"{reason}; use a build with CUDA 12.8 or newer"
    return reason


def nccl_bytes(gpu: Gpu, devices: int, nodes: int) -> tuple[int, int, str]:
    """What NCCL is assumed to take of a GPU in a world of ranks.

    Returns:
        Bytes for each communicator, bytes once besides, and the sources.
    """
    each_bytes = _NCCL_BYTES_OF_MORE if devices * nodes > 2 else _NCCL_BYTES_OF_TWO
    source = "NVIDIA/nccl#964, A100"
    has_nvls = _OLDEST_CAPABILITY_WITH_NVLS <= gpu.capability < _FIRST_CAPABILITY_WITHOUT_NVLS
    if not has_nvls or devices <= 2:
        return each_bytes, 0, source
    return each_bytes, _NVLS_BYTES, f"{source}; vllm-project/vllm#9699, NVLS of H100"


def names_text() -> str:
    """The names of all GPUs, one a line."""
    return "\n".join(gpu.name for gpu in _GPUS)


def _gpu_of_size(text: str, size_bytes: int) -> Gpu:
    if size_bytes <= CONTEXT_BYTES:
        context_mib = CONTEXT_BYTES // _MIB
        raise ValueError(
            f"a GPU of {text.strip()} has no room: a CUDA context alone takes {context_mib} MiB"
        )
    if size_bytes >= _ADDRESS_SPACE_BYTES:
        raise ValueError(f"a GPU of {text.strip():.80} is too large: give less than 128 TiB")
    return Gpu(text.strip(), size_bytes, (8, 0), None, None)


def _runs_on(capability: tuple[int, int], architecture: str) -> bool:
    """Whether code for an architecture runs on a GPU.

    A binary (``sm_86``) runs on GPUs of its major number and at least its minor number. PTX
    (``compute_86``) is compiled for any GPU of at least its capability. With the suffix ``a`` both
    run on one capability only. With ``f`` both run on the major number of it, like a binary.
    """
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        return False
    kind, major, minor, suffix = match.groups()
    built_for = (int(major), int(minor))
    if suffix == "a":
        return capability == built_for
    if kind == "compute" and suffix != "f":
        return capability >= built_for
    return capability[0] == built_for[0] and capability[1] >= built_for[1]


def _keys(name: str) -> set[str]:
    """The forms of a name in which a user may write it: ``RTX-4090`` is also ``4090``."""
    key = _key(name)
    return {key, key.removeprefix("rtx")}


def _key(text: str) -> str:
    """A name without upper case, separators and brands."""
    return re.sub(r"nvidia|geforce|tesla|[\s_-]", "", text.lower())


def _gpus_by_key() -> dict[str, Gpu]:
    found = {}
    for gpu, entry in zip(_GPUS, _TABLE["gpus"], strict=True):
        for name in (gpu.name, *entry.get("other_names", ())):
            found.update(dict.fromkeys(_keys(name), gpu))
    return found


_GPU_OF_KEY = _gpus_by_key()
