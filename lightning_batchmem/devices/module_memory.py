"""Whether the memory of a step can be divided among its modules."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from lightning_batchmem.devices.peaks import LiveStorages


def why_not_possible(module: Module, *, is_compiled: bool) -> str:
    """Return why the memory of a step cannot be divided among modules; empty if it can."""
    if is_compiled:
        return "torch.compile compiled a part of the step"
    if not LiveStorages.is_possible():
        return "another dispatch mode is active"
    if has_own_tensors(module):
        return "some parameters are of a type of their own, as under FSDP2"
    return ""


def has_own_tensors(module: Module) -> bool:
    """Whether some parameters are of a type of their own, such as DTensor."""
    return any(_has_own_dispatch(weight) for weight in module.parameters())


def _has_own_dispatch(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ not in (
        Tensor.__torch_dispatch__,
        torch.nn.Parameter.__torch_dispatch__,
    )
