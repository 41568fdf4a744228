"""Garbage collection that looks through all objects only where garbage may hold memory."""

from __future__ import annotations

import gc
from collections.abc import Callable


class Garbage:
    """The garbage of this process, as far as it holds memory of one device.

    A full collection looks through every object of every imported library, which takes 0.2 s in a
    process with Lightning. Nearly all garbage of a trial is young, and a collection of young
    objects takes less than a millisecond. What it misses shows as memory that stays in use, and
    then a full collection follows.

    Args:
        noise_bytes: the memory in use may differ by this much although nothing is held.
    """

    def __init__(self, noise_bytes: int) -> None:
        self._noise_bytes = noise_bytes
        # The least that was in use since the last full collection, and after it.
        self._least_bytes: int | None = None

    def collect(self, release: Callable[[], int]) -> None:
        """Collect it, and release what it held.

        Args:
            release: gives free memory back, and returns the bytes that are still in use.
        """
        gc.collect(1)
        used_bytes = release()
        if self._least_bytes is None or used_bytes > self._least_bytes + self._noise_bytes:
            gc.collect()
            used_bytes = self._least_bytes = release()
        self._least_bytes = min(self._least_bytes, used_bytes)
