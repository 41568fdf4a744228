"""State of a module: recorded before the search, restored in place afterwards."""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_batchmem._lightning.attributes import AttributeState
from lightning_batchmem.devices.tensors import plain_tensors

# About this many bytes are in memory, and in the page cache, at one time.
_CHUNK_BYTES = 2**24


class SavedStorages:
    """Bytes of tensor storages, written back in place; a shared storage is saved once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # The copy is in a file, because in memory it would raise the resident set that the search
        # measures. The file is open as long as the search, so no `with` statement can close it.
        self._file: Any = tempfile.TemporaryFile()  # noqa: SIM115
        # This closes the file also where a run ends before its search.
        weakref.finalize(self, self._file.close)
        storages = {
            (flat.device, flat.data_ptr(), flat.numel()): flat for flat in map(_flat_bytes, tensors)
        }
        self._on_host = [
            flat for flat in storages.values() if flat.device.type == "cpu" and flat.numel() > 0
        ]
        self._on_device = [
            (flat, flat.cpu()) for flat in storages.values() if flat.device.type != "cpu"
        ]
        try:
            for chunk in self._host_chunks():
                # A NumPy array is avoided, because torch cannot resize a storage that has had one.
                self._file.write((ctypes.c_char * chunk.numel()).from_address(chunk.data_ptr()))
        except OSError as error:
            total_bytes = sum(flat.numel() for flat in self._on_host)
            raise OSError(
                "BatchFinder could not write its copy of weights and optimizer state"
                f" ({total_bytes:,} bytes) to {tempfile.gettempdir()}: {error}. Set TMPDIR to a"
                " directory with more room."
            ) from error

    def write_back(self) -> None:
        for flat in (*self._on_host, *(flat for flat, _ in self._on_device)):
            # The size differs where a step resized a tensor in place.
            if flat.untyped_storage().nbytes() != flat.numel():
                flat.untyped_storage().resize_(flat.numel())
        for flat, copied in self._on_device:
            flat.copy_(copied)
        self._file.seek(0)
        for chunk in self._host_chunks():
            kept = torch.empty_like(chunk)
            self._file.readinto(kept.numpy())
            # Unchanged memory is not written: it may be mapped read-only, or shared until a write.
            if not torch.equal(chunk, kept):
                chunk.copy_(kept)

    def _drop_pages(self) -> None:
        """Remove the file from the page cache, which counts against a memory control group."""
        self._file.flush()
        # Linux has this function, but not every system.
        if hasattr(os, "posix_fadvise"):
            os.fdatasync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _host_chunks(self) -> Iterable[Tensor]:
        cached_bytes = 0
        for flat in self._on_host:
            for chunk in torch.split(flat, _CHUNK_BYTES):
                yield chunk
                cached_bytes += chunk.numel()
                # Pages are not dropped for each tensor, because a disk takes milliseconds.
                if cached_bytes >= _CHUNK_BYTES:
                    self._drop_pages()
                    cached_bytes = 0
        self._drop_pages()


def _flat_bytes(tensor: Tensor) -> Tensor:
    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


class ModuleState:
    """State of a module and of ``others``, recorded once and restored in place.

    The state is parameters, buffers, gradients, flags, hooks and plain attributes.
    """

    def __init__(self, module: LightningModule, others: Iterable[object] = ()) -> None:
        for name, parameter in module.named_parameters():
            if is_lazy(parameter):
                raise ValueError(
                    "every parameter must be initialized before the search, got the lazy parameter"
                    f" {name!r}; run one forward pass in configure_model or before fit"
                )
        self._attributes = AttributeState([module, *others])
        self.not_restorable = self._attributes.not_restorable
        self.schedulers = self._attributes.schedulers
        tensors = self._attributes.tensors
        leaves = [tensor for tensor in tensors if tensor.is_leaf]
        # Hooks on tensors are in no dictionary of an object, so they are recorded here. Both names
        # are private in torch 2.5.1 to 2.13.
        names = ("_backward_hooks", "_post_accumulate_grad_hooks")
        self._hooks = [(t, name, dict(getattr(t, name) or {})) for t in leaves for name in names]
        self._aliases = [(t, t.detach(), t.requires_grad) for t in leaves]
        self._gradients = [
            (t, t.grad.detach().to("cpu", copy=True)) for t in leaves if t.grad is not None
        ]
        # Of a DTensor, the shard of this rank is saved.
        self._storages = SavedStorages(
            plain for t in tensors if not is_lazy(t) for plain in plain_tensors(t)
        )

    def restore(self) -> None:
        refused = self._attributes.restore()
        for tensor, alias, requires_grad in self._aliases:
            if tensor.grad_fn is not None:
                # A step wrote a value with its graph into this tensor.
                tensor.detach_()
            if tensor.data_ptr() != alias.data_ptr() or tensor.shape != alias.shape:
                tensor.data = alias
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            tensor.grad = None
        for tensor, name, kept in self._hooks:
            hooks = getattr(tensor, name)
            if hooks is not None and dict(hooks) != kept:
                # The dictionary itself is filled again, because handles of the user refer to it.
                hooks.clear()
                hooks.update(kept)
        self._storages.write_back()
        for tensor, gradient in self._gradients:
            tensor.grad = gradient.to(tensor.device)
        if refused:
            rank_zero_warn(f"BatchFinder could not restore: {'; '.join(refused)}")
