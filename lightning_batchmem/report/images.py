"""The figures of a run by name, and how loggers take them as images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.report.figure import NothingToDrawError
from lightning_batchmem.report.figures import (
    plot_composition,
    plot_memory_over_steps,
    plot_memory_vs_batch_size,
    plot_throughput_vs_batch_size,
)
from lightning_batchmem.report.step_csv import Row, read_rows
from lightning_batchmem.report.summary import Summary

if TYPE_CHECKING:
    import numpy
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

GROUP = "batchmem"
"""What the names of all images begin with, as loggers group by the part before the slash."""


def drawings(
    rows: Sequence[Row] = (), plan: Plan | None = None, summary: Summary | None = None
) -> dict[str, Callable[[], Figure]]:
    """What can be drawn of a run, by name; each raises ``NothingToDrawError`` where there is nothing in it after all.

    Args:
        rows: its steps.
        plan: of its BatchFinder.
        summary: of its MemoryProfiler.

    Returns:
        Name of each figure -> what draws it.
    """
    found: dict[str, Callable[[], Figure]] = {}
    if rows:
        found["memory_over_steps"] = partial(plot_memory_over_steps, rows)
    for prefix, one in (("", plan), ("evaluation_", plan and plan.evaluation)):
        if one is not None:
            found[f"{prefix}memory_vs_batch_size"] = partial(plot_memory_vs_batch_size, one)
            found[f"{prefix}throughput_vs_batch_size"] = partial(plot_throughput_vs_batch_size, one)
    if summary is not None:
        found["memory_composition"] = partial(plot_composition, summary)
    return found


def figures(rows: Sequence[Row], plan: Plan | None, summary: Summary | None) -> dict[str, Figure]:
    """Draw everything of a run for which there is something to draw.

    Args:
        rows: its steps; they may be thinned.
        plan: of its BatchFinder; ``None`` without one.
        summary: of its MemoryProfiler; ``None`` without one.

    Returns:
        The figures by name: ``memory_over_steps``, ``memory_vs_batch_size``, ``throughput_vs_batch_size``,
        ``memory_composition``, and the second and third with ``evaluation_`` before them where validation has a size of
        its own.

    Raises:
        ImportError: without matplotlib, where there is something to draw.
    """
    drawn: dict[str, Figure] = {}
    for name, draw in drawings(rows, plan, summary).items():
        try:
            drawn[name] = draw()
        except NothingToDrawError:  # a run too short for its parts, a plan without a trial: the figure is left out
            continue
    return drawn


def log_figures(
    loggers: Iterable[Logger], csv_path: Path | None, plan: Plan | None, summary: Summary | None, step: int
) -> None:
    """Draw the figures of a run for the loggers that take images; a failure is a warning.

    Raises:
        ImportError: without matplotlib, if a logger takes images.
    """
    takers = image_takers(loggers)
    if not takers:
        return
    try:
        drawn = figures([] if csv_path is None else read_rows(csv_path), plan, summary)
    except ImportError:
        raise
    except Exception as error:  # noqa: BLE001 - the training has ended, and a figure must not raise
        rank_zero_warn(f"MemoryProfiler logs no figures: {type(error).__name__}: {error}")
        return
    for logger in takers:
        try:
            log_images(logger, drawn, step)
        except Exception as error:  # noqa: BLE001 - a logger that fails must not end a training
            rank_zero_warn(
                f"{type(logger).__name__} gets no figures of MemoryProfiler: {type(error).__name__}: {error}"
            )


def image_takers(loggers: Iterable[Logger]) -> list[Logger]:
    """The loggers that take images: a ``log_image`` or an ``experiment`` that has one, or ``add_image``.

    Of those that come with Lightning these are TensorBoard's, WandB's, MLflow's and Comet's. A logger that cannot even
    show its ``experiment`` is among them: :func:`log_images` lets its error out, where the caller meets it.

    Args:
        loggers: of the Trainer, on rank zero.
    """
    takers = []
    for logger in loggers:
        try:
            takes_images = _sender(logger) is not None
        except Exception:  # noqa: BLE001 - it comes again in log_images, for this logger alone
            takes_images = True
        if takes_images:
            takers.append(logger)
    return takers


def log_images(logger: Logger, figures: Mapping[str, Figure], step: int) -> None:
    """Hand figures to a logger, as images of 640 x 480 pixels with the name ``batchmem/<name of the figure>``.

    Args:
        logger: one of :func:`image_takers`; whatever it raises is let out.
        figures: by name. Each is rendered once, however many loggers it is handed to.
        step: to log them at (MLflow keeps none with a file).

    Raises:
        ValueError: when the logger takes no images.
    """
    send = _sender(logger)
    if send is None:
        raise ValueError(f"logger must take images, got {type(logger).__name__}")
    for name, figure in figures.items():
        send(f"{GROUP}/{name}", _pixels(figure), step)


def _sender(logger: Any) -> Callable[[str, Any, int], object] | None:
    """What hands one image to a logger, by the methods that its class has; ``None`` when it takes none.

    The class is asked, as the stand-ins that Lightning hands out (``fast_dev_run``, ranks other than 0) claim to have
    every method. Source of the calls: ``WandbLogger.log_image`` of Lightning 2.5.0 and 2.6.6,
    ``SummaryWriter.add_image`` of torch 2.13, ``MlflowClient.log_image`` of MLflow 3.17, ``log_image`` of Comet 3.58.
    """
    if hasattr(type(logger), "log_image"):
        return lambda tag, pixels, step: logger.log_image(key=tag, images=[pixels], step=step)
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(type(experiment), "add_image"):
        return lambda tag, pixels, step: experiment.add_image(tag, pixels, step, dataformats="HWC")
    if hasattr(type(experiment), "log_image"):
        if hasattr(type(logger), "run_id"):  # MLflow: a client for all runs
            return lambda tag, pixels, step: experiment.log_image(logger.run_id, pixels, artifact_file=f"{tag}.png")
        return lambda tag, pixels, step: experiment.log_image(pixels, name=tag, step=step)
    return None


def _pixels(figure: Figure) -> NDArray[numpy.uint8]:
    """The figure as height x width x RGB; once it is drawn, its canvas keeps the pixels."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = figure.canvas
    if not hasattr(canvas, "buffer_rgba") or figure.stale:
        canvas = FigureCanvasAgg(figure)  # becomes the figure's own
        canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())[..., :3].copy()
