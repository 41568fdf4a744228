import pytest

from lightning_batchmem.profile.metrics import LoggerMetrics
from lightning_batchmem.profile.step import UNREAD, DeviceReading
from tests.helpers.steps import MIB, interval, step


def metrics_of(*steps, world_size=1, limit_bytes=None):
    loggers = LoggerMetrics([], world_size)
    return loggers.metrics(interval(*steps), DeviceReading(limit_bytes))


def test_metrics_are_maxima_of_bytes_and_means_of_times():
    first = step(0, 5, reserved=8 * MIB)
    second = step(1, 9, seconds=4.0, reserved=7 * MIB, items=100)
    steps = (first, second, step(2, 3, size=1, reserved=6 * MIB))
    found = metrics_of(*steps, limit_bytes=64 * MIB, world_size=2)
    assert found == {
        "memory/peak_tensors_mib": 9.0,
        "memory/peak_process_mib": 8.0,
        "memory/used_pct": 12.5,
        "memory/process_limit_mib": 64.0,
        "speed/samples_per_s": 2 * 9 / 8.0,
        "speed/items_per_s": 2 * 100 / 4.0,
        "speed/step_ms": pytest.approx(8000 / 3),
        "speed/data_wait_pct": pytest.approx(100 * 1.5 / 8),
        "speed/samples_per_batch": 4.0,
    }


def test_without_an_allocator_the_peak_is_that_of_the_process():
    metrics = metrics_of(step(0, 5), step(1, 9))
    assert metrics["memory/peak_process_mib"] == 9.0
    assert {"memory/peak_tensors_mib", "memory/used_pct"} & set(metrics) == set()


def test_the_used_share_is_of_the_limit_that_was_read_last():
    loggers = LoggerMetrics([], 1)
    limits = [64, None, 32]
    readings = [DeviceReading(None if limit is None else limit * MIB) for limit in limits]
    found = [loggers.metrics(interval(step(0, 8)), reading) for reading in readings]
    assert [metrics["memory/used_pct"] for metrics in found] == [12.5, 12.5, 25.0]


def test_the_size_of_a_batch_is_logged_where_it_changes():
    loggers = LoggerMetrics([], 1)
    steps = [step(0, 8), step(1, 8), step(2, 8, size=6), step(3, 8, size=6)]
    steps.insert(1, step(0, 8, size=2)._replace(stage="validate"))
    found = [loggers.metrics(interval(one), UNREAD) for one in steps]
    sizes = [metrics.get("speed/samples_per_batch") for metrics in found]
    assert sizes == [4.0, None, None, 6.0, None]
    assert found[1]["speed/samples_per_batch_validate"] == 2.0


def test_an_evaluation_has_the_names_of_a_training_and_its_stage():
    reading = DeviceReading(64 * MIB, ("gpu_pct", 50.0), 1, 1)
    one = step(0, 5, reserved=8 * MIB, items=100)
    training, test = (
        LoggerMetrics([], 1).metrics(interval(one._replace(stage=stage)), reading)
        for stage in ("train", "test")
    )
    # What is counted in the whole run is logged once.
    of_run = {"memory/process_limit_mib", "memory/alloc_retries", "memory/ooms"}
    assert set(test) == {f"{name}_test" for name in set(training) - of_run}
    assert {name.partition("/")[0] for name in (*training, *test)} == {"memory", "speed"}


def test_a_step_that_a_measurement_slowed_down_has_no_throughput():
    slowed = step(1, 3, seconds=20.0, items=50)._replace(is_slowed=True)
    metrics = metrics_of(step(0, 5, items=100), slowed)
    assert metrics["speed/samples_per_s"] == 2.0
    assert metrics["speed/items_per_s"] == 50.0
    assert metrics["speed/step_ms"] == 2000.0
    assert metrics_of(slowed)["speed/step_ms"] == 20000.0
    assert "speed/samples_per_s" not in metrics_of(slowed)


def test_the_first_step_is_no_part_of_a_mean_unless_it_is_alone():
    first = step(0, 3, seconds=20.0)._replace(is_first=True)
    assert metrics_of(first, step(1, 3))["speed/samples_per_s"] == 2.0
    assert metrics_of(first)["speed/samples_per_s"] == 0.2


def test_unknown_sizes_items_and_waits_are_left_out_of_the_means():
    unknown = step(1, 3, size=None, seconds=6.0, wait=None)
    metrics = metrics_of(step(0, 5, items=100), unknown)
    names = ("samples_per_s", "items_per_s", "data_wait_pct", "step_ms")
    assert [metrics[f"speed/{name}"] for name in names] == [2.0, 50.0, 25.0, 4000.0]
    assert metrics["speed/samples_per_batch"] == 4.0
    assert "speed/samples_per_batch" not in metrics_of(step(1, 3, size=None))
