"""Steps that run out of memory, against the same steps with enough memory."""

from __future__ import annotations

import gc
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from csv import DictReader
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection

from lightning_batchmem import BatchFinder, MemoryProfiler, OomGuard
from lightning_batchmem._lightning.guard import guarded_closure
from lightning_batchmem.devices.peaks import LiveStorages
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.profile.summary import Summary
from tests.helpers.contract_cases import Net
from tests.helpers.guarded import FAILS, FITS, SIZES, Failing, fail, loader, trained
from tests.helpers.lawful import MIB, OLD_PLAN, Lawful, law, quiet_trainer
from tests.helpers.outcomes import Recorder, assert_same, left_by, trainer_of

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
    assert_close_to(
        [one["loss"] for one in whole_steps.outputs], [one["loss"] for one in split_steps.outputs]
    )
    assert_close_to(
        [one["errors"] for one in whole_steps.outputs],
        [one["errors"] for one in split_steps.outputs],
    )
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


class WithoutGradients(torch.optim.SGD):
    """Calls the closure without gradients, as the optimizers of some projects do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        super().step()
        return loss


class OwnOptimizer(Failing):
    def configure_optimizers(self) -> Any:
        return WithoutGradients(self.parameters(), lr=0.1)


def test_an_optimizer_that_calls_the_closure_without_gradients() -> None:
    both(OwnOptimizer)


@pytest.mark.parametrize("kind", [OfDict, OfTuple])
def test_two_loaders(kind: type[Failing]) -> None:
    def loaders() -> CombinedLoader:
        one, other = loader(1), loader(2)
        return CombinedLoader([one, other] if kind is OfTuple else {"one": one, "other": other})

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

    def optimizer_step(self, *arguments: Any, **keywords: Any) -> None:
        super().optimizer_step(*arguments, **keywords)
        self.log("of_the_optimizer", 2.0 + self.trainer.global_step, on_epoch=True)


def rows_of(folder: Path) -> list[dict[str, float]]:
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = list(DictReader(file))
    return [{key: float(text) for key, text in row.items() if text} for row in rows]


@pytest.mark.parametrize("fails", [FAILS, dict.fromkeys(FAILS, "middle")])
@pytest.mark.parametrize(("first", "epoch"), [(0, 0), (3, 0), (7, 0), (3, 1)])
def test_values_are_logged_once_for_the_whole_batch(
    fails: dict[int, str], first: int, epoch: int, tmp_path: Path
) -> None:
    # Where the first batch of an epoch fails, Lightning resets values.
    sizes = SIZES[first:]
    begin = epoch * len(sizes) - first
    fails = {begin + number: place for number, place in fails.items()}
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


def test_the_values_of_a_step() -> None:
    _, _, whole = trained(Failing, None)
    _, _, split = trained(partial(Failing, FAILS), OomGuard())
    # What a part returns keeps no graph alive.
    assert whole.outputs[3]["errors"].requires_grad
    assert not split.outputs[3]["errors"].requires_grad
    # A tensor without dimensions is averaged, weighted by samples.
    largest = [split.outputs[3]["errors"][begin:end].max() for begin, end in BOUNDS_OF_NINE]
    expected = sum(2 * value for value in largest[:3]) / 9 + 3 * largest[3] / 9
    assert_close_to(split.outputs[3]["largest"], expected)
    assert split.outputs[4]["largest"] == pytest.approx(float(whole.outputs[4]["largest"]))


class Measured(Failing):
    """Reads the live bytes when training_step begins."""

    def __init__(self, live: LiveStorages, fails: Any = None) -> None:
        super().__init__(fails)
        self.live = live
        self.bytes: dict[int, list[int]] = defaultdict(list)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number = self.trainer.fit_loop.total_batch_idx
        self.bytes[number].append(self.live.current().allocated_bytes)
        try:
            return super().training_step(batch, batch_idx)
        except torch.OutOfMemoryError as error:
            # Some tools keep errors for a report.
            self.error = error
            raise


class EndBytes(Callback):
    def __init__(self, live: LiveStorages) -> None:
        self.live = live
        self.bytes: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.bytes.append(self.live.current().allocated_bytes)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_that_a_failed_attempt_held_is_alive(accumulate: int) -> None:
    readings = []
    for fails, guard in (({}, None), (FAILS, OomGuard())):
        live = LiveStorages()
        ends = EndBytes(live)
        gc.disable()
        try:
            with live:
                options = {"accumulate_grad_batches": accumulate}
                _, module, _ = trained(partial(Measured, live, fails), guard, ends, **options)
        finally:
            gc.enable()
        readings.append((ends.bytes, module.bytes))
    (whole_ends, whole_starts), (split_ends, split_starts) = readings
    assert split_ends == whole_ends
    for number, place in FAILS.items():
        failed, *parts = split_starts[number]
        assert failed == whole_starts[number][0]
        # The first part begins with the memory of the failed attempt; its tensors are views.
        if place != "backward":
            assert parts[0] == failed


# The bounds of four parts of nine samples.
BOUNDS_OF_NINE = ((0, 2), (2, 4), (4, 6), (6, 9))


class Stubborn(Failing):
    """Fails with any number of samples."""

    def arrive_at(self, place: str) -> None:
        if self.fails.get(self.trainer.fit_loop.total_batch_idx) == place:
            fail()


@pytest.mark.parametrize(
    ("max_parts", "tried"), [(2, [9, 4]), (4, [9, 4, 2]), (16, [9, 4, 2, 1, 1])]
)
def test_a_batch_that_never_fits_is_the_error(max_parts: int, tried: list[int]) -> None:
    module = Stubborn({3: "forward"})
    guard = OomGuard(max_parts=max_parts)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(lambda: module, guard)
    parts = min(max_parts, 9)
    assert raised.value.__notes__ == [
        f"OomGuard: a batch of 9 samples did not fit in {parts} parts either, and is not split"
        " further. Use a smaller batch size."
    ]
    assert module.samples[3:] == tried
    assert guard.oom_splits == 0
    assert "_make_closure" not in vars(module.trainer.fit_loop.epoch_loop.automatic_optimization)


def test_batch_norm_keeps_two_samples_in_each_part() -> None:
    module = Stubborn({3: "forward"}, norm=nn.BatchNorm1d)
    with (
        pytest.warns(UserWarning, match="OomGuard: BatchNorm normalizes each part"),
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        trained(lambda: module, OomGuard())
    assert "did not fit in 4 parts" in raised.value.__notes__[0]


class AddsTwice(LightningModule):
    """Two checkpoints of one layer; reentrant ones each add to its gradient."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()
        self.is_reentrant = is_reentrant

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = checkpoint(self.layer, batch[0].requires_grad_(), use_reentrant=self.is_reentrant)
        if batch_idx == 3 and len(hidden) > FITS:
            hidden.register_hook(lambda _: fail())
        hidden = checkpoint(self.layer, hidden, use_reentrant=self.is_reentrant)
        return hidden.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_gradient_that_may_be_partial_is_the_error() -> None:
    guard = OomGuard()
    trainer = quiet_trainer(guard, max_steps=3, accumulate_grad_batches=2)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.fit(AddsTwice(is_reentrant=True), loader())
    assert "adds to a gradient several times" in raised.value.__notes__[0]
    # The gradients of other checkpoints are added once.
    guard = OomGuard()
    trainer = quiet_trainer(guard, max_steps=3, accumulate_grad_batches=2)
    trainer.fit(AddsTwice(is_reentrant=False), loader())
    assert guard.oom_splits == 1


class ScalesInPlace(Failing):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return x.div_(2), y


class TakesOut(Failing):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0], batch.pop()


@pytest.mark.parametrize("kind", [ScalesInPlace, TakesOut])
def test_a_batch_that_training_step_changed_is_the_error(kind: type[Failing]) -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(partial(kind, FAILS), OomGuard())
    assert "training_step changed the batch before memory ran out" in raised.value.__notes__[0]


class Unequal(Failing):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0]


def test_a_batch_without_a_common_first_dimension_is_the_error() -> None:
    loaders = [loader(1), loader(2, sizes=[1 + size for size in SIZES])]
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(partial(Unequal, FAILS), OomGuard(), loaders=CombinedLoader(loaders))
    assert raised.value.__notes__ == [
        "OomGuard: the batch has no common first dimension along which to split it. Use a smaller"
        " batch size."
    ]


class Broken(Failing):
    """Raises another error in the second part of a batch, or an error in another hook."""

    def arrive_at(self, place: str) -> None:
        super().arrive_at(place)
        if self.samples[-2:] == [4, 5]:
            raise ValueError("of the user")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.fails == {5: "hook"} and self.trainer.fit_loop.total_batch_idx == 5:
            fail()


def test_every_other_error_is_raised() -> None:
    with pytest.raises(ValueError, match="of the user") as other:
        trained(partial(Broken, FAILS), OomGuard())
    assert "after OutOfMemoryError: " in other.value.__notes__[0]
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(partial(Broken, {5: "hook"}), OomGuard())
    assert not hasattr(raised.value, "__notes__")


class WithPartial(Failing):
    def __init__(self) -> None:
        super().__init__()
        self.training_step = partial(self.fail_in_step, 1)

    def fail_in_step(self, number: int, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


class Manual(Failing):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        fail()


class WithLbfgs(Failing):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Fetching(Failing):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings(
    "ignore:You are using the `dataloader_iter` step flavor",
    "ignore:Found `dataloader_iter` argument",
)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Manual, "under manual optimization, where training_step itself steps the optimizers"),
        (WithPartial, "for a training_step that is no plain function or method"),
        (WithLbfgs, "with LBFGS, which runs each batch several times in one step"),
        (Fetching, "for a training_step that takes dataloader_iter, because it fetches its"),
    ],
)
def test_what_it_cannot_guard_is_a_warning(kind: Any, reason: str) -> None:
    def make() -> Failing:
        module: Failing = kind()
        module.fails = FAILS
        return module

    guard = OomGuard()
    with (
        pytest.warns(UserWarning, match=f"OomGuard does nothing {reason}"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        trained(make, guard)
    assert guard.oom_splits is None


def warnings_of(
    guard: OomGuard, fails: dict[int, str], *callbacks: Callback, **options: Any
) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(partial(Failing, fails), guard, *callbacks, **options)
    texts = [str(one.message) for one in caught]
    return [text for text in texts if text.startswith("OomGuard")]


FIRST = (
    "OomGuard: memory ran out in training batch 3, whose 9 samples then ran in 4 parts. A loss over"
    " pairs of samples lacks the pairs between two parts."
)


def test_the_first_batch_in_parts_is_a_warning_and_frequent_ones_are_another() -> None:
    guard = OomGuard()
    once = {"max_steps": 12}
    assert warnings_of(guard, {3: "forward"}, **once) == [FIRST]
    assert guard.oom_splits == 1
    first, second = warnings_of(guard, FAILS)
    assert first == FIRST
    assert second == (
        "OomGuard: 2 training batches ran in parts, which takes longer than a batch size that fits."
        " Lower the batch size, or let BatchFinder compute it."
    )


class Planned(Callback):
    """Has a plan, as a BatchFinder has."""

    def __init__(self) -> None:
        self.plan = Plan.from_json(json.dumps(OLD_PLAN))


def test_the_advice_names_what_the_project_uses() -> None:
    _, second = warnings_of(OomGuard(), FAILS, Planned())
    assert second.endswith("than a batch size that fits. Lower memory_limit of BatchFinder.")


def test_batches_that_are_more_than_100_apart_are_no_reason_to_advise() -> None:
    sizes = [4] * 250
    fails = {20: "forward", 120: "forward", 219: "forward"}
    for number, size in zip(fails, (9, 8, 7), strict=True):
        sizes[number] = size
    for until, count in ((121, 1), (220, 2)):
        options = {"max_steps": until, "loaders": loader(sizes=sizes)}
        assert len(warnings_of(OomGuard(), fails, **options)) == count


def test_later_batches_of_at_least_as_many_bytes_run_in_as_many_parts_at_once() -> None:
    sizes = [4, 7, 8, 6, 7, 16, 4]
    guard = OomGuard()
    make = partial(Failing, {1: "forward", 5: "start"})
    _, module, _ = trained(make, guard, loaders=loader(sizes=sizes), max_steps=7)
    # Six samples were not tried, 16 do not fit in two parts, and four parts of those fit.
    assert module.samples == [4, 7, 3, 4, 4, 4, 6, 3, 4, 8, 4, 4, 4, 4, 4]
    assert guard.oom_splits == 4
    # Another fit begins anew.
    _, module, _ = trained(Failing, guard, loaders=loader(sizes=sizes), max_steps=7)
    assert (module.samples, guard.oom_splits) == (sizes, 0)


def test_the_cache_is_released_once_for_each_error(fake_device: Any, monkeypatch: Any) -> None:
    device = fake_device(budget_bytes=MIB)
    monkeypatch.setattr(guarded_closure, "device_memory_for", lambda _: device)
    guard = OomGuard()
    options = {"loaders": loader(sizes=[4, 7, 7, 4]), "max_steps": 4}
    trained(partial(Failing, {1: "forward"}), guard, **options)
    # The second batch of seven samples runs in parts at once.
    assert (guard.oom_splits, device.num_releases) == (2, 1)


@pytest.mark.parametrize("argument", [{"reduction": "none"}, {"max_parts": 1}, {"max_parts": 2.0}])
def test_invalid_arguments(argument: Any) -> None:
    name = next(iter(argument))
    with pytest.raises(ValueError, match=f"{name} must be .*, got {argument[name]!r}"):
        OomGuard(**argument)


class Bounded(Lawful):
    """Fails above 50 samples, which no line shows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) > 50:
            fail()
        return loss


def test_a_search_sees_the_errors_itself(fit: Any, fake_device: Any) -> None:
    plans = []
    guard = OomGuard()
    for guards in ([], [guard]):
        device = fake_device(budget_bytes=500 * MIB)
        finder = BatchFinder(multiple_of=1, min_steps_per_epoch=None)
        fit(Bounded(device, law), finder, device, *guards)
        assert finder.plan is not None
        plans.append((finder.plan.batch_size, [trial.outcome for trial in finder.plan.trials]))
    assert plans[0] == plans[1]
    assert "out_of_memory" in plans[0][1]
    assert guard.oom_splits == 0


class OfSize(Failing):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.place = "forward" if len(batch[0]) > 16 else None
        loss = self.layers(batch[0]).mean()
        self.arrive_at("forward")
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(loader(sizes=[100]).dataset, batch_size=self.batch_size)


class InEpoch(BatchSizeFinder):
    """Searches in an epoch, as in an example of Lightning's documentation."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.scale_batch_size(trainer, pl_module)


@pytest.mark.parametrize("kind", [BatchSizeFinder, InEpoch])
def test_lightnings_batch_size_finder_sees_the_errors_itself(kind: Any, tmp_path: Path) -> None:
    guard = OomGuard()
    module = OfSize()
    finder = kind(init_val=4, max_trials=5)
    options = {"max_steps": 2, "default_root_dir": tmp_path}
    quiet_trainer(guard, finder, **options).fit(module)
    assert (finder.optimal_batch_size, guard.oom_splits) == (16, 0)


def test_the_profiler_counts_batches_in_parts(tmp_path: Path) -> None:
    profiler = MemoryProfiler()
    options = {"max_steps": 14, "default_root_dir": tmp_path, "logger": CSVLogger(tmp_path)}
    trained(partial(Failing, FAILS), OomGuard(), profiler, **options)
    path = next(tmp_path.rglob("memory_per_batch.csv"))
    with path.open() as file:
        counts = [row["oom_splits"] for row in DictReader(file)]
    assert counts == ["1" if size > FITS else "0" for size in SIZES]
    assert profiler.summary is not None
    assert profiler.summary.oom_splits == 5
    assert Summary.from_json(profiler.summary.to_json()) == profiler.summary


def test_a_batch_in_parts_is_not_the_one_whose_operations_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An earlier test may have compiled a module in this process, where operations are not counted.
    monkeypatch.setattr("lightning_batchmem.profile.flop_step.compiled_frames", lambda: 0)
    flops = []
    fails = dict.fromkeys(range(1, 5), "backward")
    for guards, places in (([], {}), ([OomGuard()], fails)):
        profiler = MemoryProfiler(flops=True, peak_flops=1e12, csv=False)
        sizes = [4, 9, 8, 7, 6, 4, 4]
        options = {"max_steps": 7, "loaders": loader(sizes=sizes)}
        trained(partial(Failing, places), *(guards or [None]), profiler, **options)
        assert profiler.summary is not None
        flops.append(profiler.summary.flops_per_sample)
    assert flops[0] is not None
    assert flops[0] == flops[1]


@pytest.mark.filterwarnings("ignore:OomGuard. BatchNorm")
def test_a_training_without_errors_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    outcomes = []
    for guards in ([], [OomGuard()]):
        folder = tmp_path / str(len(guards))
        recorder = Recorder()
        options = {"max_epochs": 2, "accumulate_grad_batches": 3}
        trainer = trainer_of(folder, recorder, *guards, **options)
        module = Net(8)
        trainer.fit(module)
        outcomes.append(left_by(trainer, module, recorder, folder))
    assert_same(*outcomes, "guarded")
