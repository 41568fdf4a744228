"""Choose the readers of a device."""

from __future__ import annotations

import torch

from lightning_batchmem.devices.base import DeviceMemory, Timer, Utilization


def device_memory_for(device: torch.device, *, quick: bool = False) -> DeviceMemory:
    """The meter of ``device``.

    Args:
        device: where the model is trained, e.g. ``trainer.strategy.root_device``.
        quick: prefer a cheap reading to the most exact one, for use in every step; see :class:`.host.HostMemory`.

    Raises:
        ValueError: for a kind of device that no meter knows.
    """
    if device.type == "cuda":
        from lightning_batchmem.devices.cuda import CudaMemory

        return CudaMemory(device)
    if device.type == "cpu":
        from lightning_batchmem.devices.host import HostMemory

        return HostMemory(quick=quick)
    if device.type == "mps":
        from lightning_batchmem.devices.mps import MpsMemory

        return MpsMemory()
    raise ValueError(f"device must be a cuda, cpu or mps device, got {device}")


def device_name(device: torch.device) -> str:
    """How people call ``device``, e.g. ``"NVIDIA H100 80GB HBM3"``; the host is ``"host"``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "host" if device.type == "cpu" else device.type


def utilization_for(device: torch.device) -> Utilization | None:
    """Who knows how busy ``device`` is; ``None`` when nobody does (MPS, or CUDA without NVML)."""
    if device.type == "cuda":
        from lightning_batchmem.devices.nvml import nvml_utilization

        return nvml_utilization(device)
    if device.type == "cpu":
        from lightning_batchmem.devices.host import CpuUtilization

        return CpuUtilization()
    return None


def timer_for(device: torch.device) -> Timer | None:
    """Who times the work of ``device``; ``None`` where wall time has to do: on the host, which waits, and on MPS."""
    if device.type == "cuda":
        from lightning_batchmem.devices.cuda_timer import CudaTimer

        return CudaTimer(device)
    return None
