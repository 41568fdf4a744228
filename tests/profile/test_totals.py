from lightning_batchmem.profile.step import DeviceReading
from lightning_batchmem.profile.totals import Totals
from tests.helpers.steps import MIB, interval, step


def test_totals_of_a_run_are_those_of_its_intervals():
    totals = Totals()
    reading = DeviceReading(utilization=("gpu_pct", 90.0))
    totals.add(interval(step(0, 9, seconds=1.0), reading=reading).totals)
    totals.add(interval(step(1, 5, seconds=1.0)).totals)
    reading = DeviceReading(utilization=("gpu_pct", 50.0))
    totals.add(interval(step(2, 7), step(3, 7, seconds=1.0), reading=reading).totals)
    assert (totals.highest.number, totals.total("steps"), totals.step_seconds) == (0, 4, 5 / 4)
    maxima = {"peak": 9 * MIB, "forward": 9 * MIB, "backward": MIB, "batch_size": 4}
    assert totals.maxima == maxima
    # The utilization of each interval counts with its time.
    assert totals.rate("busy") == 60.0
    # No step has items, and their sum is missing.
    assert totals.rate("items") is None
