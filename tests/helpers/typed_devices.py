"""mypy checks here that the devices of the tests have the same Protocol as those of the package."""

from __future__ import annotations

import torch

from lightning_batchmem.devices.accelerator import AcceleratorMemory
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.host import HostMemory
from tests.helpers.fake_device import FakeDevice


def all_kinds() -> list[DeviceMemory]:
    return [
        AcceleratorMemory(torch.device("cuda")),
        HostMemory(),
        FakeDevice(available_bytes=1),
    ]
