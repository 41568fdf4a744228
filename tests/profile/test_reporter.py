import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_batchmem.devices.peaks import StepPeaks
from lightning_batchmem.profile.reporter import StepReporter
from lightning_batchmem.profile.step_record import DeviceReading, StepRecord


class Rows:
    """Keeps the steps that are written."""

    def __init__(self):
        self.steps = []

    def write(self, steps, *, world_size):
        self.steps += steps

    def close(self):
        pass


def trainer():
    return Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)


def test_the_steps_that_are_kept_until_a_log_are_bounded(device_memory):
    rows = Rows()
    reporter = StepReporter(trainer(), device_memory, csv=rows)
    for number in range(1000):
        reporter.add(StepRecord(number, 8, StepPeaks({"forward": number}), 0.1, 0.01))
        assert number - len(rows.steps) < 256
    assert reporter.run_peak_bytes == 999
    reporter.close()
    assert len(rows.steps) == 1000


def test_on_a_device_the_steps_between_two_logs_have_their_mean_time(device_memory, monkeypatch):
    """The host runs ahead in the first steps, and waits for the device in the last one."""
    monkeypatch.setattr(SingleDeviceStrategy, "root_device", torch.device("cuda"))
    rows = Rows()
    reporter = StepReporter(trainer(), device_memory, csv=rows)
    for number, seconds in enumerate([1.0, 1.0, 10.0, 5.0, 3.0]):
        stage = "validate" if number == 3 else "train"
        record = StepRecord(number, 8, StepPeaks({"forward": 7}), seconds, 0.01, stage)
        record.is_slowed = number == 4
        reporter.add(record)
        # Reading a peak ends no interval.
        assert (reporter.epoch_peak_bytes, rows.steps) == (7, [])
    reporter.log("train", 4, DeviceReading())
    # A step of another stage is apart, and so is one that a measurement made slower.
    assert [step.mean_seconds for step in rows.steps] == [4.0, 4.0, 4.0, 5.0, 3.0]
    reporter.add(StepRecord(5, 8, StepPeaks({"forward": 7}), 6.0, 0.01))
    reporter.close()
    assert rows.steps[-1].mean_seconds == 6.0
    assert reporter.summary("train").step_seconds == 21 / 5


def test_the_utilization_of_each_interval_counts_with_its_time(device_memory):
    reporter = StepReporter(trainer(), device_memory)
    for number, (seconds, percent) in enumerate([(1.0, 90.0), (3.0, 50.0)]):
        reporter.add(StepRecord(number, 8, StepPeaks({"forward": 7}), seconds, 0.01))
        reporter.log("train", number, DeviceReading(utilization=("gpu_pct", percent)))
    assert reporter.summary("train").busy_percent == 60.0
