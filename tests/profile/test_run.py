"""Which steps each taker gets, and when."""

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_batchmem.profile.alerts import Alerts
from lightning_batchmem.profile.columns import LoggerMetrics, StepCsv
from lightning_batchmem.profile.run import Takers
from lightning_batchmem.profile.run_folder import RunFolder
from lightning_batchmem.profile.step import DeviceReading
from tests.helpers.profiled import MIB, rows
from tests.helpers.steps import interval, step


class Failing(DummyLogger):
    """Raises an error at the first log."""

    error = None

    def __init__(self):
        super().__init__()
        self.steps = []

    def log_metrics(self, metrics, step=None):
        self.steps.append(step)
        if self.error is not None:
            error, self.error = self.error, None
            raise error


def raise_warning(sentence):
    raise UserWarning(sentence)


@pytest.fixture
def made(tmp_path):
    """Takers, their logger, and the path of their file."""
    logger = Failing()
    folder = RunFolder(tmp_path)
    csv = StepCsv(folder.csv, has_exact_times=False)
    takers = Takers(LoggerMetrics([logger], world_size=1), Alerts(raise_warning), csv)
    yield takers, logger, folder.path
    takers.close()


def log(takers, *steps):
    """Log the steps as a run does."""
    takers.keep(list(steps))
    takers.loggers.take(interval(*steps), 0)


def test_steps_between_two_readings_of_the_device_are_one_interval(made):
    takers, logger, path = made
    log(takers, step(0, 5, seconds=0.5))
    log(takers, step(1, 5, seconds=1.5), step(2, 5, seconds=1.0))
    assert (len(logger.steps), rows(path)) == (2, [])
    assert not takers.totals
    reading = DeviceReading(32 * MIB, 50.0)
    takers.flush(reading)
    takers.flush(reading)
    found = rows(path)
    assert [row["step_ms"] for row in found] == ["1000.000"] * 3
    assert [row["limit_mib"] for row in found] == ["", "", "32.000"]
    totals = takers.totals["train"]
    assert (totals.steps, totals.times.seconds) == (3, 3.0)
    assert totals.times.per_second("busy") == 50.0


def test_an_alert_that_is_an_error_leaves_the_steps_in_the_file_once(made):
    takers, _, path = made
    log(takers, step(0, 31))
    with pytest.raises(UserWarning, match="is above 95%"):
        takers.flush(DeviceReading(32 * MIB))
    takers.flush(DeviceReading(32 * MIB))
    assert [row["step"] for row in rows(path)] == ["0"]
    assert takers.totals["train"].steps == 1


def test_an_interrupt_in_a_logger_leaves_the_steps_to_the_others_once(made):
    takers, logger, path = made
    logger.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        log(takers, step(0, 5))
    takers.flush(DeviceReading(32 * MIB))
    takers.flush(DeviceReading(32 * MIB))
    assert [row["step"] for row in rows(path)] == ["0"]
    assert takers.totals["train"].steps == 1
