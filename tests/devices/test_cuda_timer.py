from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from lightning_batchmem.devices.cuda_timer import CudaTimer
from lightning_batchmem.devices.select import timer_for

DEVICE = torch.device("cuda", 1)


@dataclass
class Stream:
    """What a device was given: ``done_ms`` is how far it has come, ``end_ms`` when it will be through."""

    device: torch.device
    end_ms: float = 0.0
    done_ms: float = 0.0


@dataclass
class Device:
    """The patched torch.cuda: two devices, of which device 0 is the current one."""

    streams: dict[int, Stream] = field(default_factory=lambda: {i: Stream(torch.device("cuda", i)) for i in (0, 1)})
    events: int = 0

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.streams[0 if device is None or device.index is None else device.index]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    class Event:
        """As torch's: never recorded it counts as passed, and the time between two that are not passed is an error."""

        def __init__(self, enable_timing: bool = False) -> None:
            device.events += 1
            self._has_time, self._stream, self._at_ms = enable_timing, None, 0.0

        def record(self, stream: Stream | None = None) -> None:
            self._stream = device.current_stream() if stream is None else stream
            self._at_ms = self._stream.end_ms

        def query(self) -> bool:
            return self._stream is None or self._stream.done_ms >= self._at_ms

        def elapsed_time(self, end: Event) -> float:
            if not (self._has_time and end._has_time and self._stream and end._stream):
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            if not (self.query() and end.query()):
                raise RuntimeError("Both events must be completed before calculating elapsed time.")
            return end._at_ms - self._at_ms

        def synchronize(self) -> None:
            raise AssertionError("waited for the device")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", device.current_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: pytest.fail("waited for the device"))
    return device


def test_seconds_are_told_once_the_device_has_passed_both(device: Device) -> None:
    timer = timer_for(DEVICE)
    assert timer is not None
    work = device.streams[1]
    work.end_ms = 100.0
    earlier = timer.mark()
    work.end_ms = 350.0
    later = timer.mark()
    for done_ms, seconds in ((0, None), (100, None), (349, None), (350, 0.25), (900, 0.25)):
        work.done_ms = done_ms
        assert timer.seconds_between(earlier, later) == seconds


def test_a_mark_that_is_still_to_come_on_another_stream_is_no_error(device: Device) -> None:
    timer = CudaTimer(DEVICE)
    side = device.streams[1] = Stream(DEVICE, end_ms=500.0)
    earlier = timer.mark()
    device.streams[1] = Stream(DEVICE, end_ms=10.0, done_ms=10.0)
    later = timer.mark()
    assert timer.seconds_between(earlier, later) is None
    side.done_ms = 500.0
    assert timer.seconds_between(earlier, later) is not None


def test_it_is_the_devices_own_stream_not_the_current_devices(device: Device) -> None:
    timer = CudaTimer(DEVICE)
    device.streams[0].end_ms = device.streams[0].done_ms = 1000.0
    earlier = timer.mark()
    device.streams[1].end_ms = device.streams[1].done_ms = 20.0
    assert timer.seconds_between(earlier, timer.mark()) == 0.02


def test_a_mark_is_an_event_of_its_own_and_reading_makes_none(device: Device) -> None:
    timer = CudaTimer(DEVICE)
    assert device.events == 0
    earlier, later = timer.mark(), timer.mark()
    assert earlier is not later
    for _ in range(3):
        timer.seconds_between(earlier, later)
    assert device.events == 2


@pytest.mark.parametrize("name", ["cpu", "mps"])
def test_elsewhere_wall_time_has_to_do(name: str) -> None:
    assert timer_for(torch.device(name)) is None


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device must be a cuda device, got cpu"):
        CudaTimer(torch.device("cpu"))
