"""State outside the trainer: recorded before the search, restored in place afterwards."""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

# Both functions are private in lightning 2.5.0 to 2.6.6.
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from lightning_batchmem._lightning.attributes import AttributeState, refill
from lightning_batchmem.batches.loaders import state_of
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
        self._flats = list(storages.values())
        self._on_host = [flat for flat in self._flats if flat.is_cpu]
        self._on_device = [(flat, flat.cpu()) for flat in self._flats if not flat.is_cpu]
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
        for flat in self._flats:
            # The size differs where a step resized a tensor in place.
            if flat.untyped_storage().nbytes() != flat.numel():
                flat.untyped_storage().resize_(flat.numel())
        for flat, copied in self._on_device:
            flat.copy_(copied)
        self._file.seek(0)
        for chunk in self._host_chunks():
            saved = torch.empty_like(chunk)
            self._file.readinto(saved.numpy())
            # Unchanged memory is not written: it may be mapped read-only, or shared until a write.
            if not torch.equal(chunk, saved):
                chunk.copy_(saved)

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


class RecordedState:
    """Everything outside the trainer that a search may change, recorded once and restored in place.

    These are the random states of the process, and parameters, buffers, gradients, flags, hooks and
    plain attributes of the objects below. Configuring the optimizers twice may change them too, so
    they are recorded before the first time.

    Args:
        module: the module.
        loaders: loaders that the project has made already.
        others: other objects of the project, such as its datamodule.
    """

    def __init__(
        self,
        module: LightningModule,
        loaders: Sequence[DataLoader[Any]] = (),
        others: Iterable[object] = (),
    ) -> None:
        self.loaders = loaders
        self._random = _collect_rng_states()
        for name, parameter in module.named_parameters():
            if is_lazy(parameter):
                raise ValueError(
                    "every parameter must be initialized before the search, got the lazy parameter"
                    f" {name!r}; run one forward pass in configure_model or before fit"
                )
        self.attributes = AttributeState([module, state_of(loaders), *others])
        tensors = self.attributes.tensors
        leaves = [tensor for tensor in tensors if tensor.is_leaf]
        self._leaves = [(leaf, leaf.detach(), leaf.requires_grad) for leaf in leaves]
        self._gradients = [
            (leaf, leaf.grad.detach().to("cpu", copy=True))
            for leaf in leaves
            if leaf.grad is not None
        ]
        # Hooks on tensors are in no dictionary of an object, so they are recorded here. Both names
        # are private in torch 2.5.1 to 2.13.
        names = ("_backward_hooks", "_post_accumulate_grad_hooks")
        self._hooks = [
            (leaf, name, dict(getattr(leaf, name) or {})) for leaf in leaves for name in names
        ]
        # Of a DTensor, the shard of this rank is saved.
        self._storages = SavedStorages(
            plain for t in tensors if not is_lazy(t) for plain in plain_tensors(t)
        )

    def restore(self) -> None:
        try:
            failed = self.attributes.restore()
            for leaf, alias, requires_grad in self._leaves:
                if leaf.grad_fn is not None:
                    # A step wrote a value with its graph into this tensor.
                    leaf.detach_()
                if leaf.data_ptr() != alias.data_ptr() or leaf.shape != alias.shape:
                    leaf.data = alias
                leaf.requires_grad_(requires_grad)
                leaf.grad = None
            for leaf, name, recorded_hooks in self._hooks:
                hooks = getattr(leaf, name)
                if hooks is not None:
                    # The dictionary itself is filled again, because handles of the user refer to
                    # it.
                    refill(hooks, recorded_hooks)
            self._storages.write_back()
            for leaf, gradient in self._gradients:
                leaf.grad = gradient.to(leaf.device)
        finally:
            _set_rng_states(self._random)
        if failed:
            rank_zero_warn(f"BatchFinder could not restore: {'; '.join(failed)}")
