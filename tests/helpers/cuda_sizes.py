"""Cases of ``tests/gpu/test_cuda_sizes.py``: sizes of searches, and the largest that train."""

from __future__ import annotations

from typing import Any

from benchmarks.cuda_search import QUIET_SHARE, in_fork, search, trains
from benchmarks.search import largest_that
from tests.helpers.cuda_stub import print_case

DEVICE_BYTES = 3 * 2**28


def mlp() -> dict[str, Any]:
    """The size that a search finds, and the largest that trains without a retry."""
    setup = ("mlp", DEVICE_BYTES, "32-true")
    found = in_fork(search, *setup, "BatchFinder")

    def is_quiet(size: int) -> bool:
        return bool(in_fork(trains, *setup, size, QUIET_SHARE))

    quiet = largest_that(is_quiet, found["size"], growth=1.5, resolution=0.02)
    return {"size": found["size"], "tried": found["tried"], "quiet": quiet}


CASES = {"mlp": mlp}

if __name__ == "__main__":
    print_case(CASES)
