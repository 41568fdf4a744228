"""A tensor of a training program, whose bytes the caller saves, restored in place."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_batchmem.devices.tensors import plain_tensors
from lightning_batchmem.state.saved_storages import flat_bytes

# Hooks on tensors are in no dictionary of an object. Both names are private in torch 2.5.1 to 2.14.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of(tensor: Tensor) -> list[Any]:
    """Return the hooks on a tensor that has no graph."""
    if not tensor.is_leaf:
        return []
    return [hook for name in _HOOKS for hook in (getattr(tensor, name) or {}).values()]


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
        if self._is_leaf and self._gradient is not None:
            self.tensor.grad = self._gradient.to(self.tensor.device, copy=True)
