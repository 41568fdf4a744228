from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_batchmem import BatchFinder, MemoryProfiler, Plan
from lightning_batchmem.devices.host import HostMemory
from tests.lawful import MIB, SAMPLES, Lawful, Sizes, found_size, law

PROJECT_SIZE = 3
BUDGET = 500 * MIB
FOUND = found_size(BUDGET)


def loader(batch_size: int | None = PROJECT_SIZE, samples: int = SAMPLES, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(samples, 1)), batch_size=batch_size, **arguments)


# the search ----------------------------------------------------------------------------------------------------------


def test_the_size_is_the_largest_that_fits_and_training_uses_it(
    fit: Any, fake_device: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    device_memory, finder, sizes = (
        fake_device(budget_bytes=1000 * MIB),
        BatchFinder(multiple_of=1, min_steps_per_epoch=None),
        Sizes(),
    )
    module = Lawful(device_memory, law)
    fit(module, finder, device_memory, sizes)
    plan = finder.plan
    assert isinstance(plan, Plan)
    size = found_size(1000 * MIB, multiple_of=1)
    assert plan.batch_size == module.batch_size == size
    assert sizes.seen == {size}
    assert (plan.limited_by, plan.verified, plan.limit_bytes) == ("memory", True, 950 * MIB)
    assert plan.measured_peak_bytes == law(size)
    assert plan.predicted_peak_bytes == pytest.approx(law(size), rel=1e-6)
    assert len({trial.batch_size for trial in plan.trials}) <= 5
    assert device_memory.num_ooms == 0
    assert Plan.from_json(plan.to_json()) == plan
    note = "Values computed from `batch_size` in __init__ or setup keep the old size."
    assert plan.notes.count(note) == 1
    printed = capsys.readouterr().out
    assert printed == f"{plan.short_text()}\n"
    assert len(printed.splitlines()) <= 6


@pytest.mark.parametrize(
    ("arguments", "budget_mib", "size", "limited_by"),
    [
        ({"min_steps_per_epoch": None}, 1000, found_size(1000 * MIB), "memory"),
        ({}, 1000, SAMPLES // 10, "min_steps_per_epoch"),
        ({"memory_limit": "600MiB"}, 1000, found_size(1000 * MIB, memory_limit=600 * MIB), "memory"),
        ({"memory_limit": 0.6}, 1000, found_size(1000 * MIB, memory_limit=600 * MIB), "memory"),
        ({"max_batch_size": 40}, 10**6, 40, "max_batch_size"),
        ({"multiple_of": 7, "max_batch_size": 50}, 10**6, 49, "max_batch_size"),
        ({"multiple_of": 1, "min_steps_per_epoch": None}, 10**6, SAMPLES, "dataset"),
        ({"min_steps_per_epoch": 7}, 10**6, SAMPLES // 7, "min_steps_per_epoch"),
    ],
)
def test_limits_of_the_size(
    fit: Any, fake_device: Any, arguments: dict[str, Any], budget_mib: int, size: int, limited_by: str
) -> None:
    device_memory, finder = fake_device(budget_bytes=budget_mib * MIB), BatchFinder(**arguments)
    fit(Lawful(device_memory, law), finder, device_memory)
    assert finder.plan is not None
    assert (finder.plan.batch_size, finder.plan.limited_by) == (size, limited_by)


def test_a_limit_out_of_range(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=100 * MIB, base_bytes=60 * MIB)
    with pytest.warns(UserWarning, match="more than the device can provide, 100.0 MiB"):
        fit(Lawful(device_memory, lambda size: size * MIB), BatchFinder(memory_limit=200 * MIB), device_memory)
    message = "memory_limit must be above the 60.0 MiB that the process already holds, got 50.0 MiB"
    with pytest.raises(ValueError, match=message):
        fit(Lawful(device_memory, law), BatchFinder(memory_limit="50MiB"), device_memory)


class Copies(Callback):
    """Takes memory when training begins, as a copy of the weights does."""

    def __init__(self, device_memory: Any, copy_bytes: int) -> None:
        self.device_memory, self.copy_bytes = device_memory, copy_bytes

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.device_memory.use(self.copy_bytes)


@pytest.mark.parametrize(("copy_mib", "name", "warnings"), [(20, "cuda", 1), (2, "cuda", 0), (20, "host", 0)])
def test_more_memory_in_use_than_in_the_search_is_one_warning(
    fit: Any, fake_device: Any, recwarn: pytest.WarningsRecorder, copy_mib: int, name: str, warnings: int
) -> None:
    device_memory = fake_device(budget_bytes=BUDGET, base_bytes=10 * MIB)
    device_memory.name = name
    fit(
        Lawful(device_memory, law), BatchFinder(max_batch_size=16), device_memory, Copies(device_memory, copy_mib * MIB)
    )
    messages = [str(one.message) for one in recwarn]
    assert sum("Training begins with 20.0 MiB more in use than the search did" in text for text in messages) == warnings
    assert sum("Training begins with" in text for text in messages) == warnings


def test_the_search_steps_down_after_running_out_of_memory(fit: Any, fake_device: Any) -> None:
    def bent(size: int) -> int:
        """Flat, then so steep that the first size beyond the bend runs out of memory."""
        return 100 * MIB + size * MIB // 10 + max(0, size - 30) * 60 * MIB

    device_memory, finder, sizes = fake_device(budget_bytes=1000 * MIB), BatchFinder(multiple_of=1), Sizes()
    fit(Lawful(device_memory, bent), finder, device_memory, sizes)
    plan = finder.plan
    assert plan is not None
    assert device_memory.num_ooms >= 1  # else this test shows nothing
    assert [trial.outcome for trial in plan.trials].count("out_of_memory") == device_memory.num_ooms
    assert plan.batch_size > 8
    assert bent(plan.batch_size) <= 1000 * MIB
    assert sizes.seen == {plan.batch_size}


def test_an_error_when_nothing_fits_lists_the_memory(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=100 * MIB)
    module = Lawful(device_memory, law)
    with pytest.raises(RuntimeError) as error:
        fit(module, BatchFinder(), device_memory)
    for part in ("Nothing fits", "95.0 MiB", "parameters", "optimizer state", "activations", "Use a smaller"):
        assert part in str(error.value), part
    assert (module.batch_size, module.sizes) == (PROJECT_SIZE, [])


def test_objective_throughput_ends_at_a_smaller_size(fit: Any, fake_device: Any, monkeypatch: Any) -> None:
    now = [0.0]  # time passes only in steps
    monkeypatch.setattr("lightning_batchmem.measure.step_runner.time.perf_counter", lambda: now[0])

    def timed(size: int) -> int:
        now[0] += 0.01 + 1e-5 * size
        return 100 * MIB + size * MIB // 4

    device_memory, finder = (
        fake_device(budget_bytes=2000 * MIB),
        BatchFinder(objective="throughput", multiple_of=1, min_steps_per_epoch=None),
    )
    fit(Lawful(device_memory, timed), finder, device_memory)
    assert finder.plan is not None
    assert finder.plan.limited_by == "throughput"
    # B = s * t0 * M / (t0 + c * M * (1 - s)) with M = 5000, t0 = 0.01, c = 1e-5, s = 0.95: 3800
    assert finder.plan.batch_size == pytest.approx(3800, rel=0.01)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_tiny_data_set(fit: Any, fake_device: Any, samples: int) -> None:
    device_memory, finder = fake_device(budget_bytes=BUDGET), BatchFinder(min_steps_per_epoch=None)
    fit(NoSize(device_memory, law), finder, device_memory, train_dataloaders=loader(1, samples))
    assert finder.plan is not None
    assert (finder.plan.batch_size, finder.plan.limited_by) == (samples, "dataset")
    assert finder.plan.verified == (samples > 1)  # one sample is below the first size
    assert not any("Values computed from" in note for note in finder.plan.notes)  # no attribute has the size


@pytest.mark.parametrize("arguments", [{"fast_dev_run": True}, {"max_epochs": 0}, {"limit_train_batches": 0}])
def test_no_search_without_training(fit: Any, fake_device: Any, arguments: dict[str, Any]) -> None:
    device_memory, finder = fake_device(budget_bytes=BUDGET), BatchFinder()
    module = Lawful(device_memory, law)
    fit(module, finder, device_memory, **arguments)
    assert (finder.plan, module.batch_size) == (None, PROJECT_SIZE)


def test_a_second_fit_searches_again(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=BUDGET), BatchFinder()
    module = Lawful(device_memory, law)
    trainer = fit(module, finder, device_memory, max_steps=-1, max_epochs=1)
    device_memory.budget = 300 * MIB
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert finder.plan is not None
    assert finder.plan.batch_size == module.batch_size == found_size(300 * MIB)


# errors in a step ----------------------------------------------------------------------------------------------------


class Fails(Lawful):
    """Raises in one phase of a step with more than two samples."""

    def __init__(self, device_memory: Any, phase: str, error: BaseException) -> None:
        super().__init__(device_memory, lambda size: size * MIB)
        self.phase, self.error = phase, error

    def _fail(self, phase: str) -> None:
        if phase == self.phase and self.sizes and self.sizes[-1] > 2:
            raise self.error

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self._fail("forward")
        return loss

    def on_after_backward(self) -> None:
        self._fail("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._fail("optimizer_step")


@pytest.mark.parametrize(
    ("phase", "error"),
    [
        ("forward", IndexError("mine")),
        ("backward", IndexError("mine")),
        ("optimizer_step", IndexError("mine")),
        ("forward", KeyboardInterrupt()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_error_in_a_step_keeps_its_traceback_and_everything_is_restored(
    fit: Any, fake_device: Any, phase: str, error: BaseException
) -> None:
    device_memory, finder, data = fake_device(budget_bytes=1000 * MIB), BatchFinder(), InData()
    module = Fails(device_memory, phase, error)
    module.batch_size = 7  # another than that of the datamodule
    weights, random = module.layer.weight.detach().clone(), torch.get_rng_state()
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((type(error), SystemExit)) as caught:
            fit(module, finder, device_memory, datamodule=data)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it while it shuts down
    assert isinstance(error, KeyboardInterrupt) or any(entry.name == "_fail" for entry in caught.traceback)
    assert torch.equal(weights, module.layer.weight)
    assert torch.equal(random, torch.get_rng_state())
    assert (module.batch_size, data.hparams.batch_size) == (7, PROJECT_SIZE)
    assert (module.sizes, finder.plan) == ([], None)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_fit_that_failed_in_setup_can_be_repeated(fit: Any, fake_device: Any) -> None:
    class FailsOnce(Lawful):
        def setup(self, stage: str) -> None:
            if not self.sizes:
                self.sizes.append(0)
                raise FileNotFoundError("no such file")

    device_memory, finder = fake_device(budget_bytes=BUDGET), BatchFinder(max_batch_size=8)
    module = FailsOnce(device_memory, law)
    with pytest.raises(FileNotFoundError):
        fit(module, finder, device_memory)
    fit(module, finder, device_memory)
    assert finder.plan is not None


def test_a_loader_built_before_the_search_is_a_warning(fit: Any, fake_device: Any) -> None:
    class Early(Lawful):
        def setup(self, stage: str) -> None:
            self.total_steps = self.trainer.estimated_stepping_batches

    device_memory = fake_device(budget_bytes=BUDGET)
    with pytest.warns(UserWarning, match="The training loader was built before configure_optimizers"):
        fit(Early(device_memory, law), BatchFinder(), device_memory, max_steps=-1, max_epochs=1)


class EndsEpochs(Lawful):
    last_batch = 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx > self.last_batch else None


def test_an_epoch_that_the_module_ends_is_begun_again(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=BUDGET), BatchFinder()
    fit(EndsEpochs(device_memory, law), finder, device_memory)
    assert finder.plan is not None
    assert finder.plan.batch_size == FOUND


class NeverTrains(EndsEpochs):
    last_batch = -1


def exhausted(*_: Any) -> Any:
    return next(iter(()))


class Exhausts(Lawful):
    training_step = exhausted


class ExhaustsCollate(Lawful):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size, collate_fn=exhausted)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NeverTrains, "on_train_batch_start returned -1 for the first batch"),
        (Exhausts, "the training step raised StopIteration"),
        (ExhaustsCollate, "the training step raised StopIteration"),
    ],
)
def test_a_step_that_ends_the_epoch_is_an_error(fit: Any, fake_device: Any, make: Any, message: str) -> None:
    device_memory = fake_device(budget_bytes=BUDGET)
    with pytest.raises(RuntimeError, match=message):
        fit(make(device_memory, law), BatchFinder(), device_memory)


# places of the size --------------------------------------------------------------------------------------------------


class InHparams(Lawful):
    def __init__(self, device_memory: Any, law: Any) -> None:
        super().__init__(device_memory, law)
        del self.batch_size
        self.save_hyperparameters({"batch_size": PROJECT_SIZE})

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.hparams.batch_size)


class NoSize(Lawful):
    def __init__(self, device_memory: Any, law: Any) -> None:
        super().__init__(device_memory, law)
        del self.batch_size

    train_dataloader = LightningModule.train_dataloader


class InData(LightningDataModule):
    """The size in the attribute ``name``, or in the hyperparameters."""

    def __init__(self, name: str | None = None, batch_size: int = PROJECT_SIZE) -> None:
        super().__init__()
        self.save_hyperparameters({"batch_size": batch_size} if name is None else {})
        self.name = name
        if name is not None:
            setattr(self, name, batch_size)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.hparams.batch_size if self.name is None else getattr(self, self.name))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return (torch.zeros(1) for _ in range(SAMPLES))


def stream() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=PROJECT_SIZE, collate_fn=lambda samples: (torch.stack(samples),))


PLACES: dict[str, tuple[Any, Callable[[], dict[str, Any]], dict[str, Any], list[str]]] = {
    "hparams": (InHparams, dict, {}, ["module.hparams.batch_size", "module.hparams_initial.batch_size"]),
    "datamodule, another name": (
        NoSize,
        lambda: {"datamodule": InData("micro_batch")},
        {"batch_arg_name": "micro_batch"},
        ["datamodule.micro_batch"],
    ),
    "both hparams": (
        InHparams,
        lambda: {"datamodule": InData()},
        {},
        ["module.hparams.batch_size", "datamodule.hparams.batch_size"],
    ),
    "passed loader": (NoSize, lambda: {"train_dataloaders": loader()}, {}, ["train_dataloaders.batch_size"]),
    "passed stream": (NoSize, lambda: {"train_dataloaders": stream()}, {}, ["train_dataloaders.batch_size"]),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_size_is_set_in_every_place(fit: Any, fake_device: Any, place: str) -> None:
    make, make_data, arguments, paths = PLACES[place]
    device_memory, sizes, data = fake_device(budget_bytes=BUDGET), Sizes(), make_data()
    module = make(device_memory, law)
    fit(module, BatchFinder(**arguments), device_memory, sizes, **data)
    assert sizes.seen == {FOUND}
    for path in paths:
        value = {"module": module, **data}[path.partition(".")[0]]
        for name in path.split(".")[1:]:
            value = getattr(value, name)
        assert value == FOUND, path


# projects that do not work -------------------------------------------------------------------------------------------


class Capped(Lawful):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(min(self.batch_size, 16))


class Clamped(Lawful):
    """Its attribute keeps at most 16."""

    @property
    def batch_size(self) -> int:
        return self._size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        self._size = min(value, 16)


class TakesIterator(Lawful):
    def training_step(self, dataloader_iter: Any) -> None:
        """Never called."""


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (Capped, {}, r"must follow `batch_size` at every size, got loaders of batch sizes 16 instead of \d+ after"),
        (Clamped, {}, r"`batch_size` must keep the value it is set to, got 16 after .* pass max_batch_size=16"),
        (NoSize, {"datamodule": InData("micro_batch")}, r"batch_arg_name must name an attribute .* got 'batch_size'"),
        (NoSize, {"train_dataloaders": CombinedLoader([loader()], "sequential")}, r'"min_size", .* got "sequential"'),
        (TakesIterator, {}, r"training_step must take a batch .* dataloader_iter"),
    ],
)
def test_projects_whose_size_cannot_be_set(
    fit: Any, fake_device: Any, make: Any, arguments: dict[str, Any], message: str
) -> None:
    device_memory = fake_device(budget_bytes=BUDGET)
    module = make(device_memory, law)
    with pytest.raises(ValueError, match=message):
        fit(module, BatchFinder(), device_memory, **arguments)
    assert module.sizes == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"min_batch_size": 100},
            "between min_batch_size=100 and the largest size: the data set has no more than 48 samples",
        ),
        ({"multiple_of": 100}, "No multiple of 100 lies"),
    ],
)
def test_an_empty_range_of_sizes(fit: Any, fake_device: Any, arguments: dict[str, Any], message: str) -> None:
    device_memory = fake_device(budget_bytes=BUDGET)
    with pytest.raises(RuntimeError, match=message):
        fit(NoSize(device_memory, law), BatchFinder(**arguments), device_memory, train_dataloaders=loader(3, 48))


def test_a_device_without_a_peak_counter_is_refused(fit: Any, fake_device: Any) -> None:
    module = Lawful(fake_device(budget_bytes=BUDGET), law)
    with pytest.raises(ValueError, match="the device must have a peak memory counter"):
        fit(module, BatchFinder(), None)


def test_arguments_are_keyword_only_and_checked() -> None:
    with pytest.raises(TypeError):
        BatchFinder("memory")  # type: ignore[misc]
    with pytest.raises(ValueError, match="max_batch_size must be a whole number of at least 1, got 0"):
        BatchFinder(max_batch_size=0)


def test_a_checkpoint_of_numpy_arguments_loads_with_weights_only(fit: Any, fake_device: Any, tmp_path: Path) -> None:
    device_memory = fake_device(budget_bytes=BUDGET)
    finder = BatchFinder(memory_limit=np.float64(0.9), max_batch_size=np.int64(64), multiple_of=np.int32(8))  # type: ignore[arg-type]
    fit(Lawful(device_memory, law), finder, device_memory).save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["callbacks"]["BatchFinder"]
    assert saved["options"]["max_batch_size"] == saved["plan"]["batch_size"] == 64


# the real host -------------------------------------------------------------------------------------------------------


class Deep(LightningModule):
    """Keeps four times 4 MiB of activations per sample.

    From 9 samples on each is larger than 32 MiB, the most that glibc takes from its heap, so that the peak is exact.
    """

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.layer = nn.Linear(16, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.layer(batch[0]).repeat(1, 65536)
        for _ in range(4):
            x = x.tanh()  # keeps its output
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(SAMPLES, 16)), batch_size=self.batch_size)


def test_on_the_host(tmp_path: Path) -> None:
    limit = HostMemory().current().allocated_bytes + 800 * MIB
    finder, profiler = BatchFinder(memory_limit=limit), MemoryProfiler()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=5,
        callbacks=[profiler, finder],
        logger=False,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Deep())
    assert finder.plan is not None
    assert finder.plan.limited_by == "memory"
    assert finder.plan.measured_peak_bytes <= limit
    assert profiler.summary is not None
    assert profiler.summary.batch_size == finder.plan.batch_size
    assert profiler.summary.peak_bytes <= limit
    # with 400 MiB the libraries that load during the search decided the size; 16 MiB is the least that a sample needs
    assert 14 <= finder.plan.batch_size <= 50


# settings of the trainer that a size may break ------------------------------------------------------------------------


class Validated(Lawful):
    """Validation of 40 samples, whose loader may drop its last batch."""

    def __init__(self, device_memory: Any, *, drop_last: bool = False) -> None:
        super().__init__(device_memory, law)
        self.drop_last, self.batches = drop_last, 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.batches += not self.trainer.sanity_checking

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size, 40, drop_last=self.drop_last)


@pytest.mark.parametrize(
    ("trainer", "drop_last", "size", "limited_by"),
    [
        ({"val_check_interval": 50}, False, 102, "val_check_interval"),
        ({"limit_val_batches": 0.1}, False, 4, "limit_val_batches"),
        ({"overfit_batches": 0.1}, False, 4, "overfit_batches"),
        ({}, True, 40, "validation data"),
    ],
)
def test_settings_that_a_size_may_break_bound_it(
    fit: Any, fake_device: Any, trainer: dict[str, Any], drop_last: bool, size: int, limited_by: str
) -> None:
    device_memory, finder = fake_device(budget_bytes=BUDGET), BatchFinder()
    module = Validated(device_memory, drop_last=drop_last)
    fit(module, finder, device_memory, max_steps=-1, max_epochs=1, limit_train_batches=60, **trainer)
    assert finder.plan is not None
    assert (finder.plan.batch_size, finder.plan.limited_by) == (size, limited_by)
    assert module.batches > 0


def test_a_setting_that_no_size_satisfies_is_an_error_before_any_step(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=BUDGET)
    module = Validated(device_memory)
    message = "No size lies between .*: val_check_interval allows no more than 0 samples"
    with pytest.raises(RuntimeError, match=message):
        fit(module, BatchFinder(), device_memory, limit_train_batches=40, val_check_interval=50)
    assert (module.sizes, module.batch_size) == ([], PROJECT_SIZE)


class InGroups:
    """A batch sampler of groups of four samples."""

    def __init__(self, batch_size: int) -> None:
        assert batch_size % 4 == 0
        self.batch_size = batch_size

    def __iter__(self) -> Any:
        return iter(range(start, start + self.batch_size) for start in range(0, SAMPLES - self.batch_size, 4))

    def __len__(self) -> int:
        return SAMPLES // self.batch_size


def test_the_first_request_of_a_loader_is_a_multiple(fit: Any, fake_device: Any) -> None:
    class Grouped(Lawful):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader(1, batch_sampler=InGroups(self.batch_size))

    device_memory, finder = fake_device(budget_bytes=BUDGET), BatchFinder(multiple_of=4, max_batch_size=16)
    fit(Grouped(device_memory, law), finder, device_memory)
    assert finder.plan is not None
    assert [trial.batch_size % 4 for trial in finder.plan.trials].count(0) == len(finder.plan.trials) > 1
