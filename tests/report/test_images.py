"""The figures of a run as images in loggers: TensorBoard's read back, the others by stand-ins with their signatures."""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_batchmem.report.figures import plot_composition, plot_memory_over_steps
from lightning_batchmem.report.images import figures, image_takers, log_images
from tests.drawn import PLAN, SUMMARY, row


class Recorder(Logger):
    """A logger that notes what it is asked to show."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, Any, Any]] = []
        self.experiment: Any = None

    @property
    def name(self) -> str:
        return "recorder"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


class LikeWandb(Recorder):
    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        assert not kwargs
        (image,) = images
        self.shown.append((key, image, step))


class LikeMlflow(Recorder):
    run_id = "one of many"

    def __init__(self) -> None:
        super().__init__()
        self.experiment = MlflowClient(self.shown)


class MlflowClient:
    def __init__(self, shown: list[tuple[str, Any, Any]]) -> None:
        self.shown = shown

    def log_image(self, run_id: str, image: Any, artifact_file: str | None = None, key: str | None = None) -> None:
        assert key is None
        self.shown.append((str(artifact_file), image, run_id))


class LikeComet(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.experiment = CometExperiment(self.shown)


class CometExperiment:
    def __init__(self, shown: list[tuple[str, Any, Any]]) -> None:
        self.shown = shown

    def log_image(self, image_data: Any, name: str | None = None, overwrite: bool = False, *, step: int) -> None:
        assert not overwrite
        self.shown.append((str(name), image_data, step))


class Broken(Recorder):
    """Its experiment is on a server that is gone."""

    def __init__(self) -> None:
        pass

    @property
    def experiment(self) -> Any:
        raise ConnectionError("no server")


def test_tensorboard_gets_images_that_can_be_read_back(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    assert image_takers([logger]) == [logger]
    drawn = {"memory_composition": plot_composition(SUMMARY), "memory_over_steps": plot_memory_over_steps([row(0)])}
    log_images(logger, drawn, 7)
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir).Reload()
    assert sorted(events.Tags()["images"]) == ["batchmem/memory_composition", "batchmem/memory_over_steps"]
    for name, figure in drawn.items():
        (event,) = events.Images(f"batchmem/{name}")
        assert (event.step, event.width, event.height) == (7, 640, 480)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        read = numpy.asarray(Image.open(io.BytesIO(event.encoded_image_string)).convert("RGB"))
        assert numpy.array_equal(read, numpy.asarray(canvas.buffer_rgba())[..., :3])


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (LikeWandb, ("batchmem/memory_composition", 7)),
        (LikeMlflow, ("batchmem/memory_composition.png", "one of many")),
        (LikeComet, ("batchmem/memory_composition", 7)),
    ],
)
def test_other_loggers_get_an_image_of_colours(kind: type[Recorder], shown: tuple[str, Any]) -> None:
    logger = kind()
    assert image_takers([logger]) == [logger]
    log_images(logger, {"memory_composition": plot_composition(SUMMARY)}, 7)
    ((name, image, other),) = logger.shown
    assert (name, other) == shown
    assert (image.shape, image.dtype) == ((480, 640, 3), numpy.uint8)
    assert len(numpy.unique(image.reshape(-1, 3), axis=0)) > 8  # a pile, not an empty page


def test_lightnings_logger_for_wandb_has_the_method_that_is_called() -> None:
    assert list(inspect.signature(WandbLogger.log_image).parameters)[:4] == ["self", "key", "images", "step"]


def test_loggers_without_images_and_stand_ins_are_left_out(tmp_path: Path) -> None:
    loggers: list[Logger] = [CSVLogger(tmp_path), DummyLogger(), Recorder()]
    assert image_takers(loggers) == []
    for logger in loggers:
        with pytest.raises(ValueError, match=r"^logger must take images, got "):
            log_images(logger, {}, 0)


def test_what_a_logger_raises_is_let_out_where_its_images_are_logged() -> None:
    broken, good = Broken(), LikeWandb()
    assert image_takers([broken, good]) == [broken, good]
    with pytest.raises(ConnectionError, match="no server"):
        log_images(broken, {}, 0)


def test_a_figure_is_rendered_once_for_all_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    times = 0
    draw = FigureCanvasAgg.draw

    def counted(canvas: FigureCanvasAgg) -> None:
        nonlocal times
        times += 1
        draw(canvas)

    monkeypatch.setattr(FigureCanvasAgg, "draw", counted)
    one, other = LikeWandb(), LikeComet()
    drawn = {"memory_composition": plot_composition(SUMMARY)}
    for logger in (one, other):
        log_images(logger, drawn, 0)
    assert times == 1
    assert numpy.array_equal(one.shown[0][1], other.shown[0][1])
    assert not numpy.shares_memory(
        one.shown[0][1], other.shown[0][1]
    )  # what one logger does to its image is nothing to the next
    drawn["memory_composition"].suptitle("another")
    log_images(one, drawn, 1)
    assert times == 2


def test_every_figure_for_which_there_is_something() -> None:
    plan = replace(PLAN, evaluation=PLAN)
    assert list(figures([row(0)], plan, SUMMARY)) == [
        "memory_over_steps",
        "memory_vs_batch_size",
        "throughput_vs_batch_size",
        "evaluation_memory_vs_batch_size",
        "evaluation_throughput_vs_batch_size",
        "memory_composition",
    ]
    assert figures([], None, None) == {}
    untimed = replace(PLAN, trials=tuple(replace(trial, step_seconds=None) for trial in PLAN.trials))
    assert list(figures([row(0, None)], untimed, replace(SUMMARY, breakdown=None))) == ["memory_vs_batch_size"]
