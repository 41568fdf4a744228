"""Figures as images in the Trainer's loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.report.figures import draw
from lightning_batchmem.report.step_csv import read_rows
from lightning_batchmem.report.summary import Summary

if TYPE_CHECKING:
    import numpy
    from matplotlib.figure import Figure
    from numpy.typing import NDArray


def log_figures(
    loggers: Iterable[Logger], csv_path: Path | None, plan: Plan | None, summary: Summary | None, step: int
) -> None:
    """Draw the figures of a run, and log them as ``batchmem/<name>`` to the loggers that accept images.

    These are the loggers for TensorBoard, W&B, MLflow and Comet. Without one of them nothing is drawn. What cannot be
    drawn or logged is a warning, since it must not end the training.

    Raises:
        ImportError: without matplotlib.
    """
    images: dict[str, Any] | None = None
    for logger in loggers:
        try:
            if (send := _sender(logger)) is None:
                continue
            if images is None:
                rows = None if csv_path is None else read_rows(csv_path)
                images = {name: _pixels(figure) for name, figure in draw(rows, plan, summary).items()}
            for name, pixels in images.items():
                send(f"batchmem/{name}", pixels, step)
        except ImportError:
            raise
        except Exception as error:  # noqa: BLE001 - a logger may raise anything, and training must go on
            name = type(logger).__name__
            rank_zero_warn(f"MemoryProfiler could not log figures to {name}: {type(error).__name__}: {error}")


def _sender(logger: Any) -> Callable[[str, Any, int], object] | None:
    """The function that logs one image, or ``None`` for a logger that accepts none.

    The class decides, since Lightning's dummy loggers (``fast_dev_run``, ranks other than 0) have every method.
    Source: ``WandbLogger.log_image`` of Lightning 2.5.0 and 2.6.6, ``SummaryWriter.add_image`` of torch 2.13,
    ``MlflowClient.log_image`` of MLflow 3.17, ``Experiment.log_image`` of Comet 3.58.
    """
    if hasattr(type(logger), "log_image"):
        return lambda tag, pixels, step: logger.log_image(key=tag, images=[pixels], step=step)
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(type(experiment), "add_image"):
        return lambda tag, pixels, step: experiment.add_image(tag, pixels, step, dataformats="HWC")
    if hasattr(type(experiment), "log_image"):
        if hasattr(type(logger), "run_id"):  # MLflow: one client for all runs
            return lambda tag, pixels, step: experiment.log_image(logger.run_id, pixels, artifact_file=f"{tag}.png")
        return lambda tag, pixels, step: experiment.log_image(pixels, name=tag, step=step)
    return None


def _pixels(figure: Figure) -> NDArray[numpy.uint8]:
    """The figure as height x width x RGB."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())[..., :3].copy()
