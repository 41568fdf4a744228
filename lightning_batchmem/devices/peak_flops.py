"""The highest floating-point rate of a device, from the data sheet of its maker."""

from __future__ import annotations

import re
from typing import Any

import torch

# TFLOP/s of dense matrices, without sparsity. Where a data sheet has only the number with sparsity,
# the dense one is its half. The first pattern in the product name counts; most are its end, since
# the name of a virtual GPU goes on. Lightning's own table (get_available_flops, 2.6.6) is not used:
# it takes an L40S for an L4, has one H100 NVL at the rate of two, and lacks the name "NVIDIA H200".
_SHEETS: tuple[tuple[str, dict[str, float]], ...] = (
    # https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703
    (r"\bGB200$", {"16 bit": 2500, "tfloat32": 1250, "float32": 80}),
    (r"\bB200$", {"16 bit": 2250, "tfloat32": 1100, "float32": 75}),
    # https://www.nvidia.com/en-us/data-center/h200/
    (r"\bH200 NVL$", {"16 bit": 835.5, "tfloat32": 417.5, "float32": 60}),
    (r"\bH200$", {"16 bit": 989.5, "tfloat32": 494.5, "float32": 67}),
    # https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/
    (r"\bGH200\b", {"16 bit": 989.5, "tfloat32": 494.5, "float32": 67}),
    # https://www.nvidia.com/en-us/data-center/h100/
    # https://www.nvidia.com/content/dam/en-zz/Solutions/gtcs22/data-center/h100/PB-11133-001_v01.pdf
    (r"\bH100 NVL$", {"16 bit": 835.5, "tfloat32": 417.5, "float32": 60}),
    (r"\bH100 PCIe$", {"16 bit": 756.5, "tfloat32": 378, "float32": 51}),
    (r"\bH100 80GB HBM3$", {"16 bit": 989.5, "tfloat32": 494.5, "float32": 67}),
    # https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413
    (r"\bL40S$", {"16 bit": 362, "tfloat32": 183, "float32": 91.6}),
    # https://www.nvidia.com/en-us/data-center/l40/
    (r"\bL40$", {"16 bit": 181, "tfloat32": 90.5, "float32": 90.5}),
    # https://www.nvidia.com/en-us/data-center/l4/
    (r"\bL4$", {"16 bit": 121, "tfloat32": 60, "float32": 30.3}),
    # https://www.nvidia.com/en-us/data-center/a100/
    (r"\bA100\b.*\b(40|80)GB\b", {"16 bit": 312, "tfloat32": 156, "float32": 19.5}),
    # https://www.nvidia.com/en-us/data-center/a40/
    (r"\bA40$", {"16 bit": 149.7, "tfloat32": 74.8, "float32": 37.4}),
    # https://www.nvidia.com/en-us/data-center/products/a30-gpu/
    (r"\bA30$", {"16 bit": 165, "tfloat32": 82, "float32": 10.3}),
    # https://www.nvidia.com/en-us/data-center/products/a10-gpu/
    (r"\bA10$", {"16 bit": 125, "tfloat32": 62.5, "float32": 31.2}),
    # https://www.nvidia.com/en-us/data-center/tesla-t4/
    (r"\bTesla T4$", {"float16": 65, "float32": 8.1}),
    # https://www.nvidia.com/en-us/data-center/v100/
    (r"\bV100-SXM", {"float16": 125, "float32": 15.7}),
    (r"\bV100-PCIE", {"float16": 112, "float32": 14}),
)


def peak_flops(name: str, precision: str, *, uses_tf32: bool) -> float | None:
    """Return the peak in FLOP/s of one device; None if it is not in the table.

    Args:
        name: the product name of the device, for example ``"NVIDIA H100 80GB HBM3"``.
        precision: the precision of the Trainer, for example ``"bf16-mixed"``.
        uses_tf32: whether torch may compute with TF32 where the precision is 32 bit.
    """
    # A slice of a device (MIG) has a part of its peak.
    if "MIG" in name:
        return None
    sheet = next((sheet for pattern, sheet in _SHEETS if re.search(pattern, name)), {})
    number, _, _ = precision.partition("-")
    if number == "32":
        names = ["tfloat32", "float32"] if uses_tf32 else ["float32"]
    elif number in ("16", "bf16"):
        names = ["16 bit", "bfloat16" if number == "bf16" else "float16"]
    else:
        return None
    return next((1e12 * sheet[key] for key in names if key in sheet), None)


def uses_tf32(*, has_convolutions: bool) -> bool:
    """Whether torch may compute products of 32-bit matrices, or convolutions, with TF32."""
    # These settings are new in torch 2.9. Once a program uses them, reading the earlier ones raises
    # an error.
    matrices = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    convolutions: Any = getattr(torch.backends.cudnn, "conv", None)
    if matrices is not None and convolutions is not None:
        allows_convolutions = convolutions.fp32_precision == "tf32"
        return matrices == "tf32" or (has_convolutions and allows_convolutions)
    return torch.get_float32_matmul_precision() != "highest" or (
        has_convolutions and torch.backends.cudnn.allow_tf32
    )
