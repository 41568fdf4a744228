"""A tensor of a training program, whose bytes the caller saves, restored in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_batchmem.devices.tensors import plain_tensors
from lightning_batchmem.state.saved_storages import flat_bytes

# Hooks on tensors are in no dictionary of an object. Both names are private in torch 2.5.1 to 2.14.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def carried_by(tensor: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield the hooks on a tensor that has no graph, and its gradient if that has attributes."""
    if tensor.is_leaf:
        for name in _HOOKS:
            yield from ((".hook", hook) for hook in (getattr(tensor, name) or {}).values())
        if getattr(tensor.grad, "__dict__", {}):
            yield ".grad", tensor.grad


def _is_shared(gradient: Tensor) -> bool:
    if gradient.layout is not torch.strided:
        return False
    is_part = gradient.untyped_storage().nbytes() > gradient.nbytes
    return is_part or bool(getattr(gradient, "__dict__", {}))


class SavedTensor:
    """Gradient, flags, hooks and storage of a tensor.

    Attributes:
        tensor: the tensor.
        flats: the bytes of its storages, as tensors over the same memory. Of a DTensor, these are
            the bytes of the shard of this rank.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.flats = [] if is_lazy(tensor) else [flat_bytes(p) for p in plain_tensors(tensor)]
        self._is_leaf = tensor.is_leaf
        if self._is_leaf:
            self._alias = tensor.detach()
            self._requires_grad = tensor.requires_grad
            gradient = tensor.grad
            # Others refer to it, or to memory that it shares. Any other gradient would only take
            # memory from the search.
            self._kept = gradient if gradient is not None and _is_shared(gradient) else None
            self._gradient = None if gradient is None else gradient.detach().to("cpu", copy=True)
            self._hooks = [dict(getattr(tensor, name) or {}) for name in _HOOKS]

    def restore_place(self) -> None:
        """Restore everything but the bytes and the gradient."""
        if not self._is_leaf:
            return
        leaf = self.tensor
        if leaf.grad_fn is not None:
            # A step wrote a value with its graph into this tensor.
            leaf.detach_()
        if leaf.data_ptr() != self._alias.data_ptr() or leaf.shape != self._alias.shape:
            leaf.data = self._alias
        leaf.requires_grad_(self._requires_grad)
        leaf.grad = None
        for name, recorded in zip(_HOOKS, self._hooks, strict=True):
            hooks = getattr(leaf, name)
            # The dictionary itself is filled again, because handles of the user refer to it.
            if hooks is not None and dict(hooks) != recorded:
                hooks.clear()
                hooks.update(recorded)

    def restore_gradient(self) -> None:
        """Restore the gradient, after the bytes of all tensors."""
        if not self._is_leaf or self._gradient is None:
            return
        if self._kept is None:
            self.tensor.grad = self._gradient.to(self.tensor.device, copy=True)
            return
        with torch.no_grad():
            self._kept.copy_(self._gradient)
        self.tensor.grad = self._kept
