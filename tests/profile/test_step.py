from lightning_batchmem.profile.step import DeviceReading, StageTotals
from tests.helpers.steps import MIB, UNREAD, interval, step

OLDER = DeviceReading(utilization=("gpu_pct", 10.0), is_new=False)


def test_totals_of_a_run_are_those_of_its_intervals():
    taker = StageTotals()
    reading = DeviceReading(utilization=("gpu_pct", 90.0))
    taker.take(interval(step(0, 9, seconds=1.0), reading=reading))
    taker.take(interval(step(1, 5, seconds=1.0, reserved=12 * MIB), reading=UNREAD))
    graphs = step(3, 7, seconds=1.0, reserved=10 * MIB)._replace(peak_bytes=None, has_graphs=True)
    reading = DeviceReading(utilization=("gpu_pct", 50.0))
    taker.take(interval(step(2, 7), graphs, reading=reading))
    totals = taker.by_stage["train"]
    assert (totals.highest.number, totals.steps, totals.step_seconds) == (0, 4, 5 / 4)
    assert (totals.peak_bytes, totals.reserved_bytes) == (9 * MIB, 12 * MIB)
    assert (totals.batch_size, totals.graph_steps) == (4, 1)
    # The utilization of each interval counts with its time.
    assert totals.busy.per_second() == 60.0
    # No step has items, and their rate is missing.
    assert totals.items.per_second() is None


def test_a_utilization_counts_with_the_time_since_the_reading_before():
    taker = StageTotals()
    for seconds in (1.0, 2.0):
        taker.take(interval(step(0, 9, seconds=seconds), reading=OLDER))
    assert taker.by_stage == {}
    reading = DeviceReading(utilization=("gpu_pct", 50.0))
    taker.take(interval(step(2, 9, seconds=1.0), reading=reading))
    assert taker.by_stage["train"].busy.amount == 4.0 * 50.0
    # A validation begins before the next reading.
    taker.take(interval(step(3, 9, seconds=2.0), reading=OLDER))
    taker.flush()
    taker.close()
    totals = taker.by_stage["train"]
    assert (totals.steps, totals.busy.seconds, totals.busy.amount) == (4, 6.0, 220.0)
