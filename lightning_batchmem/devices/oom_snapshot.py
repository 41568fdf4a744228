"""The allocator's history, written when memory ran out, or after one training step."""

from __future__ import annotations

from contextlib import suppress
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

    A history that somebody else records is written too, and continues. This needs CUDA: only
    ``torch.cuda`` can report whether a history is recorded already.

    Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html; read in torch 2.5.1 and
    2.13.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._is_own = not torch._C._cuda_isHistoryEnabled()
        if self._is_own:
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=_MAX_EVENTS
            )

    @classmethod
    def start(cls, directory: Path | None, device: torch.device) -> OomSnapshot | None:
        """Start to record, which starts CUDA; None with a warning if this is not possible."""
        if device.type != "cuda":
            reason = "it needs a CUDA device"
        elif directory is None:
            reason = "it needs a log_dir that is local, and a run without fast_dev_run"
        else:
            try:
                return cls(directory)
            # An allocator without a history (cudaMallocAsync) raises this type.
            except RuntimeError as error:
                reason = _first_line(error)
        rank_zero_warn(f"No memory snapshot will be written: {reason}.")
        return None

    def begin_step(self, number: int) -> None:
        """Go on: every step is recorded."""

    def end_step(self, rank: int) -> str:
        """Write nothing."""
        return ""

    def write(self, rank: int, name: str = "oom") -> str:
        """Write the snapshot to a new file, and return a sentence about it.

        The file is ``oom_snapshot_rank<rank>.pickle``, or a numbered one if that exists.
        """
        path = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = _new_path(self._directory, f"{name}_snapshot_rank{rank}")
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        # An error in writing must not replace the out-of-memory error.
        except (OSError, MemoryError, RuntimeError) as error:
            # The file is incomplete.
            if path is not None:
                with suppress(OSError):
                    path.unlink()
            return (
                f"The memory snapshot could not be written to {self._directory}:"
                f" {_first_line(error)}"
            )
        return f"PyTorch's memory snapshot is in {path}; https://pytorch.org/memory_viz shows it."

    def stop(self) -> None:
        """Stop recording, unless somebody else started it."""
        if self._is_own:
            self._is_own = False
            torch.cuda.memory._record_memory_history(enabled=None)


class StepSnapshot:
    """Records the allocator's events in one training step, and writes them at its end.

    If memory runs out in this step, they are written then.

    Args:
        directory: where the file ``step_<number>_snapshot_rank<rank>.pickle`` is written.
        device: the CUDA device.
        number: the number of the step.
    """

    def __init__(self, directory: Path, device: torch.device, number: int) -> None:
        self._directory = directory
        self._device = device
        self._number = number
        # While the step runs.
        self._recording: OomSnapshot | None = None

    def begin_step(self, number: int) -> None:
        """Begin to record if it is the step."""
        # It may begin again, because a step that Lightning skips does not count.
        if number == self._number and self._recording is None:
            self._recording = OomSnapshot.start(self._directory, self._device)

    def end_step(self, rank: int) -> str:
        """End to record, and return a sentence about the file; empty for another step."""
        text = self.write(rank)
        self.stop()
        return text

    def write(self, rank: int) -> str:
        """Write what was recorded, and return a sentence about it; empty without anything."""
        recording = self._recording
        return "" if recording is None else recording.write(rank, f"step_{self._number}")

    def stop(self) -> None:
        """Stop recording."""
        if self._recording is not None:
            self._recording.stop()
            self._recording = None


def start_snapshot(
    when: str | int, directory: Path | None, device: torch.device
) -> OomSnapshot | StepSnapshot | None:
    """Start to record, or prepare it for a step; None with a warning if it is not possible.

    Args:
        when: ``"on_oom"``, or the number of a training step.
        directory: where the file is written; None if that is not local.
        device: the device.
    """
    if isinstance(when, str) or directory is None or device.type != "cuda":
        return OomSnapshot.start(directory, device)
    return StepSnapshot(directory, device, when)


def _new_path(directory: Path, stem: str) -> Path:
    path = directory / f"{stem}.pickle"
    number = 1
    while path.exists():
        number += 1
        path = directory / f"{stem}_{number}.pickle"
    return path


def _first_line(error: Exception) -> str:
    # A MemoryError has no text.
    return str(error).partition("\n")[0] or type(error).__name__
