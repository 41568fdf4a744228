"""Readings that every device shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class MemoryStats(NamedTuple):
    """Memory of this process on one device, now or at its peak.

    Attributes:
        allocated_bytes: blocks in use (host: the resident set).
        reserved_bytes: memory that the allocator holds, its cache included; ``None`` on the host.
        requested_bytes: sizes that were requested, before rounding to blocks; ``None`` where not
            counted (host).
    """

    allocated_bytes: int
    reserved_bytes: int | None = None
    requested_bytes: int | None = None


class Utilization(NamedTuple):
    """Utilization of a device.

    Attributes:
        key: name of the metric.
        percent: function that returns a percentage, or ``None`` without a reading.
    """

    key: str
    percent: Callable[[], float | None]
