"""The allocator's history, written when memory ran out."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_warn

# This is enough for about 33,000 allocations of three events each. The stacks and events take
# about 60 MB of host memory.
# Source: measured with 60 Python frames, torch 2.13 (CPU), with the same CapturedTraceback::gather
# as the allocator.
_MAX_EVENTS = 100_000


class OomSnapshot:
    """Records the allocator's events, and writes them when memory ran out.

    A history that somebody else records is written too, and continues.
    Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html; read in torch 2.5.1 and
    2.13.
    """

    def __init__(self, directory: Path, *, is_own: bool) -> None:
        self._directory = directory
        self._is_own = is_own

    @classmethod
    def start(cls, directory: Path | None, device: torch.device) -> OomSnapshot | None:
        """Start to record, which starts CUDA; None with a warning if this is not possible."""
        try:
            if device.type != "cuda":
                raise RuntimeError("it needs a CUDA device")
            if directory is None:
                raise RuntimeError("log_dir is not local")
            is_own = not torch._C._cuda_isHistoryEnabled()
            if is_own:
                torch.cuda.memory._record_memory_history(
                    "all", context="alloc", stacks="python", max_entries=_MAX_EVENTS
                )
        # An allocator without a history (cudaMallocAsync) raises this type too.
        except RuntimeError as error:
            rank_zero_warn(f"No memory snapshot will be written: {str(error).splitlines()[0]}.")
            return None
        return cls(directory, is_own=is_own)

    def write(self, rank: int) -> str:
        """Write the snapshot to a new file, and return a sentence about it.

        The file is ``oom_snapshot_rank<rank>.pickle``, or a numbered one if that exists.
        """
        path = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            suffixes = ("" if number == 1 else f"_{number}" for number in count(1))
            names = (f"oom_snapshot_rank{rank}{suffix}.pickle" for suffix in suffixes)
            path = next(path for name in names if not (path := self._directory / name).exists())
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        # An error in writing must not replace the out-of-memory error.
        except (OSError, MemoryError, RuntimeError) as error:
            # The file is incomplete.
            if path is not None:
                with suppress(OSError):
                    path.unlink()
            reason = str(error).splitlines()[0]
            return f"The memory snapshot could not be written to {self._directory}: {reason}"
        return f"PyTorch's memory snapshot is in {path}; https://pytorch.org/memory_viz shows it."

    def stop(self) -> None:
        """Stop recording, unless somebody else started it."""
        if self._is_own:
            self._is_own = False
            torch.cuda.memory._record_memory_history(enabled=None)
