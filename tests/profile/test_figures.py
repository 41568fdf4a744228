"""The data in each figure, read from its lines and bars, and the images in loggers."""

import io
import sys
from dataclasses import replace
from itertools import pairwise

import matplotlib
import numpy
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from matplotlib import pyplot
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lightning_batchmem.profile.figures
from lightning_batchmem.devices.breakdown import MemoryBreakdown
from lightning_batchmem.plan.records import MIB, PHASES, Line, TimeModel, Trial
from lightning_batchmem.profile.figures import (
    draw,
    log_figures,
    plot_breakdown,
    plot_memory_over_steps,
    plot_memory_vs_batch_size,
    plot_throughput_vs_batch_size,
)
from lightning_batchmem.profile.summary import Summary
from tests.plan.test_plan import PLAN as OTHER_PLAN


def trial(size, *phases, seconds=None, reserved=None):
    peaks = dict(zip(PHASES, (count * MIB for count in phases), strict=False))
    return Trial(size, "ok", peaks, peak_held_bytes=reserved, step_seconds=seconds)


TRIALS = (
    trial(2, 104, 103, seconds=0.012),
    trial(4, 108, 107, seconds=0.014),
    trial(32, 165, 160, seconds=0.040),
    Trial(48, "out_of_memory", {"forward": 90 * MIB}),
)
PLAN = replace(OTHER_PLAN, trials=TRIALS, held_peak_bytes=None, device="host")


def row(step, peak=100, *, stage="train", limit=None, **other):
    phases = {"forward_peak_mib": peak, "backward_peak_mib": None if peak is None else peak - 10}
    return {
        "step": step,
        "stage": stage,
        "peak_allocated_mib": peak,
        "limit_mib": limit,
        **phases,
        **other,
    }


BREAKDOWN = MemoryBreakdown(100 * MIB, 90 * MIB, 200 * MIB, 50 * MIB, 1500 * MIB, 60 * MIB)
SUMMARY = Summary("host", 9, 2000 * MIB, 3, 64, {}, None, 4096 * MIB, BREAKDOWN, 10.0, 0.1, 0.2)


def axes_of(figure):
    return figure.axes[0]


def line(figure, label):
    """Coordinates of the one line with this label."""
    (found,) = [line for line in axes_of(figure).lines if line.get_label() == label]
    return [float(x) for x in found.get_xdata()], [float(y) for y in found.get_ydata()]


def labels(figure):
    return [text.get_text() for text in axes_of(figure).figure.legends[0].get_texts()]


def test_memory_vs_batch_size_shows_trials_line_limit_and_chosen_size():
    figure = plot_memory_vs_batch_size(PLAN)
    assert line(figure, "held") == ([2, 4, 32], [104, 108, 165])
    # A size that ran out of memory is drawn at the limit: its 90 MiB are no complete peak.
    assert line(figure, "did not fit") == ([48], [200])
    sizes, predicted = line(figure, "fitted line")
    assert (sizes[0], sizes[-1]) == (0, pytest.approx(1.1 * 48))
    assert predicted == pytest.approx([100 + 2 * size for size in sizes])
    assert line(figure, "limit 200.0 MiB")[1] == [200, 200]
    assert line(figure, "chosen: 32")[0] == [32, 32]
    assert labels(figure) == ["fitted line", "held", "did not fit", "limit 200.0 MiB", "chosen: 32"]


def test_missing_readings_repeated_steps_and_held_memory():
    # The run was resumed from step 2.
    rows = [row(0), row(1, None), row(2), row(3), row(2, 120), row(3)]
    assert line(plot_memory_over_steps(rows), "peak") == ([0, 2, 3], [100, 120, 100])
    trials = (trial(2, 104, reserved=130 * MIB), trial(4, 108))
    figure = plot_memory_vs_batch_size(replace(PLAN, trials=trials))
    assert line(figure, "held")[1] == [130, 108]
    assert line(figure, "live (tensors)")[1] == [104, 108]


def test_throughput_vs_batch_size():
    figure = plot_throughput_vs_batch_size(PLAN)
    sizes, speeds = line(figure, "measured")
    # The size that ran out of memory has no time.
    assert sizes == [2, 4, 32]
    assert speeds == pytest.approx([2 / 0.012, 4 / 0.014, 32 / 0.040])
    sizes, speeds = line(figure, "fitted curve")
    assert speeds == pytest.approx([size / (0.010 + 0.001 * size) for size in sizes])
    assert line(figure, "chosen: 32")[0] == [32, 32]
    time = TimeModel(Line(-0.010, 0.001, 2, 32))
    other = plot_throughput_vs_batch_size(replace(PLAN, ranks=2, time=time))
    assert axes_of(other).get_title(loc="left") == "Throughput of each rank on host"


def test_memory_over_steps_shows_peaks_phases_and_limit():
    steps = list(range(12))
    peaks = [100 + step for step in steps]
    limits = {0: 300, 5: 295, 10: 290}
    figure = plot_memory_over_steps(
        [row(step, peaks[step], limit=limits.get(step), peak_reserved_mib=150) for step in steps]
    )
    assert line(figure, "peak") == line(figure, "forward") == (steps, peaks)
    assert line(figure, "backward")[1] == [90 + step for step in steps]
    assert line(figure, "reserved") == (steps, [150] * 12)
    assert line(figure, "limit 290.0 MiB") == ([0, 5, 10, 11], [300, 295, 290, 290])
    assert labels(figure) == ["reserved", "forward", "backward", "peak", "limit 290.0 MiB"]


def test_an_evaluation_is_drawn_at_the_training_step_before_it():
    figure = plot_memory_over_steps(
        [row(0), row(1), row(0, 60, stage="validate"), row(1, 50, stage="validate"), row(2)]
    )
    assert line(figure, "peak") == ([0, 1, 2], [100, 100, 100])
    assert line(figure, "peak (validate)") == ([1], [60])
    alone = plot_memory_over_steps([row(step, 50 + step, stage="test") for step in range(3)])
    assert line(alone, "peak (test)") == ([0, 1, 2], [50, 51, 52])


def test_the_highest_of_many_steps_is_drawn():
    rows = [row(step, 900 if step == 1234 else 100) for step in range(2500)]
    figure = plot_memory_over_steps(rows)
    steps, peaks = line(figure, "peak")
    assert [after - before for before, after in pairwise(steps)] == [3] * 833
    others = [(step, peak) for step, peak in zip(steps, peaks, strict=True) if peak != 100]
    assert others == [(1233, 900)]
    assert axes_of(figure).get_title(loc="left") == "Peak memory, highest of every 3 steps"


def test_the_breakdown_adds_up_to_the_peak():
    figure = plot_breakdown(replace(SUMMARY, peak_reserved_bytes=2600 * MIB))
    bars = axes_of(figure).patches
    assert [(bar.get_y(), bar.get_height()) for bar in bars] == [
        (0, 60),
        (60, 100),
        (160, 90),
        (250, 200),
        (450, 50),
        (500, 1500),
        (2000, 600),
    ]
    assert labels(figure) == [
        "cached by the allocator, unused\n600.0 MiB",
        "activations and temporaries\n1,500.0 MiB (75.0%)",
        "batch data\n50.0 MiB (2.5%)",
        "optimizer state\n200.0 MiB (10.0%)",
        "gradients\n90.0 MiB (4.5%)",
        "parameters and buffers\n100.0 MiB (5.0%)",
        "other\n60.0 MiB (3.0%)",
    ]


def test_all_figures_for_which_there_is_data():
    assert list(draw([row(0)], replace(PLAN, evaluation=PLAN), SUMMARY)) == [
        "memory_over_steps",
        "memory_vs_batch_size",
        "throughput_vs_batch_size",
        "evaluation_memory_vs_batch_size",
        "evaluation_throughput_vs_batch_size",
        "memory_composition",
    ]
    assert draw(None, replace(PLAN, trials=())) == {}
    assert draw([], [row(0, None)], replace(SUMMARY, breakdown=None)) == {}
    assert list(draw(replace(PLAN, trials=(trial(2, 104),)))) == ["memory_vs_batch_size"]
    one = replace(PLAN, batch_size=2, trials=PLAN.trials[:1], memory=None, time=None)
    assert labels(plot_memory_vs_batch_size(one)) == ["held", "limit 200.0 MiB", "chosen: 2"]


def test_no_figure_is_left_in_pyplot_and_no_setting_changes():
    settings = dict(matplotlib.rcParams)
    figures = pyplot.get_fignums()
    assert len(draw([row(0)], PLAN, SUMMARY)) == 4
    assert (dict(matplotlib.rcParams), pyplot.get_fignums()) == (settings, figures)


# Tests of images in loggers.


class FakeLogger(CSVLogger):
    """A logger that records its images: name, pixels, and the step or run."""

    def __init__(self):
        super().__init__("unused")
        self.images = []

    @property
    def experiment(self):
        return type("Client", (), {"log_image": staticmethod(self._log_image)})()


class LikeWandb(FakeLogger):
    def log_image(self, key, images, step=None):
        (image,) = images
        self.images.append((key, image, step))


class LikeMlflow(FakeLogger):
    run_id = "one of many"

    def _log_image(self, run_id, image, artifact_file=None):
        self.images.append((artifact_file, image, run_id))


class LikeComet(FakeLogger):
    def _log_image(self, image_data, name=None, *, step):
        self.images.append((name, image_data, step))


class Unreachable(FakeLogger):
    @property
    def experiment(self):
        raise ConnectionError("no server")


def test_tensorboard_images_can_be_read_back(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    other = LikeWandb()
    path = tmp_path / "memory_per_batch.csv"
    path.write_text("step,stage,peak_allocated_mib\n0,train,100\n1,train,110\n")
    log_figures([logger, other], path, None, SUMMARY, 7)
    logger.finalize("success")
    (name, _, _), (_, pixels, _) = other.images
    assert name == "batchmem/memory_over_steps"
    (event,) = EventAccumulator(logger.log_dir).Reload().Images("batchmem/memory_composition")
    assert (event.step, event.width, event.height) == (7, 640, 480)
    read = numpy.asarray(Image.open(io.BytesIO(event.encoded_image_string)).convert("RGB"))
    assert numpy.array_equal(read, pixels)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (LikeWandb, ("batchmem/memory_composition", 7)),
        (LikeMlflow, ("batchmem/memory_composition.png", "one of many")),
        (LikeComet, ("batchmem/memory_composition", 7)),
    ],
)
def test_other_loggers_get_an_image_in_colors(kind, expected):
    logger = kind()
    log_figures([logger], None, None, SUMMARY, 7)
    ((name, image, other),) = logger.images
    assert (name, other) == expected
    assert (image.shape, image.dtype) == ((480, 640, 3), numpy.uint8)
    # The image shows a bar: an empty page would have few colors.
    assert len(numpy.unique(image.reshape(-1, 3), axis=0)) > 8


def test_nothing_is_drawn_for_loggers_without_images(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(lightning_batchmem.profile.figures, "rank_zero_info", messages.append)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    log_figures([CSVLogger(tmp_path), DummyLogger()], None, PLAN, SUMMARY, 0)
    assert messages == []
    log_figures([LikeWandb()], None, PLAN, SUMMARY, 0)
    assert "lightning-batchmem[plot]" in messages[0]


def test_a_failing_logger_or_figure_is_a_warning(monkeypatch):
    logger = LikeWandb()
    message = "could not log figures to Unreachable: ConnectionError: no server"
    with pytest.warns(UserWarning, match=message):
        log_figures([Unreachable(), logger], None, None, SUMMARY, 0)
    assert len(logger.images) == 1

    def fail(*_):
        raise RuntimeError("no font")

    monkeypatch.setattr(lightning_batchmem.profile.figures, "draw", fail)
    message = "could not log figures to LikeWandb: RuntimeError: no font"
    with pytest.warns(UserWarning, match=message):
        log_figures([logger], None, PLAN, SUMMARY, 0)
