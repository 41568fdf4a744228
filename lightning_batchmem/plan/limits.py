"""Everything that limits a search."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.records import SizeLimit


@dataclass(frozen=True)
class SearchLimits:
    """Everything that limits a search, the same on all ranks; sizes in samples.

    Args:
        limit_bytes: the most that this process may hold.
        min_batch_size: the smallest size that is allowed.
        max_batch_size: the largest size that is allowed.
        max_reason: the argument, setting or data that limits the largest size.
        options: the arguments of the user, without those that do not apply to the stage.
        accumulate_grad_batches: batches to an optimizer step where there is no target.
        ranks: processes that train together.
        missing_bytes: by how much the process and the gradients exceed the limit of the host before
            the first batch; 0 on a device.
        is_host: whether exceeding the limit ends the process without an error.
        steps_are_collective: whether ranks take every step together.
        has_expandable_segments: whether the segments of every rank's allocator can grow: under the
            limit of a trial it may release its cache although there is room.
        avoided_sizes: sizes that are used only where no other is allowed: the last batch of their
            epochs has one sample, which is an error to BatchNorm.
    """

    limit_bytes: int
    min_batch_size: int
    max_batch_size: int
    max_reason: SizeLimit
    options: SearchOptions = SearchOptions()  # noqa: RUF009
    accumulate_grad_batches: int = 1
    ranks: int = 1
    missing_bytes: int = 0
    is_host: bool = False
    steps_are_collective: bool = False
    has_expandable_segments: bool = False
    avoided_sizes: frozenset[int] = frozenset()

    @property
    def catches_errors(self) -> bool:
        """Whether a step that does not fit is an error on this rank alone, which can be caught."""
        return not (self.is_host or self.steps_are_collective)
