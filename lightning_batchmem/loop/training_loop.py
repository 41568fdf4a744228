"""The parts of a training loop that a user writes: checked, and without Fabric's wrappers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lightning.fabric import Fabric, is_wrapped
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_batchmem.search.ranks import Ranks


@dataclass(eq=False)
class TrainingLoop:
    """A training loop in plain PyTorch, or with Fabric.

    Args:
        step: runs one step on a batch.
        make_batch: makes a batch of this many samples.
        models: the modules that it trains.
        optimizers: their optimizers.
        state: the other objects that a step changes.
        fabric: the Fabric that set them up, or ``None``.
    """

    step: Callable[[Any], object]
    make_batch: Callable[[int], Any]
    models: list[Module]
    optimizers: list[Optimizer]
    state: list[object]
    fabric: Fabric | None

    @property
    def device(self) -> torch.device:
        if self.fabric is not None:
            return self.fabric.device
        return next(parameter.device for model in self.models for parameter in model.parameters())

    @cached_property
    def ranks(self) -> Ranks:
        # All parts of a search need the same object, because it has the step in which a rank fails.
        if self.fabric is not None:
            return Ranks(self.fabric.global_rank, self.fabric.world_size)
        if distributed.is_available() and distributed.is_initialized():
            return Ranks(distributed.get_rank(), distributed.get_world_size())
        return Ranks(0, 1)

    @property
    def steps_are_collective(self) -> bool:
        """Whether a model exchanges data with other ranks in every step."""
        kinds = (DistributedDataParallel, FullyShardedDataParallel, SyncBatchNorm)
        return self.ranks.size > 1 and any(
            isinstance(module, kinds) or any(map(_is_sharded, module.parameters(recurse=False)))
            for model in self.models
            for module in model.modules()
        )


def training_loop(
    step: Any, make_batch: Any, model: Any, optimizer: Any, state: Any, fabric: Any
) -> TrainingLoop:
    """Check the arguments of a user.

    Raises:
        ValueError: if one of them has another type.
    """
    for name, function in (("step", step), ("make_batch", make_batch)):
        if not callable(function):
            raise ValueError(f"{name} must be a function, got {function!r:.80}")
    if not isinstance(fabric, Fabric | None):
        raise ValueError(f"fabric must be a Fabric of lightning.fabric or None, got {fabric!r:.80}")
    models = [
        # A compiled model wraps the module.
        getattr(one, "_orig_mod", one)
        for one in _all_of("model", model, Module)
    ]
    optimizers = [
        one.optimizer if is_wrapped(one) else one
        for one in _all_of("optimizer", optimizer, Optimizer)
    ]
    if all(parameter.device.type == "meta" for one in models for parameter in one.parameters()):
        raise ValueError("model must have parameters on a device, got none")
    # The list itself comes last, because a step may change it.
    others = [*state, state] if isinstance(state, list | tuple) else [state]
    return TrainingLoop(step, make_batch, models, optimizers, others, fabric)


def _all_of(name: str, given: Any, kind: type) -> list[Any]:
    values = list(given) if isinstance(given, Sequence) else [given]
    if not values or not all(isinstance(value, kind) for value in values):
        raise ValueError(
            f"{name} must be a torch {kind.__name__} or a sequence of them, got {given!r:.80}"
        )
    return values


def _is_sharded(parameter: torch.nn.Parameter) -> bool:
    # A DTensor, whose class has another module name in torch 2.5.1 than in 2.13.
    return hasattr(parameter, "to_local")
