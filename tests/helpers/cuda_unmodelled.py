"""Cases of ``tests/gpu/test_cuda_unmodelled.py``: what the stub does not have, and its settings."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from typing import Any

import psutil
import pynvml
import torch
import torch.distributed
from torch import nn

from tests.helpers.cuda_stub import mib, print_case
from tests.helpers.lawful import MIB

STUB = ctypes.CDLL(None)
# Numbers of cudaMemcpyKind and of cudaDeviceAttr in driver_types.h.
HOST_TO_DEVICE, DEFAULT_DIRECTION = 1, 4
LEVEL_2_BYTES, THREADS, SHARED_BYTES, SHARED_BYTES_IN_BLOCK = 38, 39, 81, 97


def matrix() -> torch.Tensor:
    return torch.randn(8, 8, device="cuda")


def sparse_product() -> torch.Tensor:
    eye = torch.eye(8).to_sparse_csr().cuda()
    return eye @ eye


def peer_memory() -> Any:
    return torch.empty(8, device="cuda").untyped_storage()._share_cuda_()


def looked_up() -> int:
    """A function of the driver, found as other CUDA runtimes find theirs."""
    function = ctypes.CFUNCTYPE(ctypes.c_int)(address_of("cuCtxCreate"))
    return function()


CALLS: dict[str, Callable[[], object]] = {
    "sparse": sparse_product,
    "peer": peer_memory,
    "driver": looked_up,
}


def unmodelled(name: str) -> dict[str, Any]:
    """End the process, after an ordinary step."""
    matrix() @ matrix()
    CALLS[name]()
    return {}


def address_of(name: str) -> int | None:
    found = ctypes.c_void_p()
    STUB.cuGetProcAddress_v2(name.encode(), ctypes.byref(found), 0, ctypes.c_uint64(0), None)
    return found.value


def looked_up_only() -> dict[str, Any]:
    names = ("cuCtxCreate", "cuMemCreate", "cuStreamWriteValue32", "cuDreamUp")
    return {name: address_of(name) is not None for name in names}


def host_limit(expandable: str) -> dict[str, Any]:
    """Allocate half of the device in a process that may not have as much address space."""
    matrix()
    used_bytes = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 2**30, resource.RLIM_INFINITY))
    try:
        torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return {"looks_like": "a full device"}
    return {"looks_like": "a device with room"}


def without_device() -> dict[str, Any]:
    """What answers without a device, and which functions the stub takes the place of."""
    functions = ("cufftCreate", "ncclGetVersion", "cufftGetVersion", "cublasLtGetVersion")
    # It needs NVRTC.
    compiled = torch.special.bessel_j0(matrix())
    return {
        "replaced": [function for function in functions if hasattr(STUB, function)],
        "cudnn": torch.backends.cudnn.version(),
        "word": torch.cuda.cudart().cudaGetErrorString(torch.cuda.cudart().cudaError.success),
        "compiled": list(compiled.shape),
    }


def own_settings() -> dict[str, Any]:
    """What torch and NVML say about the device, in an environment without the settings."""
    for name in [name for name in os.environ if name.startswith("CUDA_STUB_")]:
        del os.environ[name]
    properties = torch.cuda.get_device_properties(0)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        STUB.cudaDeviceGetAttribute(ctypes.byref(value), number, 0)
        return value.value

    return {
        "bytes": torch.cuda.mem_get_info()[1],
        "bytes_of_nvml": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        "name": properties.name,
        "name_of_nvml": pynvml.nvmlDeviceGetName(handle),
        "multiprocessors": properties.multi_processor_count,
        "level_2_mib": attribute(LEVEL_2_BYTES) / MIB,
        "threads": attribute(THREADS),
        "shared_kib": attribute(SHARED_BYTES) / 1024,
        "shared_in_block_kib": attribute(SHARED_BYTES_IN_BLOCK) / 1024,
    }


def resident_mib() -> float:
    return mib(psutil.Process().memory_info().rss)


def fill() -> dict[str, Any]:
    """Values of 64 MiB of the device after they are set, and what the host keeps for them."""
    bytes_ = 64 * MIB
    block = torch.empty(bytes_, dtype=torch.uint8, device="cuda")
    # The addresses of the device are those of the host.
    values = (ctypes.c_ubyte * bytes_).from_address(block.data_ptr())
    stream = ctypes.c_void_p()
    before = resident_mib()
    STUB.cudaMemsetAsync(ctypes.c_void_p(block.data_ptr()), 7, ctypes.c_size_t(bytes_), stream)
    sevens = {values[0], values[bytes_ // 2], values[-1]}
    written = resident_mib()
    # Neither its start nor its end is that of a page.
    start, end = 5, bytes_ - 5
    inside = ctypes.c_void_p(block.data_ptr() + start)
    STUB.cudaMemsetAsync(inside, 0, ctypes.c_size_t(end - start), stream)
    return {
        "sevens": sorted(sevens),
        "zeros": sorted({*values[start:end:4093], values[start], values[end - 1]}),
        "around": [values[start - 1], values[end]],
        "written_mib": written - before,
        "kept_mib": resident_mib() - before,
    }


def addresses() -> dict[str, Any]:
    """The addresses of some blocks of the device, of which two are freed before the last ones."""

    def block(mebibytes: int) -> int:
        at = ctypes.c_void_p()
        STUB.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(mebibytes * MIB))
        return at.value or 0

    first = [block(mebibytes) for mebibytes in (2, 20, 3, 6, 2)]
    for freed in (first[1], first[3]):
        STUB.cudaFree(ctypes.c_void_p(freed))
    return {"addresses": [*first, block(8), block(30), block(6)]}


def directions() -> dict[str, Any]:
    """What copies move when the runtime is asked to find out the direction."""
    bytes_ = 4096
    first, second = (torch.empty(bytes_, dtype=torch.uint8, device="cuda") for _ in range(2))
    host = torch.full((bytes_,), 3, dtype=torch.uint8)
    copied = torch.zeros(bytes_, dtype=torch.uint8)

    def copy(to: torch.Tensor, source: torch.Tensor, kind: int = DEFAULT_DIRECTION) -> None:
        addresses = (ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr()))
        STUB.cudaMemcpy(*addresses, ctypes.c_size_t(bytes_), kind)

    copy(first, host)
    copy(copied, first)
    brought_back = int(copied[-1])
    copy(second, host.zero_(), HOST_TO_DEVICE)
    copy(second, first)
    copy(copied, second)
    return {"brought_back": brought_back, "inside": int(copied[-1])}


def training() -> dict[str, Any]:
    """Steps of a compiled network, with and without graphs, and of one under the profiler."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4)).cuda()
    optimizer = torch.optim.AdamW(network.parameters())
    batch = torch.randn(4, 3, 3, 3, device="cuda")

    def step(forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        step(network)
    for mode in ("default", "reduce-overhead"):
        compiled = torch.compile(network, mode=mode)
        for _ in range(3):
            step(compiled)
    return {"steps": 7}


if __name__ == "__main__":
    cases = (unmodelled, looked_up_only, host_limit, without_device, own_settings, fill)
    print_case({case.__name__: case for case in (*cases, addresses, directions, training)})
