import pytest

from lightning_batchmem.profile.metrics import LoggerMetrics
from lightning_batchmem.profile.step import DeviceReading
from tests.helpers.steps import MIB, interval, step


def metrics_of(*steps, world_size=1, limit_bytes=None):
    loggers = LoggerMetrics([], world_size)
    return loggers.metrics(interval(*steps, reading=DeviceReading(limit_bytes)))


def test_metrics_are_maxima_of_bytes_and_means_of_times():
    first = step(0, 5, reserved=8 * MIB)
    second = step(1, 9, seconds=4.0, reserved=7 * MIB, items=100)
    steps = (first, second, step(2, 3, size=1, reserved=6 * MIB))
    found = metrics_of(*steps, limit_bytes=64 * MIB, world_size=2)
    assert found == {
        "memory/peak_allocated_mib": 9.0,
        "memory/peak_reserved_mib": 8.0,
        "memory/limit_mib": 64.0,
        "throughput/samples_per_s": 2 * 9 / 8.0,
        "throughput/items_per_s": 2 * 100 / 4.0,
        "throughput/step_ms": pytest.approx(8000 / 3),
        "throughput/data_wait_pct": pytest.approx(100 * 1.5 / 8),
        "batch/size": 4.0,
    }


def test_a_step_that_a_measurement_slowed_down_has_no_throughput():
    slowed = step(1, 3, seconds=20.0, items=50)._replace(is_slowed=True)
    metrics = metrics_of(step(0, 5, items=100), slowed)
    assert metrics["throughput/samples_per_s"] == 2.0
    assert metrics["throughput/items_per_s"] == 50.0
    assert metrics["throughput/step_ms"] == 2000.0
    assert metrics_of(slowed)["throughput/step_ms"] == 20000.0
    assert "throughput/samples_per_s" not in metrics_of(slowed)


def test_the_first_step_is_no_part_of_a_mean_unless_it_is_alone():
    first = step(0, 3, seconds=20.0)._replace(is_first=True)
    assert metrics_of(first, step(1, 3))["throughput/samples_per_s"] == 2.0
    assert metrics_of(first)["throughput/samples_per_s"] == 0.2


def test_unknown_sizes_items_and_waits_are_left_out_of_the_means():
    unknown = step(1, 3, size=None, seconds=6.0, wait=None)
    metrics = metrics_of(step(0, 5, items=100), unknown)
    names = ("samples_per_s", "items_per_s", "data_wait_pct", "step_ms")
    assert [metrics[f"throughput/{name}"] for name in names] == [2.0, 50.0, 25.0, 4000.0]
    assert metrics["batch/size"] == 4.0
    assert "batch/size" not in metrics_of(step(1, 3, size=None))
