"""The Trainer's loggers, of which none can end a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.report.images import image_takers, log_images

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Loggers:
    """Hands metrics and figures to loggers; one that raises gets no more of them, and a warning says so.

    Args:
        loggers: of the Trainer.
    """

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._loggers = list(loggers)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand these metrics to every logger."""
        for logger in list(self._loggers):
            self._try(logger, partial(logger.log_metrics, dict(metrics), step=step))

    def log_figures(self, draw: Callable[[], Mapping[str, Figure]], step: int) -> None:
        """Hand figures to the loggers that take images; they are drawn only when there is one.

        Args:
            draw: makes the figures by name.
            step: to log them at.

        Raises:
            ImportError: when there is such a logger, and no matplotlib.
        """
        takers = image_takers(self._loggers)
        if not takers:
            return
        try:
            figures = draw()
        except ImportError:
            raise
        except Exception as error:  # noqa: BLE001 - the training is done, and a figure is not worth its end
            rank_zero_warn(f"MemoryProfiler gives the loggers no figures: {type(error).__name__}: {error}")
            return
        for logger in takers:
            self._try(logger, partial(log_images, logger, figures, step))

    def _try(self, logger: Logger, hand_over: Callable[[], None]) -> None:
        try:
            hand_over()
        except Exception as error:  # noqa: BLE001 - whatever a logger raises, training is worth more than its metrics
            self._loggers.remove(logger)
            rank_zero_warn(
                f"{type(logger).__name__} gets no more metrics of MemoryProfiler: it raised"
                f" {type(error).__name__}: {error}"
            )
