"""Strategies that can be searched, and steps without exchange. Read in lightning 2.5.0 and 2.6.6."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel


def check_strategy(trainer: Trainer) -> None:
    """Raise ``ValueError`` for any strategy but a single device, DDP and ModelParallelStrategy (FSDP2)."""
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy):  # a subclass of DDPStrategy
        raise ValueError(
            "strategy must not be DeepSpeedStrategy for BatchFinder, because its engine and optimizer cannot be made"
            " again for another size. Search once with ModelParallelStrategy (FSDP2), which shards in the same way, and"
            " set train_micro_batch_size_per_gpu to the result."
        )
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy):
        raise ValueError(
            "strategy must be that of a single device, DDP or ModelParallelStrategy (FSDP2) for BatchFinder, got"
            f" {type(strategy).__name__}. Search once with one of them and set the resulting size."
        )


def steps_are_collective(trainer: Trainer) -> bool:
    """Whether a rank cannot take a step alone: parameters are sharded, or SyncBatchNorm exchanges statistics."""
    if trainer.world_size == 1:
        return False
    is_sharded = isinstance(trainer.strategy, ModelParallelStrategy)
    return is_sharded or any(isinstance(module, SyncBatchNorm) for module in trainer.lightning_module.modules())


def is_synchronised(trainer: Trainer) -> bool:
    """Whether DDP's wrapper exchanges gradients at the end of backward."""
    return isinstance(trainer.strategy.model, DistributedDataParallel)


@contextmanager
def without_synchronisation(trainer: Trainer) -> Iterator[None]:
    """Run steps without any exchange through the strategy: of gradients, buffers, and logged or gathered values.

    DDP's wrapper and its buckets, which are as large as the gradients, stay in memory. ``no_sync`` would exchange
    buffers in the first forward pass (torch 2.5.1 and 2.13). ``self.log(sync_dist=True)`` and ``self.all_gather``
    return what they would if all ranks had the same value. Direct calls of ``torch.distributed`` still run.
    """
    strategy, wrapper = trainer.strategy, trainer.strategy.model
    if trainer.world_size == 1:
        yield
        return
    if isinstance(wrapper, DistributedDataParallel):
        strategy.model = _module_of(trainer)
    alone = _alone(trainer.world_size)
    vars(strategy).update(alone)
    try:
        yield
    finally:
        for name in alone:
            del vars(strategy)[name]
        strategy.model = wrapper


@cache  # the same functions each time: Lightning requires that a value is logged with the same reduction again
def _alone(world_size: int) -> dict[str, Callable[..., Any]]:
    """The strategy's collectives for ranks that all have the same values."""

    def reduce(tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        is_sum = reduce_op == ReduceOp.SUM or str(reduce_op).lower() == "sum"
        return tensor * world_size if is_sum and isinstance(tensor, Tensor) else tensor

    def all_gather(tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return torch.stack([tensor] * world_size)

    return {
        "reduce": reduce,
        "all_gather": all_gather,
        "broadcast": lambda obj, src=0: obj,
        "barrier": lambda *_, **__: None,
    }


def wrap_again(trainer: Trainer) -> None:
    """Create a new DDP wrapper, as ``DDPStrategy.setup`` does; every rank must call it.

    In its first synchronized step a wrapper orders its buckets by the arrival of the gradients, which changes sums.
    """
    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy) and isinstance(strategy.model, DistributedDataParallel):
        strategy.model = _module_of(trainer)
        gc.collect()  # frees the old wrapper and its hooks before the new one takes as much memory
        strategy._pl_static_graph_delay_done = False  # an attribute of 2.6; 2.5.0 does not have it
        strategy.configure_ddp()


def processes_on_node(trainer: Trainer) -> int:
    """Number of ranks that share the memory of this host."""
    return max(1, int(getattr(trainer.strategy, "num_processes", 1)))


def _module_of(trainer: Trainer) -> LightningModule:
    module: LightningModule = trainer.lightning_module
    return module
