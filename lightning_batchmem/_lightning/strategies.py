"""What a search has to know of the strategy that a Trainer runs on. Read in lightning 2.5.0 and 2.6.6."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel


def check_strategy(trainer: Trainer) -> None:
    """Refuse, before any step, a strategy whose engine a search could not put back.

    Raises:
        ValueError: for any but a single device, DDP and ModelParallelStrategy (FSDP2).
    """
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy):  # a subclass of DDPStrategy
        raise ValueError(
            "strategy must not be DeepSpeedStrategy for BatchFinder: its engine takes the batch size when it is made,"
            " and cannot be made again, nor its optimizer. Set train_micro_batch_size_per_gpu by hand, found with"
            " strategy=ModelParallelStrategy() (FSDP2) for instance, which shards alike"
        )
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy):
        raise ValueError(
            "strategy must be that of a single device, DDP or ModelParallelStrategy (FSDP2) for BatchFinder, got"
            f" {type(strategy).__name__}; search once with one of them and set the size it finds"
        )


def steps_are_collective(trainer: Trainer) -> bool:
    """Whether a rank cannot take a step by itself: parameters are sharded, or BatchNorm speaks to the other ranks."""
    if trainer.world_size == 1:
        return False
    is_sharded = isinstance(trainer.strategy, ModelParallelStrategy)
    return is_sharded or any(isinstance(module, SyncBatchNorm) for module in trainer.lightning_module.modules())


def is_synchronised(trainer: Trainer) -> bool:
    """Whether DDP's wrapper exchanges gradients at the end of backward."""
    return isinstance(trainer.strategy.model, DistributedDataParallel)


@contextmanager
def without_synchronisation(trainer: Trainer) -> Iterator[None]:
    """Let steps of DDP stay on their rank: no gradients are exchanged, nor buffers.

    The wrapper stays alive beside the module that it wraps, with all that it holds (its buckets are as large as the
    gradients). ``no_sync`` would exchange buffers in the first forward (torch 2.5.1 and 2.13).
    """
    strategy, wrapper = trainer.strategy, trainer.strategy.model
    if not isinstance(wrapper, DistributedDataParallel):
        yield
        return
    strategy.model = _module_of(trainer)
    try:
        yield
    finally:
        strategy.model = wrapper


def wrap_again(trainer: Trainer) -> None:
    """Make DDP's wrapper anew, as ``DDPStrategy.setup`` does; every rank has to call it.

    After its first synchronised step a wrapper has its buckets in the order in which the gradients came: other sums.
    """
    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy) and isinstance(strategy.model, DistributedDataParallel):
        strategy.model = _module_of(trainer)
        gc.collect()  # the old one and its hooks are gone before the new one takes as much
        strategy._pl_static_graph_delay_done = False  # what 2.6 notes of the wrapper; 2.5.0 does not have it
        strategy.configure_ddp()


def processes_on_node(trainer: Trainer) -> int:
    """How many ranks share the memory of this host."""
    return max(1, int(getattr(trainer.strategy, "num_processes", 1)))


def _module_of(trainer: Trainer) -> LightningModule:
    module: LightningModule = trainer.lightning_module
    return module
