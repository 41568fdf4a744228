from __future__ import annotations

import pytest
import torch

from lightning_batchmem.devices import Reading, meter_for, utilization_for


def test_mps_has_current_values_and_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 3)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 5)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 100)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: calls.append("synchronize"))
    meter = meter_for(torch.device("mps"))
    assert (meter.name, meter.has_peak) == ("mps", False)
    meter.reset_peak()
    assert meter.peak() == meter.current() == Reading(3, 5)
    assert meter.budget_bytes() == 100
    assert meter.outside_bytes() is None
    assert calls == []
    meter.release_cached()
    meter.synchronize()
    assert calls == ["empty_cache", "synchronize"]
    assert meter.counters() == {}


def test_mps_utilization_is_unknown() -> None:
    assert utilization_for(torch.device("mps")) is None


def test_other_devices_have_no_meter() -> None:
    with pytest.raises(ValueError, match="device must be a cuda, cpu or mps device, got meta"):
        meter_for(torch.device("meta"))
