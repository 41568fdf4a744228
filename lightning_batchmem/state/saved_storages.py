"""Tensors and their bytes, saved on the host and written back in place."""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed
from torch.nn.parameter import is_lazy

from lightning_batchmem.devices.host import HostMemory
from lightning_batchmem.devices.tensors import plain_tensors

# About this many bytes are in memory, and in the page cache, at one time.
_CHUNK_BYTES = 2**24

# Copies of a device's tensors are in memory if the copies of all ranks take no more than this share
# of what is free. The rest is for the loader workers of the search.
# Source: chosen; a share of 1 would leave them nothing.
_MEMORY_SHARE = 0.5


class SavedStorages:
    """Bytes of tensor storages, written back in place; a shared storage is saved once.

    Copies of the host's tensors are in a file, because in memory they would raise the resident set
    that the search measures. Copies of a device's tensors are there too if the host has no room.

    Attributes:
        largest_bytes: for a process that ends after its search: only storages of the device are
            saved, and only up to this size.
    """

    largest_bytes: ClassVar[int | None] = None

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {
            (flat.device, flat.data_ptr(), flat.numel()): flat for flat in map(flat_bytes, tensors)
        }
        self._flats = list(storages.values())
        if self.largest_bytes is not None:
            small = [flat for flat in self._flats if flat.numel() <= self.largest_bytes]
            self._flats = [flat for flat in small if not flat.is_cpu]
        on_device = [flat for flat in self._flats if not flat.is_cpu]
        has_room = has_room_for(sum(flat.numel() for flat in on_device))
        self._in_memory = [(flat, flat.cpu()) for flat in on_device if has_room]
        self._in_file = [flat for flat in self._flats if flat.is_cpu or not has_room]
        try:
            # The file is open as long as the search, so no `with` statement can close it.
            self._file: Any = tempfile.TemporaryFile()  # noqa: SIM115
            # This closes the file also where a run ends before its search.
            weakref.finalize(self, self._file.close)
            for chunk in self._chunks_in_file():
                on_host = chunk.cpu()
                # A NumPy array is avoided, because torch cannot resize a storage that has had one.
                self._file.write((ctypes.c_char * chunk.numel()).from_address(on_host.data_ptr()))
        except OSError as error:
            total_bytes = sum(flat.numel() for flat in self._in_file)
            where = tempfile.tempdir or "a temporary file"
            raise OSError(
                "BatchFinder could not write its copy of weights and optimizer state"
                f" ({total_bytes:,} bytes) to {where}: {error}. Set TMPDIR to a directory that can"
                " be written and has room."
            ) from error

    def write_back(self) -> None:
        for flat in self._flats:
            # The size differs where a step resized a tensor in place.
            if flat.untyped_storage().nbytes() != flat.numel():
                flat.untyped_storage().resize_(flat.numel())
        for flat, copied in self._in_memory:
            flat.copy_(copied)
        self._file.seek(0)
        for chunk in self._chunks_in_file():
            saved = torch.empty(chunk.numel(), dtype=torch.uint8)
            self._file.readinto(saved.numpy())
            # Unchanged memory is not written: it may be mapped read-only, or shared until a write.
            if not torch.equal(chunk.cpu(), saved):
                chunk.copy_(saved)

    def _drop_pages(self) -> None:
        """Remove the file from the page cache, which counts against a memory control group."""
        self._file.flush()
        # Linux has this function, but not every system.
        if hasattr(os, "posix_fadvise"):
            os.fdatasync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _chunks_in_file(self) -> Iterable[Tensor]:
        cached_bytes = 0
        for flat in self._in_file:
            # One split of a small tensor takes longer than everything else that is done with it.
            for begin in range(0, flat.numel(), _CHUNK_BYTES):
                chunk = flat[begin : begin + _CHUNK_BYTES]
                yield chunk
                cached_bytes += chunk.numel()
                # Pages are not dropped for each tensor, because a disk takes milliseconds.
                if cached_bytes >= _CHUNK_BYTES:
                    self._drop_pages()
                    cached_bytes = 0
        if cached_bytes:
            self._drop_pages()


def has_room_for(copied_bytes: int) -> bool:
    """Whether the host has room if every rank copies this many bytes."""
    if copied_bytes == 0:
        return True
    # Every rank makes its copy at this moment. Some may be on other machines.
    is_distributed = distributed.is_available() and distributed.is_initialized()
    ranks = distributed.get_world_size() if is_distributed else 1
    host = HostMemory()
    free_bytes = host.available_bytes() - host.current().allocated_bytes
    return ranks * copied_bytes <= _MEMORY_SHARE * free_bytes


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of the whole storage of a tensor, as a tensor over the same memory."""
    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


# Hooks on tensors are in no dictionary of an object. Both names are private in torch 2.5.1 to 2.14.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    # Autograd does not answer for a part of a tensor, such as one of ``split``, after the tensor
    # has changed in place. FSDP1 with use_orig_params=False leaves such parts in the modules.
    except RuntimeError:
        return False


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
        self._is_leaf = _is_leaf(tensor)
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
