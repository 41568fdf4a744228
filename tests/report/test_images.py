"""Figures as images in loggers: TensorBoard's are read back, the others are fakes with the real signatures."""

from __future__ import annotations

import inspect
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lightning_batchmem.report.figures
from lightning_batchmem.report.figures import log_figures
from tests.drawn import PLAN, SUMMARY


class FakeLogger(CSVLogger):
    """A logger that records its images: name, pixels, and the step or run."""

    def __init__(self) -> None:
        super().__init__("unused")
        self.images: list[tuple[str, Any, Any]] = []

    @property
    def experiment(self) -> Any:
        return self.Client(self.images)  # type: ignore[attr-defined]


class LikeWandb(FakeLogger):
    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        (image,) = images
        self.images.append((key, image, step))


class LikeMlflow(FakeLogger):
    run_id = "one of many"

    @dataclass
    class Client:
        images: list[Any]

        def log_image(self, run_id: str, image: Any, artifact_file: str | None = None) -> None:
            self.images.append((str(artifact_file), image, run_id))


class LikeComet(FakeLogger):
    @dataclass
    class Client:
        images: list[Any]

        def log_image(self, image_data: Any, name: str | None = None, *, step: int) -> None:
            self.images.append((str(name), image_data, step))


class Unreachable(FakeLogger):
    @property
    def experiment(self) -> Any:
        raise ConnectionError("no server")


def test_tensorboard_images_can_be_read_back(tmp_path: Path) -> None:
    logger, other = TensorBoardLogger(tmp_path), LikeWandb()
    log_figures([logger, other], None, None, SUMMARY, 7)
    logger.finalize("success")
    ((_, pixels, _),) = other.images
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
def test_other_loggers_get_an_image_in_colors(kind: type[FakeLogger], expected: tuple[str, Any]) -> None:
    logger = kind()
    log_figures([logger], None, None, SUMMARY, 7)
    ((name, image, other),) = logger.images
    assert (name, other) == expected
    assert (image.shape, image.dtype) == ((480, 640, 3), numpy.uint8)
    assert len(numpy.unique(image.reshape(-1, 3), axis=0)) > 8  # a bar, not an empty page


def test_wandb_logger_has_the_method_that_is_called() -> None:
    assert list(inspect.signature(WandbLogger.log_image).parameters)[:4] == ["self", "key", "images", "step"]


def test_the_csv_and_the_plan_are_drawn(tmp_path: Path) -> None:
    path, logger = tmp_path / "memory_per_batch.csv", LikeWandb()
    path.write_text("step,stage,peak_allocated_mib\n0,train,100\n1,train,110\n")
    log_figures([logger], path, PLAN, None, 0)
    assert [name for name, _, _ in logger.images] == [
        "batchmem/memory_over_steps",
        "batchmem/memory_vs_batch_size",
        "batchmem/throughput_vs_batch_size",
    ]


def test_nothing_is_drawn_for_loggers_without_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # type: ignore[arg-type]
    without: list[Logger] = [CSVLogger(tmp_path), DummyLogger()]
    log_figures(without, None, PLAN, SUMMARY, 0)
    with pytest.raises(ImportError, match=r"lightning-batchmem\[plot\]"):
        log_figures([LikeWandb()], None, PLAN, SUMMARY, 0)


def test_a_failing_logger_or_figure_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = LikeWandb()
    with pytest.warns(UserWarning, match="could not log figures to Unreachable: ConnectionError: no server"):
        log_figures([Unreachable(), logger], None, None, SUMMARY, 0)
    assert len(logger.images) == 1

    def fail(*_: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(lightning_batchmem.report.figures, "draw", fail)
    with pytest.warns(UserWarning, match="could not log figures to LikeWandb: RuntimeError: no font"):
        log_figures([logger], None, PLAN, SUMMARY, 0)
