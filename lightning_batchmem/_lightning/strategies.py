"""Supported strategies and versions of torch, and steps without synchronization.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

# _optimizers_to_device is private in lightning 2.5.0 to 2.6.6.
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, distributed
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module, SyncBatchNorm

# The base class of all kinds of BatchNorm is private in torch 2.5.1 to 2.14.
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lightning_batchmem._lightning.trainer_state import lightning_name
from lightning_batchmem.devices.tensors import bytes_of

# The files with private names of torch state these versions too.
NEWEST_TESTED_TORCH = (2, 14)

# Strategies that set the number of processes and connect them.
_OF_RANKS = ("DDPStrategy", "ModelParallelStrategy", "FSDPStrategy")

_PIPELINE = "deepspeed.runtime.pipe.module.PipelineModule"


SEARCH_ONLY_TEXT = (
    "A run that only searches restores nothing: start your command with"
    " LIGHTNING_BATCHMEM=find:plan=plan.json,then=exit, and then with"
    " LIGHTNING_BATCHMEM=apply:plan=plan.json to train (in code"
    ' BatchFinder(plan="plan.json", then="exit"), and then apply=True instead)'
)
"""The remedy where a search in the training would have to restore what it cannot."""


def check_strategy(trainer: Trainer, *, restores: bool = True) -> None:
    """Refuse a strategy whose state a search could not restore, or whose memory it cannot read.

    Args:
        trainer: the Trainer.
        restores: whether a training follows the search in this process.
    """
    name = type(trainer.strategy).__name__
    # These are subclasses of accepted ones, so they come first.
    if has_engine(trainer) and restores:
        raise ValueError(
            f"strategy must not be {name} for a search in the training, because its engine and"
            f" optimizer cannot be made again for another batch size. {SEARCH_ONLY_TEXT}"
        )
    if _is_strategy(trainer, "XLAStrategy", "SingleDeviceXLAStrategy"):
        raise ValueError(
            f"strategy must not be {name} for BatchFinder, because XLA counts no peak memory."
            " Remove BatchFinder, and set the batch size by hand."
        )
    if restores and not _is_strategy(trainer, "SingleDeviceStrategy", *_OF_RANKS):
        raise ValueError(
            "strategy must be that of a single device, DDP, FSDPStrategy or ModelParallelStrategy"
            f" (FSDP2) for a search in the training, got {name}. {SEARCH_ONLY_TEXT}"
        )
    if not restores:
        _check_search_only(trainer)


def _check_search_only(trainer: Trainer) -> None:
    """Refuse what a run that only searches cannot do."""
    if trains_in_other_processes(trainer):
        raise ValueError(
            'then="exit" must be used with a strategy that trains in this process or starts the'
            f" script again, got {type(trainer.strategy).__name__} with processes of its own. Use"
            ' strategy="ddp".'
        )
    if not _is_strategy(trainer, "DeepSpeedStrategy"):
        return
    for name, device in _offloaded(trainer).items():
        if device == "nvme":
            raise ValueError(
                f"{name} of DeepSpeed must not be to NVMe for BatchFinder, because a search would"
                " write the states there again and again. Offload to the CPU, or set the batch size"
                " by hand."
            )
    if _is_pipeline(trainer.lightning_module):
        raise ValueError(
            "the module must have no PipelineModule of DeepSpeed for BatchFinder, because its"
            " micro batches are not those of the loader. Set the batch size by hand."
        )


def _is_pipeline(module: Module) -> bool:
    kinds = [kind for part in module.modules() for kind in type(part).__mro__]
    return any(f"{kind.__module__}.{kind.__name__}".startswith(_PIPELINE) for kind in kinds)


def _offloaded(trainer: Trainer) -> dict[str, str]:
    """What DeepSpeed keeps outside the device, with the place."""
    zero = _zero_config(trainer)
    names = ("offload_optimizer", "offload_param")
    places = {name: (zero.get(name) or {}).get("device", "none") for name in names}
    return {name: place for name, place in places.items() if place != "none"}


def _zero_config(trainer: Trainer) -> dict[str, Any]:
    # mypy does not know the kind of the strategy.
    config: dict[str, Any] = getattr(trainer.strategy, "config", None) or {}
    zero: dict[str, Any] = config.get("zero_optimization") or {}
    return zero


def strategy_text(trainer: Trainer) -> str:
    """The strategy with how it shards and offloads, and the precision."""
    strategy: Any = trainer.strategy
    texts = [type(strategy).__name__]
    if _is_strategy(trainer, "DeepSpeedStrategy"):
        texts.append(f"stage {_zero_config(trainer).get('stage', 0)}")
        texts += [f"{name} {place}" for name, place in _offloaded(trainer).items()]
    if _is_strategy(trainer, "FSDPStrategy"):
        texts.append(strategy.sharding_strategy.name)
        texts += ["offload"] if strategy.cpu_offload.offload_params else []
    return ", ".join([*texts, str(trainer.precision)])


def trains_in_other_processes(trainer: Trainer) -> bool:
    """Whether the strategy trains in processes that it starts, as ``ddp_spawn`` does."""
    kind = lightning_name(trainer, "strategies.launchers._MultiProcessingLauncher")
    return isinstance(trainer.strategy.launcher, kind)


def has_engine(trainer: Trainer) -> bool:
    """Whether the strategy has an engine, which cannot be made again for another size."""
    return _is_strategy(trainer, "DeepSpeedStrategy")


def exchanges_buckets(trainer: Trainer) -> bool:
    """Whether ranks exchange gradients in the buckets of DDP."""
    return _is_strategy(trainer, "DDPStrategy") and not has_engine(trainer)


def check_environment(plugin: Any) -> None:
    """Refuse a launcher whose variables are not set here: some read them in their Trainer."""
    name = type(plugin).__name__
    if name.endswith("Environment") and name != "TorchElasticEnvironment":
        raise ValueError(
            f"the Trainer has the plugin {name}, and simulate sets up the ranks itself; run the"
            " program without it"
        )


def check_one_rank(trainer: Trainer) -> None:
    """Refuse a strategy whose first rank cannot run without the others."""
    strategy: Any = trainer.strategy
    if trainer.world_size == 1:
        return
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        raise ValueError(
            "the program has made a process group of gloo for tensors of GPUs, and simulate has"
            ' NCCL for them; use init_process_group("nccl"), or leave it to the Trainer'
        )
    check_environment(strategy.cluster_environment)
    if _is_strategy(trainer, "ModelParallelStrategy"):
        # It is private in lightning 2.5.0 to 2.6.6.
        size = strategy._tensor_parallel_size
        if size == "auto":
            size = trainer.num_devices
        if size != 1:
            raise ValueError(
                "ModelParallelStrategy must have tensor_parallel_size=1 for simulate, because each"
                f" rank of tensor parallelism computes something else, got {size}"
            )


def exchange_by(trainer: Trainer, backend: str) -> None:
    """Let ranks exchange by gloo, which needs no network of GPUs, or by NCCL."""
    if _is_strategy(trainer, *_OF_RANKS):
        # It is private in lightning 2.5.0 to 2.6.6, and read when the process group is made.
        vars(trainer.strategy)["_process_group_backend"] = backend


def steps_are_collective(trainer: Trainer) -> bool:
    """Whether every step needs all ranks: sharded parameters, or SyncBatchNorm."""
    return trainer.world_size > 1 and (
        not _is_strategy(trainer, "DDPStrategy")
        or _is_strategy(trainer, "DeepSpeedStrategy")
        or any(isinstance(module, SyncBatchNorm) for module in trainer.lightning_module.modules())
    )


def outer_module(trainer: Trainer) -> Module:
    """The module with all state of a step: under FSDP1 the wrapper around the user's.

    The first step makes this wrapper the root of the sharded modules in it. If only the modules
    went back to the state before, the next step would make each of them a root, and a root keeps
    its gathered parameters from forward to backward.
    """
    model = trainer.strategy.model
    return model if isinstance(model, FullyShardedDataParallel) else trainer.lightning_module


def has_batch_norm(module: Module) -> bool:
    """Whether a batch of one sample is an error in training."""
    return any(isinstance(part, _BatchNorm) for part in module.modules())


def bucket_bytes(trainer: Trainer) -> int:
    """Bytes of the gradients that ranks exchange under DDP.

    After the first step of a training DDP makes its buckets again, in another order, and no step of
    a rank alone does that.
    """
    if trainer.world_size == 1 or not _has_ddp_wrapper(trainer):
        return 0
    return bytes_of(p for p in trainer.lightning_module.parameters() if p.requires_grad)


@contextmanager
def without_synchronization(trainer: Trainer) -> Iterator[None]:
    """Run steps on one rank only, without collectives of DDP and of the strategy."""
    if trainer.world_size == 1:
        yield
        return
    strategy = trainer.strategy
    # A wrapper of DDP stays alive with its buckets. Its no_sync would exchange buffers in the first
    # forward pass (torch 2.5.1, 2.13).
    wrapper = strategy.model
    strategy.model = trainer.lightning_module
    collectives = _local_collectives(trainer.world_size)
    vars(strategy).update(collectives)
    try:
        yield
    finally:
        for name in collectives:
            del vars(strategy)[name]
        strategy.model = wrapper


# The cache returns the same functions each time, because a value that is logged again has to be
# reduced by the same function as before.
@cache
def _local_collectives(world_size: int) -> dict[str, Callable[..., Any]]:
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
    """Make a new DDP wrapper.

    A synchronized step reorders the buckets of the old wrapper, which changes sums.
    """
    strategy: Any = trainer.strategy
    if _has_ddp_wrapper(trainer):
        strategy.model = trainer.lightning_module
        # This frees the old wrapper before the new one takes as much memory.
        gc.collect()
        # This is state of the wrapper in lightning 2.6. Lightning 2.5.0 does not have it.
        strategy._pl_static_graph_delay_done = False
        strategy.configure_ddp()


def _has_ddp_wrapper(trainer: Trainer) -> bool:
    return isinstance(trainer.strategy.model, DistributedDataParallel)


def _is_strategy(trainer: Trainer, *names: str) -> bool:
    kinds = tuple(lightning_name(trainer, f"strategies.{name}") for name in names)
    return isinstance(trainer.strategy, kinds)


def configure_optimizers_again(trainer: Trainer) -> None:
    """Make new optimizers and schedulers, as ``Strategy.setup`` does."""
    strategy = trainer.strategy
    strategy.setup_optimizers(trainer)
    strategy.setup_precision_plugin()
    _optimizers_to_device(strategy.optimizers, strategy.root_device)


@cache
def warn_of_untested_torch(torch_version: str = torch.__version__) -> None:
    """Warn once if torch is newer than every version that the package was run with."""
    major, minor = torch_version.split(".")[:2]
    if (int(major), int(minor)) > NEWEST_TESTED_TORCH:
        newest = ".".join(map(str, NEWEST_TESTED_TORCH))
        rank_zero_warn(
            f"torch {torch_version} is newer than {newest}, the newest that lightning-batchmem was"
            " tested with. If it fails, use an older torch or a newer lightning-batchmem."
        )
