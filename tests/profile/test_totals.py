from lightning_batchmem.profile.step import DeviceReading
from lightning_batchmem.profile.totals import Totals, ratio
from tests.helpers.steps import MIB, UNREAD, step


def test_totals_of_a_run_are_those_of_its_intervals():
    totals = Totals()
    totals.add([step(0, 9, seconds=1.0)], DeviceReading(utilization=("gpu_pct", 90.0)))
    totals.add([step(1, 5, seconds=1.0, reserved=12 * MIB)], UNREAD)
    graphs = step(3, 7, seconds=1.0, reserved=10 * MIB)._replace(peak_bytes=None, has_graphs=True)
    totals.add([step(2, 7), graphs], DeviceReading(utilization=("gpu_pct", 50.0)))
    assert (totals.highest.number, totals.steps, totals.step_seconds) == (0, 4, 5 / 4)
    assert (totals.peak_bytes, totals.reserved_bytes) == (9 * MIB, 12 * MIB)
    assert (totals.batch_size, totals.graph_steps) == (4, 1)
    # The utilization of each interval counts with its time.
    assert totals.busy_percent == 60.0
    # No step has items, and their rate is missing.
    assert ratio(totals.items, totals.items_seconds) is None
