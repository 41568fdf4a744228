import pytest

from lightning_batchmem.profile.metrics import LoggerMetrics
from lightning_batchmem.profile.plan_prediction import PlanPrediction
from lightning_batchmem.profile.step import DeviceReading, Step
from lightning_batchmem.profile.totals import Interval, StepTotals

MIB = 2**20


def step(number, peak, *, size=4, seconds=2.0, wait=0.5, reserved=None, items=None):
    return Step(
        number,
        "train",
        size,
        seconds,
        wait,
        peak * MIB,
        reserved,
        {"forward": peak * MIB, "backward": MIB},
        items=items,
    )


UNREAD = DeviceReading()


def interval(*steps, reading=UNREAD):
    return Interval("train", list(steps), reading, 0)


def metrics_of(*steps, total_bytes=None, world_size=1, limit_bytes=None):
    prediction = PlanPrediction(None, is_host=False)
    sink = LoggerMetrics([], world_size, total_bytes, prediction, flops=None)
    return sink.metrics(interval(*steps, reading=DeviceReading(limit_bytes)))


def test_metrics_are_maxima_of_bytes_and_means_of_times():
    first = step(0, 5, reserved=8 * MIB)
    second = step(1, 9, seconds=4.0, reserved=7 * MIB, items=100)
    steps = (first, second, step(2, 3, size=1, reserved=6 * MIB))
    found = metrics_of(*steps, limit_bytes=64 * MIB, total_bytes=80 * MIB, world_size=2)
    assert found == {
        "memory/peak_allocated_mib": 9.0,
        "memory/peak_reserved_mib": 8.0,
        "memory/reserved_pct": 10.0,
        "memory/limit_mib": 64.0,
        "throughput/samples_per_s": 2 * 9 / 8.0,
        "throughput/items_per_s": 2 * 100 / 4.0,
        "throughput/step_ms": pytest.approx(8000 / 3),
        "throughput/data_wait_pct": pytest.approx(100 * 1.5 / 8),
        "batch/size": 4.0,
    }
    total = interval(*steps).totals
    assert (total.peak_bytes, total.peak_step, total.peak_batch_size) == (9 * MIB, 1, 4)
    assert total.phase_peak_bytes == {"forward": 9 * MIB, "backward": MIB}


def test_a_step_that_a_measurement_slowed_down_has_no_throughput():
    slowed = step(1, 3, seconds=20.0, items=50)._replace(is_slowed=True)
    metrics = metrics_of(step(0, 5, items=100), slowed)
    assert metrics["throughput/samples_per_s"] == 2.0
    assert metrics["throughput/items_per_s"] == 50.0
    assert metrics["throughput/step_ms"] == 11000.0


def test_the_share_of_the_device_needs_both_numbers():
    assert "memory/reserved_pct" not in metrics_of(step(0, 5, reserved=8 * MIB))
    assert "memory/reserved_pct" not in metrics_of(step(0, 5), total_bytes=80 * MIB)


def test_unknown_sizes_items_and_waits_are_left_out_of_the_means():
    unknown = step(1, 3, size=None, seconds=6.0, wait=None)
    metrics = metrics_of(step(0, 5, items=100), unknown)
    names = ("samples_per_s", "items_per_s", "data_wait_pct", "step_ms")
    assert [metrics[f"throughput/{name}"] for name in names] == [2.0, 50.0, 25.0, 4000.0]
    assert metrics["batch/size"] == 4.0
    assert "batch/size" not in metrics_of(step(1, 3, size=None))


def test_totals_of_a_run_are_those_of_its_intervals():
    totals = StepTotals()
    reading = DeviceReading(utilization=("gpu_pct", 90.0))
    totals.add(interval(step(0, 9, seconds=1.0), reading=reading))
    totals.add(interval(step(1, 5, seconds=1.0)))
    reading = DeviceReading(utilization=("gpu_pct", 50.0))
    totals.add(interval(step(2, 7), step(3, 7, seconds=1.0), reading=reading))
    assert (totals.peak_step, totals.steps, totals.step_seconds) == (0, 4, 5 / 4)
    # The utilization of each interval counts with its time.
    assert totals.busy.value() == 60.0


def test_on_a_device_the_steps_of_an_interval_have_their_mean_time():
    """The host runs ahead in the first steps, and waits for the device in the third one."""
    steps = [step(number, 5, seconds=seconds) for number, seconds in enumerate([1.0, 1.0, 10.0])]
    # A step that a measurement made slower is apart.
    steps.append(step(3, 5, seconds=3.0)._replace(is_slowed=True))
    assert interval(*steps).mean_seconds() == {False: 4.0, True: 3.0}
