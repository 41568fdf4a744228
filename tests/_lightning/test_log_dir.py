from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from lightning_batchmem._lightning.profiled_stage import log_dir_of
from lightning_batchmem.devices.foreign_values import begin_run
from tests.helpers.lawful import quiet_trainer


class Mocked:
    """What a mock of a logger has as its directory."""


class Kept(Logger):
    """Has whatever a test wants as its directory."""

    name = "kept"
    version = 0

    def __init__(self, directory):
        super().__init__()
        self.directory = directory

    @property
    def log_dir(self):
        return self.directory

    save_dir = log_dir

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params):
        pass


@pytest.fixture(autouse=True)
def _run():
    begin_run()


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ("logs", "logs"),
        (Path("logs"), "logs"),
        (b"logs", "logs"),
        ("", None),
        (None, None),
        (3, None),
        (Mocked(), None),
    ],
    ids=repr,
)
def test_a_log_directory_of_any_kind(directory, expected):
    assert log_dir_of(quiet_trainer(logger=Kept(directory))) == expected


class Failing(type(Path())):
    def __fspath__(self):
        raise OSError("no")


def test_a_log_directory_that_cannot_be_read_is_one_warning():
    trainer = quiet_trainer(logger=Kept(Failing("logs")))
    with pytest.warns(UserWarning, match="The log directory cannot be read") as caught:
        found = [log_dir_of(trainer) for _ in range(2)]
    assert found == [None, None]
    assert len(caught) == 1


def test_a_log_directory_whose_property_raises_is_a_warning(monkeypatch):
    trainer = quiet_trainer()
    monkeypatch.setattr(Trainer, "log_dir", property(lambda self: 1 / 0))
    with pytest.warns(UserWarning, match="cannot be read: ZeroDivisionError"):
        assert log_dir_of(trainer) is None
