"""The data in each figure, read from its lines and bars, and the figures in loggers."""

import logging
import sys
from dataclasses import replace

import matplotlib
import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from matplotlib import pyplot

from lightning_batchmem.plan.records import MIB, Trial
from lightning_batchmem.profile.figures import (
    draw,
    log_figures,
    plot_memory_over_steps,
)
from tests.plan.test_plan import PLAN as OTHER_PLAN

TRIALS = (
    Trial(2, "ok", {"forward": 104 * MIB}, samples_per_second=2 / 0.012),
    Trial(32, "ok", {"forward": 165 * MIB}, samples_per_second=32 / 0.040),
    Trial(48, "out_of_memory", {"forward": 90 * MIB}),
)
PLAN = replace(OTHER_PLAN, trials=TRIALS, device="host")


def row(step, peak=100, stage="train", **columns):
    return {"step": step, "stage": stage, "peak_allocated_mib": peak, **columns}


def lines(figure, panel=0):
    """Coordinates of the lines, in the order of the legend."""
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in figure.axes[panel].lines
    }


def test_memory_over_steps_shows_peaks_phases_and_limit():
    rows = [row(0, 100, backward_peak_mib=90, limit_mib=300), row(1, None)]
    rows += [row(2, 120, limit_mib=250), row(3, 130)]
    assert lines(plot_memory_over_steps(rows)) == {
        "backward": ([0], [90]),
        "peak": ([0, 2, 3], [100, 120, 130]),
        # It is that of the last row that has one, over the width of the figure.
        "limit 250.0 MiB": ([0, 1], [250, 250]),
    }


@pytest.mark.parametrize(("limit", "top"), [(150, 160), (10**6, 230)])
def test_the_axis_ends_above_the_limit_but_the_data_can_be_read(limit, top):
    figure = plot_memory_over_steps([row(0, 0), row(1, 100, limit_mib=limit)])
    assert figure.axes[0].get_ylim() == (0, pytest.approx(top, abs=20))


def test_an_evaluation_is_drawn_at_the_training_step_before_it():
    evaluation = [row(0, 60, stage="validate"), row(1, 50, stage="validate")]
    shown = lines(plot_memory_over_steps([row(0), row(1), *evaluation, row(2)]))
    assert shown["peak (validation)"] == ([1, 1], [60, 50])
    shown = lines(plot_memory_over_steps([row(step, 50 + step, "test") for step in range(3)]))
    assert shown == {"peak": ([0, 1, 2], [50, 51, 52])}


def test_all_figures_for_which_there_is_data_without_pyplot():
    settings = dict(matplotlib.rcParams)
    assert list(draw([row(0)], PLAN)) == ["memory_over_steps", "search"]
    assert (dict(matplotlib.rcParams), pyplot.get_fignums()) == (settings, [])
    assert draw([], [row(0, None)], replace(PLAN, trials=()), None) == {}


# Tests of figures in loggers.


class Client:
    """Records its figures: name, figure, and the step or run."""

    def __init__(self):
        self.logged = []


class MlflowClient(Client):
    def log_figure(self, run_id, figure, artifact_file):
        self.logged.append((artifact_file, figure, run_id))


class CometExperiment(Client):
    def log_figure(self, figure_name=None, figure=None, overwrite=False, step=None):
        self.logged.append((figure_name, figure, step))


class LoggerOf(CSVLogger):
    """A logger with a client."""

    def __init__(self, client):
        super().__init__("unused")
        self.client = client

    @property
    def experiment(self):
        return self.client


class LikeMlflow(LoggerOf):
    run_id = "one of many"


class LikeWandb(LoggerOf):
    def log_image(self, key, images, step=None):
        self.client.logged += [(key, image, step) for image in images]


@pytest.mark.parametrize(
    ("logger", "name", "other"),
    [
        (LikeWandb(Client()), "batchmem/search", 7),
        (LikeMlflow(MlflowClient()), "batchmem/search.png", "one of many"),
        (LoggerOf(CometExperiment()), "batchmem/search", 7),
    ],
)
def test_loggers_get_figures(logger, name, other, tmp_path):
    log_figures([CSVLogger(tmp_path), logger], None, PLAN, 7)
    ((logged_name, figure, logged_other),) = logger.client.logged
    assert (logged_name, logged_other, len(figure.axes)) == (name, other, 2)


def test_nothing_is_drawn_for_loggers_without_figures(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    # Lightning 2.5.0 keeps its messages from the root logger, which caplog reads.
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    log_figures([CSVLogger(tmp_path), DummyLogger()], None, PLAN, 0)
    assert caplog.messages == []
    log_figures([LikeWandb(Client())], None, PLAN, 0)
    assert "lightning-batchmem[plot]" in caplog.messages[0]


def test_a_failing_logger_is_a_warning_and_the_next_one_gets_its_figures():
    class Unreachable(CSVLogger):
        @property
        def experiment(self):
            raise ConnectionError("no server")

    logger = LikeWandb(Client())
    message = "could not log figures to Unreachable: ConnectionError: no server"
    with pytest.warns(UserWarning, match=message):
        log_figures([Unreachable("unused"), logger], None, PLAN, 0)
    assert len(logger.client.logged) == 1
