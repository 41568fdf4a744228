"""Bytes of tensors, saved in a file and written back in place."""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

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
