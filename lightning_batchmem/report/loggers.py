"""The Trainer's loggers, of which none can end a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn


class Loggers:
    """Hands metrics to loggers; one that raises gets no more of them, and a warning says so.

    Args:
        loggers: of the Trainer.
    """

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._loggers = list(loggers)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand these metrics to every logger."""
        for logger in list(self._loggers):
            self._try(logger, partial(logger.log_metrics, dict(metrics), step=step))

    def __iter__(self) -> Iterator[Logger]:
        return iter(list(self._loggers))

    def _try(self, logger: Logger, hand_over: Callable[[], None]) -> None:
        try:
            hand_over()
        except Exception as error:  # noqa: BLE001 - whatever a logger raises, training is worth more than its metrics
            self._loggers.remove(logger)
            rank_zero_warn(
                f"{type(logger).__name__} gets no more metrics of MemoryProfiler: it raised"
                f" {type(error).__name__}: {error}"
            )
