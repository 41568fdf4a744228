"""Steps that run out of memory, against the same steps with enough memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from csv import DictReader
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection

from lightning_batchmem import BatchFinder, MemoryProfiler, OomGuard
from tests.helpers.guarded import FAILS, FITS, SIZES, Failing, Steps, fail, loader, trained
from tests.helpers.lawful import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:OomGuard. .* ran in .*parts")

# These are the calls of training_step in an epoch, if memory runs out in each batch of FAILS.
PARTS = [4, 3, 4, 9, 4, 5, 2, 2, 2, 3, 4, 4, 3, 8, 4, 4, 7, 3, 4, 6, 3, 3, 4, 5, 2, 3, 4, 4]


def assert_close_to(one: Any, other: Any) -> None:
    """Equality up to the order of sums, in float64."""
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert_close(one, other, rtol=1e-12, atol=1e-15)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_close_to(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_close_to(left, right)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-12)
    else:
        assert one == other


def both(
    make: Callable[..., Failing] = Failing,
    fails: dict[int, str] = FAILS,
    make_loader: Callable[[], Iterable[Any]] = loader,
    guard: OomGuard | None = None,
    **arguments: Any,
) -> tuple[Trainer, Failing, OomGuard]:
    """Train with enough memory, and with errors, and compare what happened."""
    guard = guard or OomGuard()
    _, whole, whole_steps = trained(make, None, loaders=make_loader(), **arguments)
    trainer, split, split_steps = trained(
        partial(make, fails=fails), guard, loaders=make_loader(), **arguments
    )
    assert_close_to(dict(whole.named_parameters()), dict(split.named_parameters()))
    assert_close_to(whole_steps.gradients, split_steps.gradients)
    assert_close_to(whole_steps.rates, split_steps.rates)
    assert_close_to([one["loss"] for one in whole_steps.outputs],
                    [one["loss"] for one in split_steps.outputs])
    assert_close_to([one["errors"] for one in whole_steps.outputs],
                    [one["errors"] for one in split_steps.outputs])
    assert whole.hooks == split.hooks
    assert whole_steps.hooks == split_steps.hooks
    return trainer, split, guard


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_step_in_parts_is_the_whole_step(reduction: Any, accumulate: int) -> None:
    trainer, module, guard = both(
        partial(Failing, reduction=reduction),
        guard=OomGuard(reduction=reduction),
        accumulate_grad_batches=accumulate,
    )
    assert trainer.global_step == 20
    assert module.samples[: len(PARTS)] == PARTS
    # In later epochs no batch runs as a whole if it did not fit.
    assert max(module.samples[len(PARTS) :]) == FITS
    batches = trainer.fit_loop.total_batch_idx + 1
    assert guard.oom_splits == sum(SIZES[n % len(SIZES)] > FITS for n in range(batches))


def test_clipping_and_a_scaler() -> None:
    # Autocast leaves float64 as it is. A plugin has state, so each training gets its own.
    scalers = []
    for fails, guard in (({}, None), (FAILS, OomGuard())):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        _, module, steps = trained(
            partial(Failing, fails),
            guard,
            loaders=loader(),
            plugins=[plugin],
            gradient_clip_val=0.05,
            accumulate_grad_batches=2,
        )
        scalers.append((plugin.scaler.state_dict(), dict(module.named_parameters()), steps.rates))
    assert_close_to(*scalers)


class TwoSchedules(Failing):
    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        step = torch.optim.lr_scheduler.LambdaLR(sgd, lambda number: 1 / (1 + number))
        epoch = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
        schedules = [{"scheduler": step, "interval": "step"}, {"scheduler": epoch}]
        return [sgd], schedules


def test_two_schedulers() -> None:
    both(TwoSchedules)


class OfDict(Failing):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        (x, y), (more_x, more_y) = batch["one"], batch["other"]
        return torch.cat((x, more_x), 1)[:, ::2], y + more_y


class OfTuple(Failing):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        return OfDict.read(self, {"one": batch[0], "other": batch[1]})


@pytest.mark.parametrize("kind", [OfDict, OfTuple])
def test_two_loaders(kind: type[Failing]) -> None:
    def loaders() -> CombinedLoader:
        pair = [loader(1), loader(2)]
        return CombinedLoader(pair if kind is OfTuple else dict(zip(("one", "other"), pair)))

    _, module, _ = both(kind, make_loader=loaders)
    assert module.samples[: len(PARTS)] == PARTS


class Mean(Metric):
    """The mean of all values, in tensors that each update changes in place."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.total += values.sum()
        self.count += len(values)

    def compute(self) -> Tensor:
        return self.total / self.count


class Largest(Metric):
    """The largest of all values, in a list that grows with each update."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Tensor:
        return torch.cat(self.values).max()


class Logging(Failing):
    """Logs values of every kind; ``"middle"`` is a place between two of them."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.mean = Mean()
        self.updated = Mean()
        self.several = MetricCollection({"of_mean": Mean(), "of_values": Largest()})

    def log_values(self, loss: Tensor, errors: Tensor) -> None:
        self.log("step", loss)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.mean(errors)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.arrive_at("middle")
        self.log("also_both", 2 * loss, on_step=True, on_epoch=True)
        self.log("largest", errors.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("smallest", errors.min(), reduce_fx=torch.min, on_step=True, on_epoch=True)
        self.log("total", errors.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("given", loss, on_epoch=True, batch_size=len(errors))
        self.updated.update(errors)
        self.several(errors)
        self.log("updated", self.updated, on_step=False, on_epoch=True)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        for _ in range(2):
            self.log("twice", loss, on_step=True, on_epoch=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        super().on_before_zero_grad(optimizer)
        self.log("of_a_hook", 1.0 + self.trainer.global_step, on_step=True, on_epoch=True)


def rows_of(folder: Path) -> list[dict[str, float]]:
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = [{key: float(text) for key, text in row.items() if text} for row in DictReader(file)]
    return rows


@pytest.mark.parametrize("fails", [FAILS, dict.fromkeys(FAILS, "middle")])
@pytest.mark.parametrize("first", [0, 3])
def test_values_are_logged_once_for_the_whole_batch(
    fails: dict[int, str], first: int, tmp_path: Path
) -> None:
    # Where the first batch of an epoch fails, the values of the epoch before it are reset once.
    fails = {number - first: place for number, place in fails.items()}
    sizes = SIZES[first:]
    rows = []
    for name, made, guard in (("whole", {}, None), ("parts", fails, OomGuard())):
        logger = CSVLogger(tmp_path / name)
        options = {"logger": logger, "log_every_n_steps": 1, "max_steps": 2 * len(sizes)}
        trained(partial(Logging, made), guard, loaders=loader(sizes=sizes), **options)
        rows.append(rows_of(tmp_path / name))
    assert_close_to(*rows)
    assert {"both_step", "both_epoch", "largest_epoch", "mean_step", "of_values"} <= {
        key for row in rows[0] for key in row
    }
