"""How busy an NVIDIA GPU is: the driver's own samples, through NVML, for the very device that torch uses."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.devices.base import Utilization


def nvml_utilization(device: torch.device) -> Utilization | None:
    """Who tells the utilization of ``device``.

    The device is looked up by its UUID: NVML counts neither in torch's order nor by ``CUDA_VISIBLE_DEVICES``
    (pytorch/pytorch#94472).

    Args:
        device: a CUDA device; asking for its UUID starts CUDA.

    Returns:
        The reader, or ``None`` with one warning that says why: NVML is missing (pytorch/pytorch#118173), the GPU does
        not report utilization, or it is split by MIG (of which others show a false 0, Syllo/nvtop#256).
    """
    reader = _reader(device)
    if isinstance(reader, str):
        rank_zero_warn(f"GPU utilization is left out: {reader}.")
        return None
    return reader


def _reader(device: torch.device) -> _NvmlUtilization | str:
    """The reader, or the reason why there is none."""
    try:
        import pynvml
    except ImportError as error:
        return f"nvidia-ml-py is not installed ({error})"
    # All supported releases of torch (2.5.1 and later) have it. There is no fallback by position: NVML orders by PCI
    # bus, CUDA by speed unless CUDA_DEVICE_ORDER says otherwise, and the wrong GPU is worse than none.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return "torch does not tell the device's UUID"
    name = "GPU-" + str(uuid).removeprefix("GPU-")
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        if _is_split(pynvml, handle):
            return f"{name} is split by MIG, and NVML does not measure its slices"
        reader = _NvmlUtilization(pynvml, handle)
        reader.read()  # finds out now what is not supported, and leaves out what happened before
    except pynvml.NVMLError_NotFound:
        return f"NVML knows no whole GPU {name} (a MIG slice has no utilization of its own)"
    except pynvml.NVMLError as error:
        return f"NVML says {error}"
    return reader


class _NvmlUtilization:
    """Mean of the driver's samples between two calls.

    The driver keeps some 100 samples, one each 1/6 to 1 s: an interval longer than that is known by its end. A GPU
    that keeps none tells the last sample period only.

    Source: nvmlDeviceGetSamples and nvmlUtilization_t, https://docs.nvidia.com/deploy/nvml-api/
    """

    key = "gpu_pct"

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._has_samples = True
        self._last_us = 0  # the driver's time stamp of the newest sample seen, in microseconds
        self._warned = False

    def percent_since_last_call(self) -> float | None:
        """Busy share since the previous call, 0 to 100; ``None`` without a new sample or when NVML fails."""
        try:
            return self.read()
        except self._nvml.NVMLError as error:  # a lost GPU, or a driver replaced while training runs
            if not self._warned:
                self._warned = True
                rank_zero_warn(f"GPU utilization is missing from here on: NVML says {error}.")
            return None

    def read(self) -> float | None:
        """As :meth:`percent_since_last_call`, but raises ``NVMLError``."""
        if self._has_samples:
            percents = self._new_percents()
            if percents:
                return sum(percents) / len(percents)
            if self._last_us:
                return None  # asked again within one sample period
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)

    def _new_percents(self) -> list[float]:
        nvml = self._nvml
        try:
            kind, samples = nvml.nvmlDeviceGetSamples(self._handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._last_us)
        except nvml.NVMLError_NotSupported:
            self._has_samples = False
            return []
        except nvml.NVMLError_NotFound:  # NVML's answer to "nothing newer than that"
            return []
        field = _VALUE_FIELDS.get(kind)
        if field is None:
            self._has_samples = False
            return []
        # Slots that the driver did not fill carry no time stamp, and are no idle sample.
        new = [sample for sample in samples if sample.timeStamp > self._last_us]
        self._last_us = max((int(sample.timeStamp) for sample in new), default=self._last_us)
        percents = [float(getattr(sample.sampleValue, field)) for sample in new]
        return [percent for percent in percents if 0 <= percent <= 100]


# nvmlValueType_t -> the member of the union nvmlValue_t that holds the value. Source: nvml.h
_VALUE_FIELDS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}


def _is_split(nvml: Any, handle: Any) -> bool:
    try:
        mode, _ = nvml.nvmlDeviceGetMigMode(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):  # a GPU, or a driver, from before MIG
        return False
    return bool(mode == nvml.NVML_DEVICE_MIG_ENABLE)
