"""The functions of torch on MPS, over a device whose use is set by the test."""

from __future__ import annotations

import torch

from tests.helpers.fake_device import FakeDevice


class FakeMps:
    """``torch.accelerator`` and ``torch.mps`` of torch 2.13 in one object.

    Args:
        device: the memory that tensors use, in bytes.
        recommended_bytes: what Metal recommends.
        metal_bytes: what Metal's own libraries take.
    """

    def __init__(
        self, device: FakeDevice, recommended_bytes: int = 2**40, metal_bytes: int = 0
    ) -> None:
        self.device = device
        self.recommended_bytes = recommended_bytes
        self.metal_bytes = metal_bytes
        self.has_started = True
        self.waits = 0

    def current_accelerator(self) -> torch.device:
        return torch.device("mps")

    def memory_stats(self) -> dict[str, int]:
        if not self.has_started:
            return {}
        stats = {"current": self.device.current(), "peak": self.device.peak()}
        return {
            f"{name}_bytes.all.{when}": getattr(reading, f"{name}_bytes") or 0
            for name in ("allocated", "reserved")
            for when, reading in stats.items()
        }

    def reset_peak_memory_stats(self) -> None:
        self.device.reset_peak()

    def empty_cache(self) -> None:
        self.device.release_cached()

    def synchronize(self) -> None:
        self.waits += 1

    def driver_allocated_memory(self) -> int:
        return (self.device.current().reserved_bytes or 0) + self.metal_bytes

    def recommended_max_memory(self) -> int:
        return self.recommended_bytes
