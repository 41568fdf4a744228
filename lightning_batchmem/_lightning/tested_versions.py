"""The newest versions that the package was run with."""

from __future__ import annotations

import functools

import torch
from lightning.pytorch.utilities import rank_zero_warn

# The files with private names of torch state these versions too.
NEWEST_TESTED_TORCH = (2, 14)


@functools.cache
def warn_of_untested_torch(torch_version: str = torch.__version__) -> None:
    """Warn once if torch is newer than every version that the package was run with."""
    major, minor = torch_version.split(".")[:2]
    if (int(major), int(minor)) > NEWEST_TESTED_TORCH:
        newest = ".".join(map(str, NEWEST_TESTED_TORCH))
        rank_zero_warn(
            f"torch {torch_version} is newer than {newest}, the newest that lightning-batchmem was"
            " tested with. If it fails, use an older torch or a newer lightning-batchmem."
        )
