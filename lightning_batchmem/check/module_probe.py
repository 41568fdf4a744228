"""One training step at given sizes, without a training, whose memory is divided among modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_batchmem._lightning.clean_start import CleanStart, ProjectSnapshot
from lightning_batchmem._lightning.packages import end_of_tuning
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.trainer_search import TrainerSearch
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.module_memory import ModuleStorages, why_not_possible
from lightning_batchmem.find import SearchOnly
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.search.compiled import each_size_static
from lightning_batchmem.search.meter import TrialMeter, other_bytes_at_start
from lightning_batchmem.search.session import Session
from lightning_batchmem.search.steps import ConsecutiveSteps


def storages_of_steps(
    trainer: Trainer,
    model: LightningModule,
    data: Any,
    sizes: Sequence[int],
    policy: SearchPolicy,
) -> list[ModuleStorages]:
    """Measure one step at each size, after the optimizers have their state.

    Model, data and Trainer are as before afterwards.

    Args:
        trainer: a Trainer of one device.
        model: the module to train.
        data: a datamodule, training loaders or ``None``.
        sizes: batch sizes in samples, the smallest first.
        policy: the numbers that steer the reading of samples and the warm-up.

    Raises:
        ValueError: if a step cannot be measured in this way.
    """
    probe = _ModuleProbe(min_steps_per_epoch=None, worst_case="longest")
    probe.sizes = sizes
    probe.policy = policy
    probe.search(trainer, model, None, data, None)
    if probe.storages is None:
        raise ValueError(
            "the Trainer must be one that trains, got fast_dev_run, or no batches or epochs"
        )
    return probe.storages


class _ModuleProbe(SearchOnly):
    """Runs the steps in place of a search."""

    sizes: Sequence[int]
    storages: list[ModuleStorages] | None = None

    def _search_in(self, trainer: Trainer) -> TrainerSearch:
        search = super()._search_in(trainer)
        return _ProbedTrainer(
            trainer, search.device_memory, search.options, search.policy, search.ranks, self
        )


@dataclass(eq=False)
class _ProbedTrainer(TrainerSearch):
    """The steps in a Trainer whose loop has not started."""

    probe: _ModuleProbe

    def training(
        self,
        setting: BatchSizeSetting,
        snapshot: ProjectSnapshot,
        given_plan: Plan | str | Path | None,
    ) -> Plan:
        """Measure the steps, and end ``fit`` without a plan."""
        sizes = self.probe.sizes
        clean_start = CleanStart(self.trainer, self.device_memory, snapshot)
        with clean_start.entered(), each_size_static():
            session = self._training_session(clean_start, setting)
            largest, reason = min(session.bounds())
            if largest < sizes[-1]:
                raise ValueError(
                    f"the data must have batches of {sizes[-1]} samples, got at most {largest}"
                    f" ({reason})"
                )
            if session.training is None:
                raise ValueError("the memory of modules needs training steps")
            self.probe.storages = [
                _storages_at(size, session, self.device_memory, self.policy) for size in sizes
            ]
        raise end_of_tuning(self.trainer)


def _storages_at(
    batch_size: int, session: Session, device_memory: DeviceMemory, policy: SearchPolicy
) -> ModuleStorages:
    """Run steps until the optimizers have their state, and then one that is measured."""
    session.restart(batch_size)
    other_bytes = other_bytes_at_start(session, device_memory)
    meter = TrialMeter(session, device_memory, policy, other_bytes)
    session.phases.watch(session.optimizers, forward_follows=True)
    try:
        with ConsecutiveSteps(meter, meter.primary, batch_size) as consecutive:
            consecutive.warm_up(policy.warmup_steps)
            reason = why_not_possible(session.module, is_compiled=meter.is_compiled)
            if reason:
                raise ValueError(f"the memory of a step cannot be counted: {reason}")
            storages = ModuleStorages(
                session.module, session.optimizers, None, session.device.type, session.phases
            )
            with _without_collections(), storages:
                consecutive.run(1)
    finally:
        session.phases.unwatch()
    return storages


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect garbage now, and not at a moment that depends on what ran before."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
