"""The values of ``self.log`` in a step whose batch runs in parts.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_batchmem._lightning.hooks import replaced
from lightning_batchmem.batches.split import mean


class _Call(NamedTuple):
    """A call of ``self.log`` in one part."""

    value: Any
    weight: float
    arguments: dict[str, Any]


def read_values(results: Any) -> dict[str, Tensor]:
    """Read what :class:`LoggedValues` compares after an error."""
    return {key: metric.value for key, metric in results.items() if metric.is_tensor}


class LoggedValues:
    """Collects the values that the parts log, and logs each of them once for the whole batch.

    A value that the failed attempt has logged belongs to the whole batch, and stays: under
    ``sync_dist`` the ranks have exchanged it already.

    Args:
        results: Lightning's ``_ResultCollection`` of the training.
        before: its values before the step.
    """

    def __init__(self, results: Any, before: dict[str, Tensor]) -> None:
        self._results = results
        # Every update of a value replaces the tensor.
        self._is_kept = {
            key
            for key, value in read_values(results).items()
            if value is not before.get(key) and not results[key].has_reset
        }
        self._calls: defaultdict[tuple[str, str, int], list[_Call]] = defaultdict(list)

    def begin(self) -> None:
        """Drop what an attempt logged."""
        self._calls.clear()

    @contextmanager
    def collected(self, samples: int) -> Iterator[None]:
        """Collect what a part logs instead of logging it."""
        counts: Counter[tuple[str, str]] = Counter()

        def log(fx: str, name: str, value: Any, **arguments: Any) -> None:
            if isinstance(value, Tensor):
                value = value.detach()
            weight = arguments.get("batch_size") or samples
            self._calls[fx, name, counts[fx, name]].append(_Call(value, weight, arguments))
            counts[fx, name] += 1

        # In the first batch of an epoch, Lightning resets values that were reset at the end of the
        # previous epoch. This would drop those that stay.
        with replaced(self._results, log=log, reset=_nothing):
            yield

    def complete(self) -> None:
        """Log each value once."""
        results = self._results
        for (fx, name, _), calls in self._calls.items():
            if f"{fx}.{name}" in self._is_kept:
                continue
            value, _, arguments = calls[-1]
            weights = [call.weight for call in calls]
            if isinstance(value, Tensor):
                values = [call.value for call in calls]
                value = _combined(values, weights, arguments["reduce_fx"])
            if arguments.get("batch_size") is not None:
                arguments = {**arguments, "batch_size": sum(weights)}
            results.log(fx, name, value, **arguments)


def _nothing(**_: object) -> None:
    pass


def _combined(values: list[Tensor], weights: list[float], reduce_fx: Any) -> Tensor:
    """The value of the whole batch, as Lightning combines the values of batches."""
    name = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__
    combines: dict[str, Callable[..., Tensor]] = {
        "sum": torch.sum,
        "max": torch.amax,
        "min": torch.amin,
    }
    if name.lower() in combines:
        return combines[name.lower()](torch.stack(values), 0)
    return mean(values, weights)
