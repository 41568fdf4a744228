import errno

import numpy as np
import pytest
import torch

from lightning_batchmem.devices.out_of_memory import is_out_of_memory

OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB",
    "CUDA error: out of memory\n"
    "CUDA kernel errors might be asynchronously reported at some other API call",
    "XPU out of memory. Tried to allocate 20.00 MiB",
    "Triton Error [CUDA]: out of memory",
    "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuSOLVER error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a"
    " non-contiguous input.",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "GET was unable to find an engine to execute this computation",
    "MPS backend out of memory (MPS allocated: 7.23 GB, other allocations: 1.54 GB, max allowed:"
    " 9.07 GB).",
    "Invalid buffer size: 19.45 GB",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"
    " tried to allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at ..\\c10\\core\\impl\\alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough"
    " memory: you tried to allocate 29491200 bytes.",
    "unable to mmap 8388608 bytes from file </torch_1_2_3>: Cannot allocate memory (12)",
    "could not create a primitive",
    "std::bad_alloc",
    "Caught RuntimeError in DataLoader worker process 0.\n"
    "Original Traceback (most recent call last):\n"
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB.",
]

SOMETHING_ELSE = [
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "[enforce fail at alloc_cpu.cpp:110] ((ptrdiff_t)nbytes) >= 0. alloc_cpu() seems to have been"
    " called with negative number: 18446744073709551615",
    "could not create a primitive descriptor for a matmul primitive",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm`",
    "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's"
    " workers are out of shared memory.",
    "out of resource: shared memory, Required: 163840, Hardware limit: 101376",
    "the replay memory is out of memory slots",
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a"
    " single memory location",
    "",
]


class DerivedError(RuntimeError):
    """A derived error, as some of torch are.

    These are AcceleratorError (2.8 and later), DistBackendError and the errors of TorchDynamo.
    """


def caused_by(error, cause):
    error.__cause__ = cause
    return error


COUNT = [
    *map(RuntimeError, OUT_OF_MEMORY),
    torch.cuda.OutOfMemoryError("anything"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    OSError(
        "Caught OSError in DataLoader worker process 0.\nOSError: [Errno 12] Cannot allocate memory"
    ),
    DerivedError("CUDA error: out of memory"),
    caused_by(ValueError("wrapped"), torch.cuda.OutOfMemoryError("CUDA out of memory.")),
    ExceptionGroup("tasks", [ValueError(), ExceptionGroup("inner", [MemoryError()])]),
]
DO_NOT_COUNT = [
    *map(RuntimeError, SOMETHING_ELSE),
    *(
        kind("CUDA out of memory is only mentioned")
        for kind in (ValueError, KeyError, TypeError, AssertionError)
    ),
    OSError(errno.ENOSPC, "No space left on device"),
    ExceptionGroup("CUDA out of memory", [ValueError()]),
    *(caused_by(kind(), MemoryError()) for kind in (KeyboardInterrupt, SystemExit, GeneratorExit)),
    BaseExceptionGroup("tasks", [KeyboardInterrupt(), MemoryError()]),
]


@pytest.mark.parametrize("counts", [True, False])
def test_errors_that_count(counts):
    errors = COUNT if counts else DO_NOT_COUNT
    assert [error for error in errors if is_out_of_memory(error) is not counts] == []


def test_real_errors():
    with pytest.raises(RuntimeError) as torch_error:
        torch.empty(10**15)
    assert is_out_of_memory(torch_error.value)
    with pytest.raises(MemoryError) as numpy_error:
        np.empty(10**15)
    assert is_out_of_memory(numpy_error.value)
    with pytest.raises(RuntimeError) as shape_error:
        torch.ones(2, 3) @ torch.ones(4, 5)
    assert not is_out_of_memory(shape_error.value)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_context_counts_unless_it_is_suppressed(hidden):
    error = ValueError("clean-up failed")
    error.__context__ = KeyError("between")
    error.__context__.__context__ = MemoryError()
    error.__suppress_context__ = hidden
    assert is_out_of_memory(error) is not hidden


def test_a_cycle_of_causes_ends():
    first = ValueError("a")
    second = ValueError("b")
    first.__cause__ = second
    second.__cause__ = first
    assert not is_out_of_memory(first)
    second.__context__ = MemoryError()
    second.__suppress_context__ = False
    assert is_out_of_memory(first)
