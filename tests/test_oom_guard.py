"""Steps that run out of memory, against the same steps with enough memory."""

from __future__ import annotations

import gc
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_batchmem import BatchFinder, MemoryProfiler, OomGuard
from lightning_batchmem._lightning import guarded_steps
from lightning_batchmem.devices.peaks import LiveStorages
from tests.helpers.contract_cases import Splittable
from tests.helpers.guarded import FAILS, SIZES, STEPS, Failing, fail, loader, trained
from tests.helpers.lawful import MIB, Lawful, law, quiet_trainer
from tests.helpers.outcomes import RecorderWithoutLoss, assert_same, left_by, trainer_of

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
    assert guard.oom_splits == len(fails)
    assert_close_to(dict(whole.named_parameters()), dict(split.named_parameters()))
    assert_close_to(whole_steps.gradients, split_steps.gradients)
    assert_close_to(whole_steps.rates, split_steps.rates)
    assert_close_to(whole_steps.outputs, split_steps.outputs)
    assert whole.hooks == split.hooks
    assert whole_steps.hooks == split_steps.hooks
    return trainer, split, guard


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_step_in_parts_is_the_whole_step(reduction: Any) -> None:
    make = partial(Failing, reduction=reduction)
    trainer, module, guard = both(make, guard=OomGuard(reduction=reduction))
    assert trainer.global_step == STEPS
    assert module.samples == PARTS + list(SIZES[: STEPS - len(SIZES)])
    # The next fit counts anew.
    trained(Failing, guard)
    assert guard.oom_splits == 0


def test_clipping_and_a_scaler() -> None:
    # Autocast leaves float64 as it is. A plugin has state, so each training gets its own.
    scalers = []
    for fails, guard in (({}, None), (FAILS, OomGuard())):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        options = {"plugins": [plugin], "gradient_clip_val": 0.05, "loaders": loader()}
        _, module, steps = trained(partial(Failing, fails), guard, **options)
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


class WithLbfgs(Failing):
    """Runs the closure several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_an_optimizer_that_calls_the_closure_several_times() -> None:
    # The fourth batch has nine samples, so that each call of its closure fails.
    guard = OomGuard()
    _, _, whole = trained(WithLbfgs, None, max_steps=5)
    _, module, split = trained(partial(WithLbfgs, {3: "forward"}), guard, max_steps=5)
    assert module.samples.count(9) == guard.oom_splits == 3
    assert_close_to(whole.gradients, split.gradients)
    assert_close_to(whole.outputs, split.outputs)


class OwnZeroGrad(Failing):
    """Clears gradients to zeros, with which Adam changes a parameter without a gradient, too."""

    def on_train_start(self) -> None:
        self.unused.weight.grad = torch.zeros_like(self.unused.weight)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def test_gradients_are_cleared_by_the_hook_of_the_module() -> None:
    _, module, _ = both(OwnZeroGrad)
    assert module.unused.weight.grad is not None


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


class Logging(Failing):
    """Logs values in the ways in which parts can equal the whole batch."""

    def log_values(self, loss: Tensor, errors: Tensor) -> None:
        mean = errors.mean()
        self.log("step", mean)
        self.log("both", mean, on_step=True, on_epoch=True, reduce_fx=torch.mean)
        self.log("given", 2 * mean, on_epoch=True, batch_size=len(errors))
        self.log_dict({"constant": 3.0, "whole_number": 4}, on_epoch=True)
        for _ in range(2):
            self.log("twice", mean, on_step=True, on_epoch=True)

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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("first", "epoch"), [(0, 0), (3, 0), (7, 0), (3, 1)])
def test_values_are_logged_once_for_the_whole_batch(
    first: int, epoch: int, reduction: Any, tmp_path: Path
) -> None:
    # Where the first batch of an epoch fails, Lightning resets values.
    sizes = SIZES[first:]
    begin = epoch * len(sizes) - first
    fails = {begin + number: place for number, place in FAILS.items()}
    rows = []
    guard = OomGuard(reduction=reduction)
    for name, made, guards in (("whole", {}, None), ("parts", fails, guard)):
        logger = CSVLogger(tmp_path / name)
        options = {"logger": logger, "log_every_n_steps": 1, "max_steps": 2 * len(sizes)}
        trained(partial(Logging, made, reduction), guards, loaders=loader(sizes=sizes), **options)
        rows.append(rows_of(tmp_path / name))
    assert_close_to(*rows)
    assert guard.oom_splits
    assert {"both_step", "both_epoch", "given_step", "of_a_hook_epoch"} <= {
        key for row in rows[0] for key in row
    }


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


def test_nothing_that_a_failed_attempt_held_is_alive() -> None:
    readings = []
    for fails, guard in (({}, None), (FAILS, OomGuard())):
        live = LiveStorages()
        ends = EndBytes(live)
        gc.disable()
        try:
            with live:
                _, module, _ = trained(partial(Measured, live, fails), guard, ends)
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


class Stubborn(Failing):
    """Fails with any number of samples."""

    def arrive_at(self, place: str) -> None:
        if self.fails.get(self.trainer.fit_loop.total_batch_idx) == place:
            fail()


def notes_of(error: BaseException) -> list[str]:
    """The notes of the guard."""
    return getattr(error, "__notes__", [])


def note(reason: str) -> list[str]:
    return [f"OomGuard: the batch cannot run in parts, because {reason}. Use a smaller batch size."]


def test_a_batch_that_never_fits_is_the_error() -> None:
    module = Stubborn({3: "forward"})
    guard = OomGuard()
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(lambda: module, guard)
    assert notes_of(raised.value) == note("one sample does not fit")
    assert module.samples[3:] == [9, 4, 2, 1, 1]
    assert guard.oom_splits == 0
    assert "_make_closure" not in vars(module.trainer.fit_loop.epoch_loop.automatic_optimization)


class ScalesInPlace(Failing):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return x.div_(2), y


class TakesOut(Failing):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0], batch.pop()


class CountsInBuffer(Failing):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.layers[1].register_buffer("seen", torch.tensor(0))

    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.layers[1].seen += 1
        return batch[0], batch[1]


class ReplacesBuffer(CountsInBuffer):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.layers[1].seen = self.layers[1].seen + 1
        return batch[0], batch[1]


class UpdatesMetric(Failing):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.score = Mean()

    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.score.update(batch[1])
        return batch[0], batch[1]


class Returns(Failing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "samples": len(batch[0])}


class LogsMaximum(Failing):
    def log_values(self, loss: Tensor, errors: Tensor) -> None:
        self.log("largest", errors.max(), reduce_fx="max")


class LogsMetric(UpdatesMetric):
    """Logs a metric that the step does not update."""

    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1]

    def log_values(self, loss: Tensor, errors: Tensor) -> None:
        self.log("score", self.score)


class Unequal(Failing):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0]


class HiddenCount(Metric):
    @property
    def update_count(self) -> int:
        raise ConnectionError("hidden")

    def update(self) -> None:
        pass

    def compute(self) -> None:
        pass


class HidesItsState(Failing):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.score = HiddenCount()


class Uncopied:
    """A batch that moves and cannot be copied."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x = x
        self.y = y

    def to(self, *_: Any, **__: Any) -> Uncopied:
        return self

    def __deepcopy__(self, memo: Any) -> Uncopied:
        raise PermissionError("no copy")


class ReadsUncopied(Failing):
    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch.x, batch.y


def test_a_batch_that_cannot_be_copied_is_the_error() -> None:
    batches = [Uncopied(*batch) for batch in loader()]
    loaders = DataLoader(range(len(batches)), batch_size=None, collate_fn=batches.__getitem__)
    module = ReadsUncopied({3: "forward"})
    with (
        pytest.warns(UserWarning, match="A part of a batch cannot be read: PermissionError"),
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        trained(lambda: module, OomGuard(), loaders=loaders)
    assert notes_of(raised.value) == note("it cannot be copied")


def no_mean(name: str) -> str:
    return f"self.log({name!r}) logs a metric, or has another reduce_fx than the mean"


SEEN_IN_A_STEP = [
    (ScalesInPlace, "training_step changes its batch"),
    (TakesOut, "training_step changes its batch"),
    (CountsInBuffer, "training_step changes the state of layers.1"),
    (ReplacesBuffer, "training_step changes the state of layers.1"),
    (UpdatesMetric, "training_step changes the state of score"),
    (Returns, "training_step returns more than its loss"),
    (LogsMaximum, no_mean("largest")),
    (LogsMetric, no_mean("score")),
    (Unequal, "the first dimension of its tensors is not the number of its samples"),
    (HidesItsState, "its state cannot be read"),
]


def loader_for(kind: type[Failing], sizes: Sequence[int]) -> Any:
    if kind is not Unequal:
        return loader(sizes=sizes)
    return CombinedLoader([loader(1, sizes), loader(2, [1 + size for size in sizes])])


class TimeFirst(Failing):
    """The first dimension of its batches is not that of the samples."""

    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return x.T, y.T[:, :1]


def test_a_batch_is_not_split_along_another_dimension() -> None:
    rows = torch.randn(20, 6, dtype=torch.float64)

    def time_first(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        x = torch.stack(samples, 1)
        return x, x

    loaders = DataLoader(rows, batch_size=10, collate_fn=time_first)  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(partial(TimeFirst, {0: "forward"}), OomGuard(), loaders=loaders)
    reason = "the first dimension of its tensors is not the number of its samples"
    assert notes_of(raised.value) == note(reason)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric Mean was called before")
@pytest.mark.filterwarnings("ignore:The state of a step cannot be read")
@pytest.mark.parametrize(("kind", "reason"), SEEN_IN_A_STEP)
def test_a_step_that_parts_could_not_equal_is_a_warning(kind: type[Failing], reason: str) -> None:
    guard = OomGuard()
    module = kind({3: "forward"})
    with (
        pytest.warns(UserWarning, match="OomGuard does nothing") as caught,
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        trained(lambda: module, guard, loaders=loader_for(kind, SIZES))
    assert [str(one.message) for one in caught if "OomGuard" in str(one.message)] == [
        f"OomGuard does nothing, because {reason}; use a batch size that always fits."
    ]
    assert guard.oom_splits is None
    assert module.samples == [4, 3, 4, 9]
    assert notes_of(raised.value) == []


@pytest.mark.filterwarnings("ignore:The state of a step cannot be read")
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize(("kind", "reason"), SEEN_IN_A_STEP)
def test_a_first_step_that_parts_could_not_equal_is_the_error(
    kind: type[Failing], reason: str, place: str
) -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(partial(kind, {0: place}), OomGuard(), loaders=loader_for(kind, [7, 4]))
    assert notes_of(raised.value) == note(reason)


class LogsWithConstant(Failing):
    def log_values(self, loss: Tensor, errors: Tensor) -> None:
        self.log("value", loss, on_epoch=True, batch_size=9)


class LogsInSomeParts(Failing):
    def log_values(self, loss: Tensor, errors: Tensor) -> None:
        if self.samples[-1] != 3:
            self.log("value", loss)


class Skips(Failing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.samples[-2:] == [9, 4] else loss


class WithItsSize(Failing):
    """Divides by the number of samples that the batch has."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, len(batch[0])]

    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, samples = batch
        return x * len(x) / samples, y


class HooksLate(Failing):
    """Adds a hook on a gradient after training has started."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.layers[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (LogsWithConstant, "self.log('value') gets a batch_size that is not its number of samples"),
        (LogsInSomeParts, "its parts log different values"),
        (WithItsSize, "the batch has its number of samples in it, which would be wrong in a part"),
        (Skips, "training_step returns no loss for a part of it"),
        (HooksLate, "layers.0.weight has a hook on its gradient"),
    ],
)
def test_parts_that_do_not_equal_the_whole_are_the_error(make: Any, reason: str) -> None:
    module = make({3: "forward"})
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(lambda: module, OomGuard())
    assert notes_of(raised.value) == note(reason)
    assert module.samples[:4] == [4, 3, 4, 9]


def test_an_error_after_values_were_logged_is_raised() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(partial(Logging, {3: "logged"}), OomGuard())
    assert notes_of(raised.value) == note("training_step had logged values before memory ran out")


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
    with pytest.raises(ValueError, match="of the user") as in_part:
        trained(partial(Broken, FAILS), OomGuard())
    assert notes_of(in_part.value) == [
        "OomGuard: when this error occurred, the batch ran in 2 parts, because memory had run out"
        " in it. If the parts are the cause, use a smaller batch size."
    ]
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(partial(Broken, {5: "hook"}), OomGuard())
    assert not hasattr(raised.value, "__notes__")


class Manual(Failing):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        fail()


class Fetching(Failing):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class OwnBackward(Failing):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class ReadsLoss(Failing):
    def on_before_backward(self, loss: Tensor) -> None:
        pass


class Normalized(Failing):
    def __init__(self) -> None:
        super().__init__(norm=partial(nn.BatchNorm1d, track_running_stats=False))


class HookOnModule(Failing):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].register_full_backward_hook(lambda *_: None)


class HookOnParameter(Failing):
    def __init__(self) -> None:
        super().__init__()
        self.layers[4].bias.register_hook(lambda gradient: gradient.clamp(-1, 1))


class StepsInBackward(Failing):
    def configure_optimizers(self) -> Any:
        bias = self.layers[4].bias
        own = torch.optim.SGD([bias], lr=0.1)
        bias.register_post_accumulate_grad_hook(lambda _: own.step())
        return super().configure_optimizers()


class LossReader(Callback):
    def on_before_backward(self, *_: Any) -> None:
        pass


@pytest.mark.filterwarnings(
    "ignore:You are using the `dataloader_iter` step flavor",
    "ignore:Found `dataloader_iter` argument",
)
@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (Manual, {}, "training_step steps the optimizers itself"),
        (
            Failing,
            {"accumulate_grad_batches": 2},
            "a backward pass that fails has changed the gradients of earlier batches",
        ),
        (Fetching, {}, "training_step fetches its batches from dataloader_iter"),
        (OwnBackward, {}, "OwnBackward has its own backward"),
        (ReadsLoss, {}, "on_before_backward of ReadsLoss gets the loss of the whole batch"),
        (
            Failing,
            {"callback": LossReader()},
            "on_before_backward of LossReader gets the loss of the whole batch",
        ),
        (Normalized, {}, r"BatchNorm \(layers.1\) would normalize each part by itself"),
        (HookOnModule, {}, "layers.3 has a hook on gradients"),
        (HookOnParameter, {}, "layers.4.bias has a hook on its gradient"),
        (StepsInBackward, {}, "layers.4.bias has a hook on its gradient"),
    ],
)
def test_what_it_cannot_guard_is_a_warning(kind: Any, options: Any, reason: str) -> None:
    def make() -> Failing:
        module: Failing = kind()
        module.fails = FAILS
        return module

    guard = OomGuard()
    options = dict(options)
    callbacks = [options.pop("callback")] if "callback" in options else []
    expected = f"OomGuard does nothing, because {reason}; use a batch size that always fits."
    with pytest.warns(UserWarning, match=expected), pytest.raises(torch.OutOfMemoryError) as raised:
        trained(make, guard, *callbacks, **options)
    assert guard.oom_splits is None
    assert notes_of(raised.value) == []


def test_several_ranks_are_a_warning() -> None:
    guard = OomGuard()
    strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
    options = {"strategy": strategy, "use_distributed_sampler": False, "max_steps": 2}
    try:
        texts = warnings_of(guard, {}, **options)
    finally:
        torch.distributed.destroy_process_group()
    assert texts == [
        "OomGuard does nothing, because with DDPStrategy ranks wait for each other in every step;"
        " use a batch size that always fits."
    ]
    assert guard.oom_splits is None


class Frozen(Failing):
    """BatchNorm uses its running statistics, which a step does not change."""

    def __init__(self, fails: Any = None) -> None:
        super().__init__(fails, norm=nn.BatchNorm1d)
        self.layers[1].eval()


class OfScript(Failing):
    def __init__(self, fails: Any = None) -> None:
        super().__init__(fails)
        self.layers[2] = torch.jit.script(nn.Tanh())


class WithPartial(Failing):
    def __init__(self, fails: Any = None) -> None:
        super().__init__(fails)
        self.training_step = partial(self.named_step, "of the user")

    def named_step(self, name: str, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode")
@pytest.mark.parametrize("kind", [Frozen, OfScript, WithPartial])
def test_more_kinds_of_modules(kind: type[Failing]) -> None:
    both(kind)


def warnings_of(
    guard: OomGuard, fails: dict[int, str], *callbacks: Callback, **options: Any
) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(partial(Failing, fails), guard, *callbacks, **options)
    texts = [str(one.message) for one in caught]
    return [text for text in texts if text.startswith("OomGuard")]


def test_the_first_batch_in_parts_is_a_warning() -> None:
    expected = (
        "OomGuard: memory ran out in training batch 3, whose 9 samples then ran in 4 parts. Use a"
        " smaller batch size if this happens often, because parts take longer."
    )
    assert warnings_of(OomGuard(), FAILS) == [expected]


def test_memory_is_released_once_for_each_error(monkeypatch: pytest.MonkeyPatch) -> None:
    releases: list[int] = []
    release = guarded_steps.garbage_collection_cuda
    monkeypatch.setattr(
        guarded_steps, "garbage_collection_cuda", lambda: releases.append(1) or release()
    )
    guard = OomGuard()
    options = {"loaders": loader(sizes=[4, 7, 9, 4]), "max_steps": 4}
    trained(partial(Failing, {1: "forward", 2: "backward"}), guard, **options)
    # Nine samples do not fit in two parts either.
    assert (guard.oom_splits, len(releases)) == (2, 3)


@pytest.mark.parametrize("reduction", ["none", None])
def test_an_invalid_reduction(reduction: Any) -> None:
    with pytest.raises(ValueError, match=f"reduction must be .*, got {reduction!r}"):
        OomGuard(reduction=reduction)


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
        device = fake_device(available_bytes=500 * MIB)
        finder = BatchFinder(multiple_of=1, min_steps_per_epoch=None, objective="memory")
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


def test_a_batch_in_parts_is_not_the_one_whose_operations_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An earlier test may have compiled a module in this process, where operations are not counted.
    monkeypatch.setattr("lightning_batchmem.profile.steady_steps.compiled_frames", lambda: 0)
    flops = []
    fails = dict.fromkeys(range(1, 5), "backward")
    for guards, places in (([], {}), ([OomGuard()], fails)):
        profiler = MemoryProfiler(flops=True, peak_flops=1e12, csv=False)
        sizes = [4, 9, 8, 7, 6, 4, 4]
        options = {"max_steps": 7, "loaders": loader(sizes=sizes)}
        trained(partial(Failing, places), *(guards or [None]), profiler, **options)
        assert profiler.summary is not None
        flops.append(profiler.summary.flops.flops_per_sample)
    assert flops[0] is not None
    assert flops[0] == flops[1]


def test_a_training_without_errors_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    outcomes = []
    for guards in ([], [OomGuard()]):
        folder = tmp_path / str(len(guards))
        recorder = RecorderWithoutLoss()
        trainer = trainer_of(folder, recorder, *guards, max_epochs=2)
        module = Splittable(8)
        trainer.fit(module)
        outcomes.append(left_by(trainer, module, recorder, folder))
        assert all(guard.oom_splits == 0 for guard in guards)
    assert_same(*outcomes, "guarded")
