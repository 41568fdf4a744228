"""What the loader workers of a stage hold in host memory, and how large a batch that lets be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from lightning_batchmem.apply.loaders import LoaderInfo
from lightning_batchmem.devices.host import HostMemory
from lightning_batchmem.measure.worker_memory import WorkerMemory, measure_workers

UNBOUNDED_MAX_BATCH_SIZE = 2**20
"""Largest size that is tried where neither data nor user sets a ceiling: a stream without a length."""

_WORKER_SIZES = (2, 8)
"""At which loader workers are measured: small, so that little is read, and apart, so that the growth shows."""


class StageWorkers:
    """What loader workers hold in host memory, as a function of the batch size.

    Args:
        loaders: those whose workers are alive at the same time.
    """

    def __init__(self, loaders: Sequence[LoaderInfo]) -> None:
        self._measured: list[tuple[LoaderInfo, WorkerMemory]] = []
        for one in loaders:
            # a loader of a fixed size need not read all of it
            sizes = {one.size_at(s) if one.requested_at is not None else min(s, one.size) for s in _WORKER_SIZES}
            if (memory := measure_workers([one.loader], sorted(sizes))) is not None:
                self._measured.append((one, memory))

    def bytes_at(self, batch_size: int) -> int:
        """Bytes that all of them hold at most."""
        return sum(memory.bytes_at(one.size_at(batch_size)) for one, memory in self._measured)

    def largest_in_host_memory(self, processes: int = 1) -> int:
        """The largest batch size at which they fit into what the host still has.

        Args:
            processes: ranks on this host, each with as many workers.
        """
        if not self._measured:
            return UNBOUNDED_MAX_BATCH_SIZE
        host = HostMemory()
        room = (host.budget_bytes() - host.current().allocated_bytes) // processes
        return max(1, bisect_right(range(1, UNBOUNDED_MAX_BATCH_SIZE + 1), room, key=self.bytes_at))
