"""Was it memory that ran out? One matcher for every device, used as a net below the prediction."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

import torch

# What torch and the libraries below it say, for the errors that carry no type of their own. Looked up in the strings of
# torch 2.5.1 (CUDA) and 2.13 (CPU), and in the issues named beside.
_MESSAGES = re.compile(
    "|".join(
        (
            # Allocators and drivers: "CUDA out of memory. Tried to allocate", "CUDA error: out of memory", "CUDA driver
            # error: out of memory", "Triton Error [CUDA]: out of memory", "Cuda failure 2 'out of memory'" (NCCL),
            # "MPS backend out of memory", and HIP and XPU likewise.
            r"\b(cuda|hip|xpu|mps)\b[^\n]{0,60}\bout of memory\b",
            r"\bCUDA_ERROR_OUT_OF_MEMORY\b|\bcudaErrorMemoryAllocation\b",
            # Libraries' own allocations: cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT.
            r"\bCU[A-Z]+(_STATUS)?_ALLOC_FAILED\b",
            # cuBLAS takes its workspace when the handle is made. Source: pytorch/serve#1993
            r"\bCUBLAS_STATUS_NOT_INITIALIZED\b",
            # cuDNN: "... This error may appear if you passed in a non-contiguous input". Source: pytorch/pytorch#44473
            r"\bCUDNN_STATUS_NOT_SUPPORTED\b",
            # No algorithm's workspace fits; torch tries them all and swallows each one's out-of-memory error.
            # Source: Lightning-AI/pytorch-lightning#5897 (cuDNN's v7 interface); the second is its v8 interface.
            r"unable to find a valid cudnn algorithm",
            r"\b(find|get) was unable to find an engine to execute this computation",
            # The host: POSIX, then Windows. Not "[enforce fail at alloc_cpu.cpp" alone, which also begins the complaint
            # about a negative size.
            r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",
            # strerror(ENOMEM) as torch and Python write it: "unable to mmap ... bytes", a worker that cannot fork.
            r"\bcannot allocate memory \(12\)|\[errno 12\] cannot allocate memory",
            r"\bstd::bad_alloc\b",
            # oneDNN, which does not say why; but a missing "primitive descriptor" means an unsupported operation.
            # Source: pytorch/pytorch#55884 (fails above a size of the input), and seen under RLIMIT_DATA with 2.13.
            r"could not (create|execute) a primitive(?! descriptor)",
            # MPS: one buffer larger than Metal allows. Source: pytorch/pytorch#141909
            r"\binvalid buffer size: [\d.]+ [KMGT]i?B\b",
        )
    ),
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that memory ran out, on any device.

    Looks at the error, at what it was raised from or while handling, and at the members of exception groups: a smaller
    batch takes the memory error away, and whatever else is wrong then shows by itself. cuBLAS, cuDNN and oneDNN report
    other faults with the same words, so an error at the very first size deserves to be quoted. Left out are
    ``CUDNN_STATUS_INTERNAL_ERROR`` and ``CUDNN_STATUS_NOT_INITIALIZED``: mostly a broken installation or device, which
    must reach the user as it is (but see pytorch/pytorch#81620).

    Args:
        error: what was caught. ``KeyboardInterrupt`` and the like never count, whatever they interrupted.

    Returns:
        ``True`` if a smaller batch may help.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
        True
        >>> is_out_of_memory(ValueError("memory must be positive"))
        False
    """
    return isinstance(error, Exception) and any(_says_so(related) for related in _related(error))


def _says_so(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):  # numpy's _ArrayMemoryError is a MemoryError
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # An OSError from a loader's worker is raised again with its message alone.
    return isinstance(error, (RuntimeError, OSError)) and _MESSAGES.search(str(error)) is not None


def _related(error: BaseException) -> Iterator[BaseException]:
    """``error`` and all that a traceback would show with it, each once: chains of errors can have cycles."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        this = waiting.pop()
        if this is None or id(this) in seen:
            continue
        seen.add(id(this))
        yield this
        waiting.append(this.__cause__)
        if not this.__suppress_context__:  # "raise ... from None": whoever wrote it says that they are not related
            waiting.append(this.__context__)
        if isinstance(this, BaseExceptionGroup):
            waiting.extend(this.exceptions)
