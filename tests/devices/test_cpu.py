import os

import pytest

from lightning_batchmem.devices import cpu
from lightning_batchmem.devices.cpu import CpuMeter, usable_cores, waited_seconds


@pytest.mark.parametrize(
    ("cores", "readings", "percents"),
    [
        # 4 of 8 core seconds are busy, then 1 of 4.
        (4, [(10, 10), (12, 14), (13, 15)], [50, 25]),
        # The second reading is a burst above the quota.
        (0.5, [(10, 10), (12, 10.5), (12.5, 11.5)], [50, 100]),
        # No time passed between the readings.
        (4, [(10, 10), (10, 10)], [None]),
        # In a forked child the process time restarts at 0.
        (4, [(10, 10), (12, 0.5), (13, 2.5)], [None, 50]),
    ],
)
def test_percent_is_the_busy_share_of_the_cores_since_the_last_call(cores, readings, percents):
    wall = iter([wall for wall, _ in readings])
    busy = iter([busy for _, busy in readings])
    meter = CpuMeter(cores, wall_seconds=wall.__next__, busy_seconds=busy.__next__)
    assert [meter.percent() for _ in percents] == percents


@pytest.mark.parametrize(("quota_cores", "cores"), [(None, 4), (2.5, 2.5), (8, 4)])
def test_the_cores_are_those_of_the_process_within_the_quota(monkeypatch, quota_cores, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(cpu, "cpu_quota_cores", lambda: quota_cores)
    assert usable_cores() == cores


def test_what_cannot_be_read_does_not_limit_the_cores(monkeypatch):
    def refuse(*_):
        raise OSError("refused")

    monkeypatch.setattr(cpu, "cpu_quota_cores", refuse)
    with pytest.warns(UserWarning, match="The CPU quota cannot be read"):
        assert usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        # The thread ran for 7 s, and waited for 2.5 s.
        ("7000000000 2500000000 31\n", 2.5),
        # The kernel does not count them, or has another form of the file.
        (None, 0.0),
        ("", 0.0),
        ("7 s\n", 0.0),
    ],
)
def test_a_thread_waits_while_other_work_has_the_cores(text, seconds, tmp_path):
    file = tmp_path / "schedstat"
    if text is not None:
        file.write_text(text)
    assert waited_seconds(file=file) == seconds
