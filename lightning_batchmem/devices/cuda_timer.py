"""Times of a CUDA device's own work, from events that it passes on its way and that are read later."""

from __future__ import annotations

import torch


class CudaTimer:
    """Seconds between two points of a CUDA device's work, without ever waiting for it.

    Every mark is an event of its own, which keeps its moment until it is dropped: keep few of them. They may be made
    and read while another device is the current one. The first mark starts CUDA.

    Args:
        device: the CUDA device; without an index the current one at each mark.

    Raises:
        ValueError: for another kind of device.

    Source: ``torch.cuda.Event``, read in torch 2.5.1 and 2.13 (CUDAEvent.h), and
    https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__EVENT.html
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"device must be a cuda device, got {device}")
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """An event behind all work that the device was given so far on its current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # Made on first use, on the stream's own device. Without a stream it would be the current device's, which may
        # be another: https://docs.pytorch.org/docs/stable/generated/torch.cuda.Event.html
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float | None:
        """Seconds of the device's own clock, to about 0.5 µs.

        Args:
            earlier: what :meth:`mark` gave.
            later: a later mark of the same device.

        Returns:
            Seconds; ``None`` as long as the device has not passed both.

        Raises:
            RuntimeError: when the device failed at what it was given (``torch.AcceleratorError`` in newer releases).
        """
        # elapsed_time raises when one of them is still to come, whichever stream it is on, and does not wait either
        if not (later.query() and earlier.query()):  # type: ignore[no-untyped-call]
            return None
        return earlier.elapsed_time(later) / 1000  # type: ignore[no-any-return]
