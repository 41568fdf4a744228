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


class AllocatorHistory:
    """Records the allocator's events, and writes them when memory ran out or a step has ended.

    A history that somebody else records is written too, and continues. This needs CUDA: only
    ``torch.cuda`` can report whether a history is recorded already.

    Args:
        directory: where the file is written.
        step: the number of the one training step that is recorded; ``None``: all steps are, and
            written only if memory runs out.

    Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html; read in torch 2.5.1 and
    2.13.
    """

    def __init__(self, directory: Path, step: int | None = None) -> None:
        self._directory = directory
        self._step = step
        self._is_recorded = False
        # Somebody else may have started it.
        self._is_own = False

    def record(self) -> bool:
        """Begin to record, which starts CUDA; returns False, with a warning, if it fails."""
        try:
            is_own = not torch._C._cuda_isHistoryEnabled()
            if is_own:
                torch.cuda.memory._record_memory_history(
                    "all", context="alloc", stacks="python", max_entries=_MAX_EVENTS
                )
        # An allocator without a history (cudaMallocAsync) raises this type.
        except RuntimeError as error:
            _warn(_first_line(error))
            return False
        self._is_own = is_own
        self._is_recorded = True
        return True

    def begin_step(self, number: int) -> None:
        """Begin to record if this is the step."""
        # It may begin again, because a step that Lightning skips does not count.
        if number == self._step and not self._is_recorded:
            self.record()

    def end_step(self, rank: int) -> str:
        """Return a sentence about the file if a step was recorded, and is written now."""
        if self._step is None:
            return ""
        text = self.write(rank)
        self.stop()
        return text

    def write(self, rank: int) -> str:
        """Write what was recorded, and return a sentence about it; empty without a recording.

        The file is ``<name>_snapshot_rank<rank>.pickle``, or a numbered one if that exists. The
        name is ``oom`` or ``step_<number>``.
        """
        if not self._is_recorded:
            return ""
        name = "oom" if self._step is None else f"step_{self._step}"
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
        self._is_recorded = False
        if self._is_own:
            self._is_own = False
            torch.cuda.memory._record_memory_history(enabled=None)


def start_snapshot(
    when: str | int, directory: Path | None, device: torch.device
) -> AllocatorHistory | None:
    """Start to record, or prepare it for a step; None with a warning if it is not possible.

    Args:
        when: ``"on_oom"``, or the number of a training step.
        directory: where the file is written; None if that is not local.
        device: the device.
    """
    if device.type != "cuda":
        _warn("it needs a CUDA device")
        return None
    if directory is None:
        _warn("it needs a log_dir that is local, and a run without fast_dev_run")
        return None
    if isinstance(when, int):
        return AllocatorHistory(directory, when)
    history = AllocatorHistory(directory)
    return history if history.record() else None


def _warn(reason: str) -> None:
    rank_zero_warn(f"No memory snapshot will be written: {reason}.")


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
