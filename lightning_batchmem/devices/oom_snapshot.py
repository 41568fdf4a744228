"""PyTorch's own memory snapshot, written when a step runs out of a CUDA device's memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.devices.base import DeviceMemory

# How many of the last events are kept. An allocation makes three of them (allocated, free requested, freed), so that
# this is some 33 000 allocations: a step of a large model and what led to it. Only the first of the three has a stack,
# which took 1.2 kB and 1.4 µs: 40 MB of host memory, about 60 with the events themselves, and more while it is written.
# Source: measured, 60 Python frames, torch 2.13 (CPU), the same CapturedTraceback::gather that the allocator calls;
# an event without its stack is taken for 0.2 kB, the size of TraceEntry in c10/core/CachingDeviceAllocator.h.
_MAX_EVENTS = 100_000


class OomSnapshot:
    """Records what the allocator does from :meth:`start` to :meth:`stop`, and writes it down when memory ran out.

    PyTorch documents the functions that this calls, for all their underscores, except the one that tells whether a
    history is being recorded; they were read in torch 2.5.1 and 2.13. Recorded are Python's stacks of allocations: the
    frames of C++ would have to be looked up in debug information just when memory has run out, and the stacks of frees
    say less and cost as much. A history that somebody else records is left as it is, and is what is written. Who begins
    to record after :meth:`start` loses it at :meth:`stop`.

    Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """

    def __init__(self, directory: Path, *, is_ours: bool) -> None:
        self._directory = directory
        self._is_ours = is_ours

    @classmethod
    def start(cls, directory: Path | None, device_memory: DeviceMemory) -> OomSnapshot | None:
        """Begin to record. It starts CUDA.

        Args:
            directory: where the snapshot will be written; made when it is.
            device_memory: of the device that is trained on.

        Returns:
            What writes it; ``None``, with a warning that says why, where there will be no snapshot: on another device,
            without a directory, or with an allocator that keeps no history (``backend:cudaMallocAsync``).
        """
        if device_memory.name != "cuda":
            reason = f"PyTorch takes them of CUDA devices only, and this is {device_memory.name}"
        elif directory is None:
            reason = "there is no local log directory"
        else:
            try:
                is_ours = not torch._C._cuda_isHistoryEnabled()
                if is_ours:
                    torch.cuda.memory._record_memory_history(
                        "all", context="alloc", stacks="python", max_entries=_MAX_EVENTS
                    )
                return cls(directory, is_ours=is_ours)
            except RuntimeError as error:
                reason = f"the allocator says {_first_line(error)}"
        rank_zero_warn(f"No memory snapshot will be written when memory runs out: {reason}.")
        return None

    def write(self, rank: int) -> str:
        """Write what was recorded into ``oom_snapshot_rank<rank>.pickle``, with a number added if that exists.

        Never raises what has to do with writing, since another error is on its way: that memory ran out.

        Args:
            rank: global rank of this process.

        Returns:
            A sentence that says where the snapshot is, or why there is none.
        """
        path = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = _new_file(self._directory, f"oom_snapshot_rank{rank}")
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        except (OSError, MemoryError, RuntimeError) as error:
            if path is not None:
                with suppress(OSError):  # the sentence below has said what is wrong with the directory
                    path.unlink()
            return f"No memory snapshot could be written to {self._directory}: {_first_line(error)}"
        return f"PyTorch's memory snapshot is in {path}; https://pytorch.org/memory_viz shows it."

    def stop(self) -> None:
        """Stop recording and let go of what was recorded, unless it is somebody else's."""
        if self._is_ours:
            self._is_ours = False
            torch.cuda.memory._record_memory_history(enabled=None)


def _new_file(directory: Path, stem: str) -> Path:
    """An empty file of a name that nobody has used."""
    path, number = directory / f"{stem}.pickle", 1
    while True:
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
            path = directory / f"{stem}_{number}.pickle"
        else:
            return path


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
