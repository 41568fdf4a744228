"""Whether the parts of a batch can equal a step of a training.

The private names used here are those of torch 2.5.1 to 2.14.1.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_batchmem._lightning.strategies import is_single_device
from lightning_batchmem._lightning.trainer_state import callbacks_of
from lightning_batchmem.devices.foreign_values import value_or_none

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_batchmem")


def why_not_in_parts(trainer: Trainer) -> str | None:
    """Why parts of a batch cannot equal a step of this training; None if they can."""
    reason = value_or_none("What a step depends on", next, _reasons(trainer), "")
    return "what a step depends on cannot be read" if reason is None else reason or None


def _reasons(trainer: Trainer) -> Iterator[str]:
    module = trainer.lightning_module
    if not module.automatic_optimization:
        yield "training_step steps the optimizers itself"
    if trainer.accumulate_grad_batches > 1:
        yield "a backward pass that fails has changed the gradients of earlier batches"
    if not is_single_device(trainer):
        yield f"with {type(trainer.strategy).__name__} ranks wait for each other in every step"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield "training_step fetches its batches from dataloader_iter"
    if _is_of_project(module.backward):
        yield f"{type(module).__name__} has its own backward"
    owners: list[Any] = [module, *callbacks_of(trainer)]
    for owner in owners:
        if _is_of_project(owner.on_before_backward):
            yield f"on_before_backward of {type(owner).__name__} gets the loss of the whole batch"
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.training:
            yield f"BatchNorm ({name}) would normalize each part by itself"
        if part._backward_hooks or part._backward_pre_hooks:
            yield f"{name or type(part).__name__} has a hook on gradients"
    for name, parameter in module.named_parameters():
        # Optimizers that step in backward have such hooks, too.
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield f"{name} has a hook on its gradient"


def _is_of_project(method: Any) -> bool:
    # A function that a program makes of code may have no module.
    module: str = getattr(method, "__module__", None) or ""
    return module.partition(".")[0] not in _PACKAGES
