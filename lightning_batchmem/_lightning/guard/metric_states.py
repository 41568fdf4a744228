"""The states of the metrics that a repeated step updates again.

The private names used here are those of torchmetrics 1.6 to 1.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from lightning_batchmem.batches.split import joined

_COUNTERS = ("_update_count", "_computed", "_forward_cache")


class MetricStates:
    """States of metrics, which count each sample once while a batch is repeated in parts.

    A metric that the failed attempt updated has the whole batch, so the updates of the parts are
    undone.

    Args:
        metrics: the metrics.
        counts: the number of updates of each before the step.
    """

    def __init__(self, metrics: Sequence[Metric], counts: Sequence[int]) -> None:
        self._kept: list[tuple[Metric, dict[str, Any], bool]] = []
        for metric, count in zip(metrics, counts, strict=True):
            attributes = metric.metric_state | {name: vars(metric)[name] for name in _COUNTERS}
            self._kept.append((metric, _copied(attributes), metric.update_count != count))
        # These are the values of each part alone, which a metric has for self.log(on_step=True).
        self._values: list[list[Any]] = []
        self._samples: list[int] = []

    def begin(self) -> None:
        """Undo the updates of an attempt."""
        self._values.clear()
        self._samples.clear()
        for metric, attributes, _ in self._kept:
            _restore(metric, attributes)

    def end_part(self, samples: int) -> None:
        """Note the values of a part."""
        self._values.append([metric._forward_cache for metric, *_ in self._kept])
        self._samples.append(samples)

    def complete(self) -> None:
        """Undo the updates of the parts where the failed attempt had the whole batch."""
        of_parts = zip(*self._values, strict=True)
        for (metric, attributes, is_complete), values in zip(self._kept, of_parts, strict=True):
            if is_complete:
                _restore(metric, attributes)
            else:
                metric._forward_cache = joined(values, self._samples)


def _restore(metric: Metric, attributes: dict[str, Any]) -> None:
    for name, value in _copied(attributes).items():
        setattr(metric, name, value)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copies of what updates change in place: tensors, and lists but not the tensors in them."""
    copies = dict(attributes)
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            copies[name] = value.detach().clone()
        elif isinstance(value, list):
            copies[name] = list(value)
    return copies
