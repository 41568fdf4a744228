"""Times of steps."""

from lightning_batchmem.search.readings import TrialReadings


def test_the_time_of_an_optimizer_step_has_its_micro_batches_and_one_update():
    readings = TrialReadings(primary=None)
    assert readings.optimizer_step_seconds(4) is None
    readings.other_seconds += [1.1, 1.0]
    # The update takes half a second.
    readings.stepping_seconds += [1.5, 1.7]
    assert readings.optimizer_step_seconds(1) == 1.5
    assert readings.optimizer_step_seconds(4) == 4.5
    assert readings.seconds == [1.5, 1.7, 1.1, 1.0]


def test_without_accumulation_each_call_has_an_update():
    readings = TrialReadings(primary=None)
    readings.stepping_seconds += [1.5, 1.4]
    assert readings.optimizer_step_seconds(1) == 1.4
