"""Recognize out-of-memory errors of every device."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator

import torch

from lightning_batchmem.devices.foreign_values import error_text, value_or_none

# These are messages of torch and of the libraries below it, for errors without a specific type.
# Source: strings of torch 2.5.1 (CUDA) and 2.13 (CPU), and the issues named below.
_MESSAGES = re.compile(
    "|".join(
        (
            # Allocators and drivers write "CUDA out of memory. Tried to allocate", "CUDA error: out
            # of memory", "CUDA driver error: out of memory", "Triton Error [CUDA]: out of memory",
            # "Cuda failure 2 'out of memory'" (NCCL) and "MPS backend out of memory". The messages
            # of HIP and XPU are similar.
            r"\b(cuda|hip|xpu|mps)\b[^\n]{0,60}\bout of memory\b",
            r"\bCUDA_ERROR_OUT_OF_MEMORY\b|\bcudaErrorMemoryAllocation\b",
            # These are the codes of failed allocations of cuBLAS, cuDNN, cuSOLVER, cuSPARSE and
            # cuFFT. Version 9 of cuDNN also has
            # CUDNN_STATUS_INTERNAL_ERROR_{DEVICE,HOST}_ALLOCATION_FAILED.
            # Source: cudnnStatus_t 4003 and 4004 of cuDNN 9
            r"\bCU[A-Z]+(_STATUS\w*)?_(ALLOC|ALLOCATION)_FAILED\b",
            # The workspace of cuBLAS is allocated when the handle is created.
            # Source: pytorch/serve#1993
            r"\bCUBLAS_STATUS_NOT_INITIALIZED\b",
            # The message of cuDNN ends with "This error may appear if you passed in a
            # non-contiguous input", but memory can be the cause.
            # Source: pytorch/pytorch#44473
            r"\bCUDNN_STATUS_NOT_SUPPORTED\b",
            # No workspace of any algorithm fits. Torch tries them all, and drops each out-of-memory
            # error. The first message is of the v7 interface of cuDNN, the second of v8.
            # Source: Lightning-AI/pytorch-lightning#5897 (v7)
            r"unable to find a valid cudnn algorithm",
            r"\b(find|get) was unable to find an engine to execute this computation",
            # The allocator of the host has the first message on POSIX and the second on Windows.
            # The error for a negative size also begins with "[enforce fail at alloc_cpu.cpp", so
            # that text alone is not enough.
            r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",
            # Torch and Python write strerror(ENOMEM) in this way, for example after a failed mmap
            # or for a worker that cannot be forked.
            r"\bcannot allocate memory \(12\)|\[errno 12\] cannot allocate memory",
            r"\bstd::bad_alloc\b",
            # The message of oneDNN has no reason. A missing "primitive descriptor" means an
            # unsupported operation.
            # Source: pytorch/pytorch#55884 (fails above an input size); measured under RLIMIT_DATA
            # with torch 2.13
            r"could not (create|execute) a primitive(?! descriptor)",
            # On MPS, a buffer is larger than Metal allows.
            # Source: pytorch/pytorch#141909
            r"\binvalid buffer size: [\d.]+ [KMGT]i?B\b",
        )
    ),
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that memory ran out, on any device, so that a smaller batch may help.

    Causes, contexts and members of exception groups count too: with a smaller batch the memory
    error is gone, and any other error remains. cuBLAS, cuDNN and oneDNN report other faults with
    the same words, so quote an error at the first size. ``CUDNN_STATUS_INTERNAL_ERROR`` and
    ``CUDNN_STATUS_NOT_INITIALIZED`` do not count: they mostly mean a broken installation or device
    (but see pytorch/pytorch#81620). ``KeyboardInterrupt`` and the like never count.
    """
    return issubclass(type(error), Exception) and bool(
        value_or_none("An error", lambda: any(map(_matches, _related(error))))
    )


def phase_of(error: BaseException) -> str:
    """Return the phase of a training step that raised an error; empty outside of these.

    The innermost frame decides: a closure runs inside the step of an optimizer.
    """
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        # It is private in torch 2.5.1 to 2.14.
        if frame.f_code.co_name == "_engine_run_backward":
            return "backward"
        if frame.f_code.co_name == "training_step":
            return "forward"
        if frame.f_globals.get("__name__", "").startswith("torch.optim."):
            return "optimizer step"
    return ""


def _matches(error: BaseException) -> bool:
    # The _ArrayMemoryError of numpy is a MemoryError.
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # An OSError of a DataLoader worker is raised again with its message only.
    return isinstance(error, (RuntimeError, OSError)) and _MESSAGES.search(str(error)) is not None


def _related(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and every error that its traceback shows.

    Each is yielded once, since chains of errors can have cycles.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        this = waiting.pop()
        if this is None or id(this) in seen:
            continue
        seen.add(id(this))
        yield this
        waiting.append(this.__cause__)
        # A traceback does not show the context after "raise ... from None".
        if not this.__suppress_context__:
            waiting.append(this.__context__)
        if isinstance(this, BaseExceptionGroup):
            waiting.extend(this.exceptions)


def release_traceback(failure: BaseException) -> str:
    """Drop the tensors in a failed step's traceback, and return the first line of the error.

    Source: https://github.com/Lightning-AI/pytorch-lightning/issues/7335
    """
    text = error_text(failure)
    seen: set[int] = set()
    error: BaseException | None = failure
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        # What a traceback does not show keeps tensors too.
        error = error.__cause__ or error.__context__
    return text
