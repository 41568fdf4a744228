"""A device and its tensors come in; memory, peaks, utilization and kinds of errors go out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_batchmem.devices.accelerator import (
    AcceleratorMemory,
    counts_memory,
    cuda_utilization,
)
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.cpu import cpu_utilization
from lightning_batchmem.devices.host import HostMemory


def device_memory_for(device: torch.device, *, quick: bool = False) -> DeviceMemory | None:
    """Return the memory reader of a device, with cheap readings for every step if ``quick``.

    ``None`` without a peak counter: on MPS, XPU and all other devices, with an allocator of CUDA
    that does not count, and on a host where ``/proc/self/clear_refs`` cannot be written (not Linux,
    some sandboxes).
    """
    if device.type == "cuda":
        return AcceleratorMemory(device) if counts_memory() else None
    if device.type == "cpu":
        host_memory = HostMemory(quick=quick)
        return host_memory if host_memory.can_reset_peak else None
    # MPS takes memory of the host, which is a Mac, and macOS has no /proc/self/clear_refs. XPU was
    # never run, and Lightning restores the random states of CUDA only (2.6.6), so that a search
    # would change the training after it.
    return None


def device_name(device: torch.device) -> str:
    """Return the product name of a GPU, ``"host"`` for the CPU, and otherwise the device type.

    A product name is for example ``"NVIDIA H100 80GB HBM3"``.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "host" if device.type == "cpu" else device.type


def utilization_for(device: torch.device) -> Callable[[], float | None] | None:
    """Return what reads the utilization of a device in per cent; ``None`` where nothing can.

    This is so on other devices and, with a warning, where NVML cannot read a GPU.
    """
    if device.type == "cuda":
        return cuda_utilization(device)
    return cpu_utilization() if device.type == "cpu" else None
