"""A plan in the loggers of Lightning that show texts and images.

A logger is known by the name of its class, which Lightning and ``pytorch_lightning`` share. The
other ones of lightning 2.6.6 show none (CSVLogger), need an account on lightning.ai (LitLogger), or
only raise an error (NeptuneLogger).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from html import escape
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_batchmem.devices.foreign_values import error_text
from lightning_batchmem.plan.plan import Plan

# Users see these names.
_TEXT = "batch_finder/plan"
_FIGURE = "batch_finder/search"


def log_plan(plan: Plan, loggers: Iterable[Any], step: int) -> None:
    """Send a plan as text, and the figure of its search, to the loggers that show both.

    A logger that raises an error gets a warning.
    """
    for logger in loggers:
        try:
            _send(plan, logger, step)
        # A logger may raise anything, and must not end a training.
        except Exception as error:  # noqa: BLE001
            rank_zero_warn(
                f"{type(logger).__name__} gets no plan of the BatchFinder: {error_text(error)}"
            )


def _send(plan: Plan, logger: Any, step: int) -> None:
    kinds = {kind.__name__ for kind in type(logger).__mro__}
    if "TensorBoardLogger" in kinds:
        logger.experiment.add_text(_TEXT, plan._repr_markdown_(), step)
        for figure in _figures(plan):
            logger.experiment.add_figure(_FIGURE, figure, step)
    elif "WandbLogger" in kinds:
        from wandb import Html

        # Lightning's log_text makes a table, whose font would not keep the columns aligned.
        logger.log_metrics({_TEXT: Html(f"<pre>{escape(str(plan))}</pre>")}, step)
        for figure in _figures(plan):
            logger.log_image(_FIGURE, [figure], step)
    elif "MLFlowLogger" in kinds:
        logger.experiment.log_text(logger.run_id, str(plan), f"{_TEXT}.txt")
        for figure in _figures(plan):
            logger.experiment.log_figure(logger.run_id, figure, f"{_FIGURE}.png")
    elif "CometLogger" in kinds:
        logger.experiment.log_text(str(plan), step, {"name": _TEXT})
        for figure in _figures(plan):
            logger.experiment.log_figure(_FIGURE, figure, step=step)


def _figures(plan: Plan) -> list[Any]:
    """Return the figure; none without matplotlib, or if no size was measured."""
    with suppress(ImportError, ValueError):
        return [plan.plot()]
    return []
