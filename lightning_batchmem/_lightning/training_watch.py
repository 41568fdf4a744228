"""A watch over the first epoch of a training, for memory that its search could not see."""

from __future__ import annotations

import warnings

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.devices.optimizers import state_tensors
from lightning_batchmem.devices.peaks import RequestedBytes
from lightning_batchmem.devices.tensors import bytes_of, tensors_in
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import mib

MORE_IN_USE_SHARE = 0.01
"""Training that begins with more in use than the search, by this share of the limit, warns."""

LARGER_SHARE = 0.05
"""A batch counts as larger from this share of more bytes on: the limit has room for a few per cent.
"""


class TrainingWatch:
    """Warns once if a training begins with more in use than its search, and once of a larger batch.

    Args:
        device_memory: the memory of the device.
        plan: the plan of the search.
        knows_largest_batch: whether the search has used the largest batches, and not average ones.
    """

    def __init__(
        self, device_memory: DeviceMemory, plan: Plan, *, knows_largest_batch: bool
    ) -> None:
        at_size = [trial for trial in plan.trials if trial.batch_size == plan.batch_size]
        self._device_memory = device_memory
        self._plan = plan
        # Live bytes before the first step; 0 where they are not known, or were compared.
        self._start_bytes = 0
        if device_memory.reports_requested_bytes and at_size:
            self._start_bytes = at_size[-1].start_bytes
        # Bytes of the largest batch; 0 where it is not known, or a warning was given.
        self._largest_bytes = 0
        if knows_largest_batch and at_size:
            self._largest_bytes = at_size[-1].largest_batch_bytes

    def begin_step(self, trainer: Trainer, batch: object) -> None:
        """Compare what is in use, and the batch, with those of the search."""
        if self._start_bytes > 0:
            value_or_none("What memory the training begins with", self._check_start, trainer, batch)
            self._start_bytes = 0
        # The first epoch has every sample.
        if trainer.current_epoch == 0 and self._largest_bytes > 0:
            value_or_none("The size of a batch", self._check_batch, batch)

    def _check_start(self, trainer: Trainer, batch: object) -> None:
        # A resumed run has restored the optimizer state, which the rehearsal made itself.
        made_bytes = bytes_of(
            [*tensors_in(batch), *state_tensors(trainer.optimizers)],
            trainer.strategy.root_device,
        )
        current_bytes = RequestedBytes(self._device_memory).current().allocated_bytes
        more_bytes = current_bytes - made_bytes - self._start_bytes
        if more_bytes > MORE_IN_USE_SHARE * self._plan.limit_bytes:
            rank_zero_warn(
                f"Training begins with {mib(more_bytes)} more in use than the search did, for"
                " example because of another callback. If it runs out of memory, set a smaller"
                " max_batch_size."
            )

    def _check_batch(self, batch: object) -> None:
        batch_bytes = bytes_of(tensors_in(batch))
        if batch_bytes <= (1 + LARGER_SHARE) * self._largest_bytes:
            return
        largest_bytes = self._largest_bytes
        self._largest_bytes = 0
        # Activations and the batch grow with the bytes of the batch, and other memory does not.
        fitting_size = max(1, self._plan.batch_size * largest_bytes // batch_bytes)
        # Each rank reads other samples, so each of them may warn.
        warnings.warn(
            f"A training batch has {mib(batch_bytes)}, and the largest that BatchFinder measured at"
            f" this batch size has {mib(largest_bytes)}. If memory runs out, batches as large"
            f" as this one fit with max_batch_size={fitting_size}.",
            stacklevel=2,
        )
