from lightning.pytorch import Trainer

from lightning_batchmem.devices.peaks import StepPeaks
from lightning_batchmem.profile.reporter import StepReporter
from lightning_batchmem.profile.step_record import DeviceReading, StepRecord


class Rows:
    """Counts the steps that are written."""

    written = 0

    def write(self, steps, *, world_size):
        self.written += len(steps)


class Timer:
    """A device that never reaches a mark."""

    def seconds_between(self, earlier, later):
        return None


def trainer():
    return Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)


def test_steps_wait_in_a_bounded_queue_until_they_are_logged(device_memory):
    rows = Rows()
    reporter = StepReporter(trainer(), device_memory, csv=rows)
    for number in range(1000):
        reporter.add(StepRecord(number, 8, StepPeaks({"forward": number}), 0.1, 0.01))
        assert number - rows.written < 256
    assert reporter.run_peak_bytes == 999
    assert rows.written == 1000


def test_a_step_whose_time_is_not_known_is_counted_once_and_not_written(device_memory):
    rows = Rows()
    reporter = StepReporter(trainer(), device_memory, Timer(), csv=rows)
    for number in range(300):
        peaks = StepPeaks({"forward": 7})
        reporter.add(StepRecord(number, 8, peaks, 0.1, 0.01, marks=(number, number + 1)))
    assert rows.written == 0
    assert reporter.summary("train").steps == 300


def test_the_utilization_of_each_interval_counts_with_its_time(device_memory):
    reporter = StepReporter(trainer(), device_memory)
    for number, (seconds, percent) in enumerate([(1.0, 90.0), (3.0, 50.0)]):
        reporter.add(StepRecord(number, 8, StepPeaks({"forward": 7}), seconds, 0.01))
        reporter.log("train", number, DeviceReading(utilization=("gpu_pct", percent)))
    assert reporter.summary("train").busy_percent == 60.0
