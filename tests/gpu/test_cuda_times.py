"""Times of steps, and of waiting, on a device that works while the host goes on."""

import statistics

import pytest

from tests.helpers.cuda_stub import needs_stub, on_stub, require

pytestmark = needs_stub

# Each kernel takes 0.2 ms at least, so that small batches do not fill the device.
DEVICE = {"CUDA_STUB_TFLOPS": "20", "CUDA_STUB_LAUNCH_US": "200"}


@pytest.fixture(scope="module")
def searched():
    """A search for the fastest size, and the times of trainings whose batches are ready."""
    return on_stub("cuda_times", "throughput", **DEVICE)


def test_a_step_in_a_search_takes_as_long_as_in_training(searched):
    times = searched["searched_ms"]
    require(len(times) > 1, searched)
    # A search waits for the device after each step, so that its steps may be somewhat longer.
    for size, milliseconds in times.items():
        assert milliseconds < 2 * searched["trained_ms"][size], searched


def test_the_fastest_size_is_fast_in_training(searched):
    rates = {int(size): int(size) / time for size, time in searched["trained_ms"].items()}
    assert rates[searched["size"]] >= 0.9 * max(rates.values()), searched


def test_waiting_for_the_device_is_not_waiting_for_data():
    found = on_stub("cuda_times", "waiting", **DEVICE)
    require(found["logged_pct"] < 30, found)
    # Lightning reads the loss for the progress bar in each step, and so waits for the device.
    assert found["on_progress_bar_pct"] < 30, found


def test_the_times_of_an_interval_are_those_of_the_device_without_evaluation():
    found = on_stub("cuda_times", "profiled", **DEVICE)
    trained_ms = found["trained_ms"]["logged"]
    # The host waits for the device once in an interval, so that the first one may be short.
    assert 0.6 < statistics.mean(trained_ms) / found["exact_ms"] < 1.6, found
    # Each row has the mean of the steps between two readings of the device. A log has 8 steps.
    rows_ms = found["trained_ms"]["rows"]
    assert len(rows_ms) == 8 * len(trained_ms)
    # The first step has its own time.
    later_ms = statistics.mean(trained_ms[1:])
    assert statistics.mean(rows_ms[8:]) == pytest.approx(later_ms, rel=1e-3)
    # An evaluation takes longer than all steps. It also waits for the steps before it.
    assert statistics.mean(found["evaluated_ms"]["logged"]) / found["exact_ms"] < 1.6, found
