"""Host memory of the batches that loader workers have ready."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch

from lightning_batchmem.apply.loaders import LoaderInfo
from lightning_batchmem.devices.host import HostMemory
from lightning_batchmem.measure.batches import ProbeBatches
from lightning_batchmem.plan.options import UNBOUNDED_MAX_BATCH_SIZE


class WorkerMemory:
    """Bytes in loader workers by arithmetic: the batches that they make ahead, and one that is being fetched.

    Args:
        stages: batches of the stages whose workers are alive at the same time.
    """

    def __init__(self, stages: Sequence[ProbeBatches]) -> None:
        self._stages = stages

    def bytes_at(self, batch_size: int) -> int:
        """Bytes of all workers."""
        batches = [one for stage in self._stages for one in stage.batch_bytes(batch_size)]
        return sum(_batches_ahead(info) * batch_bytes for info, batch_bytes in batches)

    def largest_in_host_memory(self, processes: int = 1) -> int:
        """The largest batch size whose batches fit into free host memory, with so many ranks on this host."""
        if self.bytes_at(1) == 0:
            return UNBOUNDED_MAX_BATCH_SIZE
        host = HostMemory()
        room = (host.budget_bytes() - host.current().allocated_bytes) // processes
        return max(1, bisect_right(range(1, UNBOUNDED_MAX_BATCH_SIZE + 1), room, key=self.bytes_at))


def _batches_ahead(info: LoaderInfo) -> int:
    loader = info.loader
    if not loader.num_workers:
        return 0
    # Pinned memory comes in powers of two. Source: CachingHostAllocator.h in pytorch/aten/src/ATen/core, `allocate`
    copies = 2 if loader.pin_memory and torch.cuda.is_available() else 1
    return (loader.num_workers * (loader.prefetch_factor or 0) + 1) * copies
