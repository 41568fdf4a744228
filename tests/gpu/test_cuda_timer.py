from __future__ import annotations

import time

import pytest
import torch

from lightning_batchmem.devices.base import Timer
from lightning_batchmem.devices.select import timer_for


@pytest.fixture
def timer(device: torch.device) -> Timer:
    timer = timer_for(device)
    assert timer is not None
    return timer


def work(matrix: torch.Tensor) -> None:
    for _ in range(200):
        matrix @ matrix


def test_the_devices_time_is_that_of_waiting_for_it(timer: Timer, device: torch.device) -> None:
    matrix = torch.ones(4096, 4096, device=device)
    work(matrix)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    earlier = timer.mark()
    work(matrix)
    later = timer.mark()
    torch.cuda.synchronize(device)
    waited_seconds = time.perf_counter() - start
    assert timer.seconds_between(earlier, later) == pytest.approx(waited_seconds, rel=0.1, abs=2e-3)


def test_neither_marking_nor_reading_waits(timer: Timer, device: torch.device) -> None:
    matrix = torch.ones(4096, 4096, device=device)
    matrix @ matrix
    torch.cuda.synchronize(device)
    earlier = timer.mark()
    work(matrix)
    later = timer.mark()
    at_once = timer.seconds_between(earlier, later)
    assert not later.query(), "a mark or a reading waited until the device was idle"
    assert at_once is None
    torch.cuda.synchronize(device)
    seconds = timer.seconds_between(earlier, later)
    assert seconds is not None
    assert seconds > 0


def test_it_follows_the_current_stream(timer: Timer, device: torch.device) -> None:
    matrix = torch.ones(4096, 4096, device=device)
    torch.cuda.synchronize(device)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        work(matrix)
        busy = timer.mark()
    idle = timer.mark()  # the default stream has nothing to do
    assert timer.seconds_between(busy, idle) is None  # no error either
    side.synchronize()
    torch.cuda.synchronize(device)
    assert timer.seconds_between(busy, idle) is not None


def test_it_may_be_used_while_another_device_is_current(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    other = torch.device("cuda", 1)
    timer = timer_for(other)
    assert timer is not None
    with torch.cuda.device(device):
        earlier = timer.mark()
        work(torch.ones(4096, 4096, device=other))
        later = timer.mark()
        assert later.device == other
        torch.cuda.synchronize(other)
        seconds = timer.seconds_between(earlier, later)
        assert torch.cuda.current_device() == device.index
    assert seconds is not None
    assert seconds > 1e-3
