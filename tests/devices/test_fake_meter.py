"""The double must keep the promises that the tests of the finder and the profiler build on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_batchmem.devices import Meter, Reading


def test_peak_is_the_maximum_of_the_lines(fake_meter: Any) -> None:
    fake = fake_meter(budget_bytes=1000, base_bytes=100)
    meter: Meter = fake
    for fixed, per_sample in ((0, 50), (300, 5)):
        fake.use(fixed + per_sample * 4)
        fake.free()
    assert meter.peak() == Reading(420)
    assert meter.current() == Reading(100)
    meter.reset_peak()
    assert meter.peak() == Reading(100)
    assert meter.budget_bytes() == 1000
    assert meter.outside_bytes() is None


def test_above_the_budget_it_runs_out_and_holds_what_it_held(fake_meter: Any) -> None:
    fake = fake_meter(budget_bytes=1000, base_bytes=100)
    fake.use(900)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        fake.use(1)
    assert fake.current_bytes == 1000
    assert fake.counters() == {"num_ooms": 1, "num_alloc_retries": 0}
    fake.free(400)
    assert fake.current() == Reading(600)
    fake.reserved_ratio = 1.5
    assert fake.current() == Reading(600, 900)
