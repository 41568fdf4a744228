"""What a search has to know of the strategy that a Trainer runs on. Read in lightning 2.5.0 and 2.6.6."""

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
    """Let steps stay on their rank: no gradients or buffers are exchanged, nor what modules log or gather.

    DDP's wrapper stays alive beside the module that it wraps, with all that it holds (its buckets are as large as the
    gradients). ``no_sync`` would exchange buffers in the first forward (torch 2.5.1 and 2.13). What goes through the
    strategy (``self.log(sync_dist=True)``, ``self.all_gather``) is answered as if all ranks had the same. Collectives
    that a step calls by itself (``torch.distributed``) are not seen.
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


@cache  # the same functions each time: a value that is logged again has to be reduced by the same as before
def _alone(world_size: int) -> dict[str, Callable[..., Any]]:
    """The strategy's collectives on ranks that all have the same."""

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
