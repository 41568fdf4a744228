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

_CHUNK_BYTES = 2**24  # in memory, and in the page cache, at one time


class SavedStorages:
    """Bytes of tensor storages, written back in place; a storage that tensors share is kept once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # in memory, a copy of host memory would raise the resident set that the search measures
        self._file: Any = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the search)
        weakref.finalize(self, self._file.close)  # also where a run ends before its search
        storages = {(flat.device, flat.data_ptr(), flat.numel()): flat for flat in map(_flat_bytes, tensors)}
        self._on_host = [flat for flat in storages.values() if flat.device.type == "cpu" and flat.numel() > 0]
        self._on_device = [(flat, flat.cpu()) for flat in storages.values() if flat.device.type != "cpu"]
        try:
            for chunk in self._host_chunks():
                # no array: torch refuses to resize a storage once it has had one
                self._file.write((ctypes.c_char * chunk.numel()).from_address(chunk.data_ptr()))
        except OSError as error:
            total_bytes = sum(flat.numel() for flat in self._on_host)
            raise OSError(
                f"BatchFinder could not write its copy of weights and optimizer state ({total_bytes:,} bytes) to"
                f" {tempfile.gettempdir()}: {error}. Set TMPDIR to a directory with more room."
            ) from error

    def write_back(self) -> None:
        for flat in (*self._on_host, *(flat for flat, _ in self._on_device)):
            if flat.untyped_storage().nbytes() != flat.numel():  # a step resized a tensor in place
                flat.untyped_storage().resize_(flat.numel())
        for flat, copied in self._on_device:
            flat.copy_(copied)
        self._file.seek(0)
        for chunk in self._host_chunks():
            kept = torch.empty_like(chunk)
            self._file.readinto(kept.numpy())
            # unchanged memory may be mapped read-only, or shared until it is written
            if not torch.equal(chunk, kept):
                chunk.copy_(kept)

    def _drop_pages(self) -> None:
        """Remove the file from the page cache, which counts against a memory control group."""
        self._file.flush()
        if hasattr(os, "posix_fadvise"):  # on Linux
            os.fdatasync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _host_chunks(self) -> Iterable[Tensor]:
        cached_bytes = 0
        for flat in self._on_host:
            for chunk in torch.split(flat, _CHUNK_BYTES):
                yield chunk
                cached_bytes += chunk.numel()
                if cached_bytes >= _CHUNK_BYTES:  # not for each tensor: a disk takes milliseconds
                    self._drop_pages()
                    cached_bytes = 0
        self._drop_pages()


def _flat_bytes(tensor: Tensor) -> Tensor:
    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


class ModuleState:
    """A module, its parameters, buffers, gradients, flags, hooks and plain attributes; ``others`` likewise."""

    def __init__(self, module: LightningModule, others: Iterable[object] = ()) -> None:
        for name, parameter in module.named_parameters():
            if is_lazy(parameter):
                raise ValueError(
                    f"every parameter must be initialized before the search, got the lazy parameter {name!r};"
                    " run one forward pass in configure_model or before fit"
                )
        self._attributes = AttributeState([module, *others])
        self.not_restorable = self._attributes.not_restorable
        self.schedulers = self._attributes.schedulers
        tensors = self._attributes.tensors
        leaves = [tensor for tensor in tensors if tensor.is_leaf]
        # hooks on tensors lie in no dictionary of an object (private in torch 2.5.1 to 2.13)
        names = ("_backward_hooks", "_post_accumulate_grad_hooks")
        self._hooks = [(t, name, dict(getattr(t, name) or {})) for t in leaves for name in names]
        self._aliases = [(t, t.detach(), t.requires_grad) for t in leaves]
        self._gradients = [(t, t.grad.detach().to("cpu", copy=True)) for t in leaves if t.grad is not None]
        # of a DTensor the shard of this rank
        self._storages = SavedStorages(plain for t in tensors if not is_lazy(t) for plain in plain_tensors(t))

    def restore(self) -> None:
        refused = self._attributes.restore()
        for tensor, alias, requires_grad in self._aliases:
            if tensor.grad_fn is not None:
                tensor.detach_()  # a step wrote a value with its graph into it
            if tensor.data_ptr() != alias.data_ptr() or tensor.shape != alias.shape:
                tensor.data = alias
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            tensor.grad = None
        for tensor, name, kept in self._hooks:
            hooks = getattr(tensor, name)
            if hooks is not None and dict(hooks) != kept:
                hooks.clear()  # the same dictionary: handles of the user refer to it
                hooks.update(kept)
        self._storages.write_back()
        for tensor, gradient in self._gradients:
            tensor.grad = gradient.to(tensor.device)
        if refused:
            rank_zero_warn(f"BatchFinder could not restore: {'; '.join(refused)}")
