"""Train a library's model with both callbacks, and again with the found size in the project."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback

# The libraries raise warnings of their own, which are no errors here.
MARKS = [pytest.mark.filterwarnings("default")]
MISSING = 'the library is not installed; pip install "lightning-batchmem[ecosystem]"'


class Recorder(Callback):
    """Losses and callbacks of the last training.

    They are attributes of the class, because libraries copy callbacks.
    """

    losses: ClassVar[list[float]] = []
    callbacks: ClassVar[list[Any]] = []

    def on_train_start(self, trainer, pl_module):
        Recorder.losses = []
        Recorder.callbacks = trainer.callbacks

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        Recorder.losses.append(float(outputs["loss"]))

    @staticmethod
    def find(kind):
        return next(callback for callback in Recorder.callbacks if isinstance(callback, kind))


def train_twice(train, finder, profiler, **arguments):
    """Return the plan and the profiler's summary; ``train`` takes a batch size and callbacks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = train(4, [profiler(), finder(max_batch_size=16, **arguments), Recorder()])
    ours = []
    for one in caught:
        if "lightning_batchmem" in f"{one.filename} {one.message}":
            ours.append(str(one.message))
    assert not ours, ours
    losses = Recorder.losses
    plan = Recorder.find(finder).plan
    summary = Recorder.find(profiler).summary
    assert (plan.batch_size, plan.limited_by, plan.verified) == (16, "max_batch_size", True)
    expected = train(16, [Recorder()])
    assert losses == Recorder.losses
    assert len(losses) > 1
    torch.testing.assert_close(
        dict(module.state_dict()), dict(expected.state_dict()), rtol=0, atol=0, equal_nan=True
    )
    assert summary.steps == len(losses)
    assert summary.speed.samples_per_s > 0
    return plan, summary
