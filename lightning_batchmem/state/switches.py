"""Switches of torch, which hold for the whole process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.backends import cuda, cudnn, mkldnn

# What reads a switch, and what sets it.
_Switch = tuple[Callable[[], Any], Callable[[Any], object]]


class Switches:
    """The switches of torch that a step may set, recorded once."""

    def __init__(self) -> None:
        self._recorded = []
        for name, (read, write) in _switches().items():
            # This build of torch may not have the switch, and since torch 2.9 some cannot be read
            # after others were set.
            try:
                self._recorded.append((name, read, write, read()))
            except (AttributeError, RuntimeError):
                continue

    def restore(self) -> list[str]:
        """Set those again that have changed; returns the ones for which this failed."""
        # One that cannot be read yet can be after another one was set.
        return self._restored() and self._restored()

    def _restored(self) -> list[str]:
        failed = []
        for name, read, write, value in self._recorded:
            try:
                # Some setters warn of a newer one, so what has not changed is not set.
                if read() != value:
                    write(value)
            except RuntimeError:
                failed.append(f"torch's {name}")
        return failed


def _switches() -> dict[str, _Switch]:
    switches: dict[str, _Switch] = {
        "num_threads": (torch.get_num_threads, torch.set_num_threads),
        "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default_device": (torch.get_default_device, _set_default_device),
        "grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
        "warn_always": (torch.is_warn_always_enabled, torch.set_warn_always),
        "deterministic_algorithms": (_deterministic, _set_deterministic),
        "detect_anomaly": (_anomaly, lambda value: torch.autograd.set_detect_anomaly(*value)),
        "multithreading_enabled": (
            torch.autograd.is_multithreading_enabled,
            torch.autograd.set_multithreading_enabled,
        ),
        "autocast_cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "mha.fastpath_enabled": (
            torch.backends.mha.get_fastpath_enabled,
            torch.backends.mha.set_fastpath_enabled,
        ),
        "sharing_strategy": (
            torch.multiprocessing.get_sharing_strategy,
            torch.multiprocessing.set_sharing_strategy,
        ),
        "sparse_tensor_invariants": (
            torch.sparse.check_sparse_tensor_invariants.is_enabled,
            _check_sparse_tensors,
        ),
    }
    for name in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion"):
        switches[name] = (
            getattr(torch.__future__, f"get_{name}"),
            getattr(torch.__future__, f"set_{name}"),
        )
    for device in ("cpu", "cuda"):
        switches[f"autocast of {device}"] = (
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        )
        switches[f"autocast_dtype of {device}"] = (
            partial(torch.get_autocast_dtype, device),
            partial(torch.set_autocast_dtype, device),
        )
    for kernels in ("flash", "mem_efficient", "math", "cudnn"):
        switches[f"{kernels}_sdp"] = (
            getattr(cuda, f"{kernels}_sdp_enabled"),
            getattr(cuda, f"enable_{kernels}_sdp"),
        )
    # The newer switches of precision come first, because the older ones cannot be read while both
    # were set to different values.
    owners: list[tuple[str, Any, tuple[str, ...]]] = [
        ("backends", torch.backends, ("fp32_precision",)),
        (
            "cudnn",
            cudnn,
            (
                "fp32_precision",
                "enabled",
                "benchmark",
                "benchmark_limit",
                "deterministic",
                "allow_tf32",
            ),
        ),
        ("cudnn.conv", getattr(cudnn, "conv", None), ("fp32_precision",)),
        ("cudnn.rnn", getattr(cudnn, "rnn", None), ("fp32_precision",)),
        (
            "cuda.matmul",
            cuda.matmul,
            (
                "fp32_precision",
                "allow_tf32",
                "allow_fp16_reduced_precision_reduction",
                "allow_bf16_reduced_precision_reduction",
                "allow_fp16_accumulation",
            ),
        ),
        ("mkldnn", mkldnn, ("fp32_precision", "enabled", "deterministic", "allow_tf32")),
        ("mkldnn.matmul", getattr(mkldnn, "matmul", None), ("fp32_precision",)),
        ("deterministic", torch.utils.deterministic, ("fill_uninitialized_memory",)),
    ]
    for title, owner, names in owners:
        for name in names:
            switches[f"{title}.{name}"] = (
                partial(getattr, owner, name),
                partial(setattr, owner, name),
            )
    precision = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    return {**switches, "float32_matmul_precision": precision}


def _set_default_device(device: torch.device) -> None:
    # Without a default device the CPU is read, which is slower where it is set.
    torch.set_default_device(None if device.type == "cpu" else device)


def _check_sparse_tensors(is_enabled: bool) -> None:
    # Both functions have no type annotations.
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    if is_enabled:
        checks.enable()
    else:
        checks.disable()


def _deterministic() -> tuple[bool, bool]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
