"""A watch over the batches of a training, for samples that the search has not seen."""

from __future__ import annotations

from typing import NamedTuple

from lightning_batchmem.devices.tensors import bytes_of, tensors_in
from lightning_batchmem.plan.records import mib

LARGER_SHARE = 0.05
"""A batch counts as larger from this share of more bytes on: the limit has room for a few per cent.
"""


class BatchWatch(NamedTuple):
    """The largest batch that a search has measured, for comparison with those of the training."""

    batch_size: int
    largest_bytes: int

    def warning(self, batch: object) -> str | None:
        """A warning if this batch is larger than any that was measured."""
        batch_bytes = bytes_of(tensors_in(batch))
        if batch_bytes <= (1 + LARGER_SHARE) * self.largest_bytes:
            return None
        # Activations and the batch grow with the bytes of the batch, and other memory does not.
        fitting_size = max(1, self.batch_size * self.largest_bytes // batch_bytes)
        return (
            f"A training batch has {mib(batch_bytes)}, and the largest that BatchFinder measured at"
            f" this batch size has {mib(self.largest_bytes)}. If memory runs out, batches as large"
            f" as this one fit with max_batch_size={fitting_size}."
        )
