from lightning_batchmem.profile.step import UNREAD, DeviceReading, Totals
from tests.helpers.steps import MIB, interval, step


def test_totals_of_a_run_are_those_of_its_intervals():
    totals = Totals()
    reading = DeviceReading(gpu_percent=90.0)
    totals.add(interval(step(0, 9, seconds=1.0), reading=reading))
    second = step(1, 5, seconds=1.0, reserved=12 * MIB)
    totals.add(interval(second, reading=UNREAD))
    graphs = step(3, 7, seconds=1.0, reserved=10 * MIB)._replace(peak_bytes=None)
    reading = DeviceReading(gpu_percent=50.0)
    totals.add(interval(step(2, 7), graphs, reading=reading))
    assert (totals.highest.number, totals.steps, totals.times.step_seconds) == (0, 4, 5 / 4)
    assert (totals.peak_bytes, totals.peak_reserved_bytes) == (9 * MIB, 12 * MIB)
    assert (totals.batch_size, totals.graph_steps) == (4, 1)
    # The utilization of each interval counts with its time.
    assert totals.times.per_second("busy") == 60.0
    # No step has items, and their rate is missing.
    assert totals.times.per_second("items") is None


def test_means_are_those_of_the_steps_after_the_first_one():
    totals = Totals()
    first = step(0, 9, seconds=5.0, wait=4.0)._replace(is_first=True)
    totals.add(interval(first, reading=DeviceReading(gpu_percent=10.0)))
    # Without other steps they are those of the first one.
    assert (totals.times.step_seconds, totals.times.per_second("samples")) == (5.0, 4 / 5.0)
    compiled = step(1, 5, seconds=7.0)._replace(is_first=True)
    reading = DeviceReading(gpu_percent=90.0)
    totals.add(interval(compiled, step(2, 5), step(3, 5), reading=reading))
    times = totals.times
    assert (times.step_seconds, times.per_second("wait"), totals.first_seconds) == (2.0, 0.25, 5.0)
    assert (times.per_second("samples"), times.per_second("busy")) == (2.0, 90.0)
    assert (totals.steps, totals.peak_bytes) == (4, 9 * MIB)


def test_of_equal_peaks_the_first_step_counts():
    totals = Totals()
    for number in (4, 5):
        totals.add(interval(step(number, 0), step(number, 0)))
    assert (totals.highest.number, totals.peak_bytes) == (4, 0)
