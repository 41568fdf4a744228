"""The data in each figure, read from its lines and bars, and the figures in loggers."""

import sys
from dataclasses import replace

import matplotlib
import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from matplotlib import pyplot

from lightning_batchmem.devices.breakdown import MemoryBreakdown
from lightning_batchmem.plan.records import MIB, Trial
from lightning_batchmem.profile.figures import (
    draw,
    log_figures,
    plot_breakdown,
    plot_memory_over_steps,
)
from lightning_batchmem.profile.summary import Summary
from tests.plan.test_plan import PLAN as OTHER_PLAN

TRIALS = (
    Trial(2, "ok", {"forward": 104 * MIB}, samples_per_second=2 / 0.012),
    Trial(32, "ok", {"forward": 165 * MIB}, samples_per_second=32 / 0.040),
    Trial(48, "out_of_memory", {"forward": 90 * MIB}),
)
PLAN = replace(OTHER_PLAN, trials=TRIALS, device="host")
BREAKDOWN = MemoryBreakdown(100 * MIB, 90 * MIB, 200 * MIB, 50 * MIB, 1500 * MIB, 60 * MIB)
SUMMARY = Summary("host", 9, 2000 * MIB, 3, 64, {}, None, 4096 * MIB, BREAKDOWN, 10.0, 0.1, 0.2)


def row(step, peak=100, stage="train", **columns):
    return {"step": step, "stage": stage, "peak_allocated_mib": peak, **columns}


def lines(figure, panel=0):
    """Coordinates of the lines, in the order of the legend."""
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in figure.axes[panel].lines
    }


def test_memory_over_steps_shows_peaks_phases_and_limit():
    rows = [row(0, 100, backward_peak_mib=90, limit_mib=300), row(1, None), row(2, 110)]
    # The run was resumed from step 2.
    rows += [row(2, 120, limit_mib=250), row(3, 130)]
    assert lines(plot_memory_over_steps(rows)) == {
        "backward": ([0], [90]),
        "peak": ([0, 2, 3], [100, 120, 130]),
        "limit 250.0 MiB": ([0, 2, 3], [300, 250, 250]),
    }


@pytest.mark.parametrize(("limit", "top"), [(150, 160), (10**6, 230)])
def test_the_axis_ends_above_the_limit_but_the_data_can_be_read(limit, top):
    figure = plot_memory_over_steps([row(0, 0), row(1, 100, limit_mib=limit)])
    assert figure.axes[0].get_ylim() == (0, pytest.approx(top, abs=20))


def test_an_evaluation_is_drawn_at_the_training_step_before_it():
    evaluation = [row(0, 60, stage="validate"), row(1, 50, stage="validate")]
    shown = lines(plot_memory_over_steps([row(0), row(1), *evaluation, row(2)]))
    assert shown["peak (validate)"] == ([1], [60])
    shown = lines(plot_memory_over_steps([row(step, 50 + step, "test") for step in range(3)]))
    assert shown == {"peak (test)": ([0, 1, 2], [50, 51, 52])}


def test_the_breakdown_adds_up_to_the_peak():
    figure = plot_breakdown(replace(SUMMARY, peak_reserved_bytes=2600 * MIB))
    bars = [(bar.get_y(), bar.get_height()) for bar in figure.axes[0].patches]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert list(zip(bars, reversed(texts), strict=True)) == [
        ((0, 60), "other\n60.0 MiB (3.0%)"),
        ((60, 100), "parameters and buffers\n100.0 MiB (5.0%)"),
        ((160, 90), "gradients\n90.0 MiB (4.5%)"),
        ((250, 200), "optimizer state\n200.0 MiB (10.0%)"),
        ((450, 50), "batch data\n50.0 MiB (2.5%)"),
        ((500, 1500), "activations and temporaries\n1,500.0 MiB (75.0%)"),
        ((2000, 600), "cached by the allocator, unused\n600.0 MiB"),
    ]


def test_all_figures_for_which_there_is_data_without_pyplot():
    settings = dict(matplotlib.rcParams)
    assert list(draw([row(0)], PLAN, SUMMARY)) == [
        "memory_over_steps",
        "search",
        "memory_composition",
    ]
    assert (dict(matplotlib.rcParams), pyplot.get_fignums()) == (settings, [])
    assert (
        draw([], [row(0, None)], replace(PLAN, trials=()), replace(SUMMARY, breakdown=None)) == {}
    )


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
        (LikeWandb(Client()), "batchmem/memory_composition", 7),
        (LikeMlflow(MlflowClient()), "batchmem/memory_composition.png", "one of many"),
        (LoggerOf(CometExperiment()), "batchmem/memory_composition", 7),
    ],
)
def test_loggers_get_figures(logger, name, other):
    log_figures([CSVLogger("unused"), logger], None, None, SUMMARY, 7)
    ((logged_name, figure, logged_other),) = logger.client.logged
    assert (logged_name, logged_other, len(figure.axes)) == (name, other, 1)


def test_nothing_is_drawn_for_loggers_without_figures(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    log_figures([CSVLogger(tmp_path), DummyLogger()], None, PLAN, SUMMARY, 0)
    assert caplog.messages == []
    log_figures([LikeWandb(Client())], None, PLAN, SUMMARY, 0)
    assert "lightning-batchmem[plot]" in caplog.messages[0]


def test_a_failing_logger_is_a_warning_and_the_next_one_gets_its_figures():
    class Unreachable(CSVLogger):
        @property
        def experiment(self):
            raise ConnectionError("no server")

    logger = LikeWandb(Client())
    message = "could not log figures to Unreachable: ConnectionError: no server"
    with pytest.warns(UserWarning, match=message):
        log_figures([Unreachable("unused"), logger], None, None, SUMMARY, 0)
    assert len(logger.client.logged) == 1
