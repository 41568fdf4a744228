from __future__ import annotations

import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import BatchFinder, MemoryProfiler, Plan
from lightning_batchmem.devices.host import HostMemory
from tests.lawful import MIB, SAMPLES, Evaluated, Lawful, Sizes, found_size, law, loader, quiet_trainer

PROJECT_SIZE = 3
BUDGET = 500 * MIB  # of the fixture `device`
FOUND = found_size(BUDGET, multiple_of=1)

# the search ----------------------------------------------------------------------------------------------------------


def test_the_size_is_the_largest_that_fits_and_training_uses_it(
    search: Any, device: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes, module = Sizes(), Lawful(device, law)
    plan = search(module, sizes, max_steps=3)
    assert isinstance(plan, Plan)
    assert plan.batch_size == module.batch_size == FOUND
    assert sizes.seen == {FOUND}
    assert (plan.limited_by, plan.verified, plan.limit_bytes) == ("memory", True, 475 * MIB)
    assert plan.measured_peak_bytes == law(FOUND)
    assert plan.predicted_peak_bytes == pytest.approx(law(FOUND), rel=1e-6)
    assert len({trial.batch_size for trial in plan.trials}) <= 5
    assert device.num_ooms == 0
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.notes.count("Values computed from `batch_size` in __init__ or setup keep the old size.") == 1
    printed = capsys.readouterr().out
    assert printed == f"{plan.short_text()}\n"
    assert len(printed.splitlines()) <= 6


@pytest.mark.parametrize(
    ("options", "budget_mib", "size", "limited_by"),
    [
        ({"multiple_of": None}, 1000, found_size(1000 * MIB), "memory"),
        ({"memory_limit": "600MiB"}, 1000, found_size(1000 * MIB, memory_limit=600 * MIB, multiple_of=1), "memory"),
        ({"max_batch_size": 40}, 10**6, 40, "max_batch_size"),
        ({"multiple_of": 7, "max_batch_size": 50}, 10**6, 49, "max_batch_size"),
        ({}, 10**6, SAMPLES, "dataset"),
        ({"min_steps_per_epoch": 10}, 1000, SAMPLES // 10, "min_steps_per_epoch"),
    ],
)
def test_limits_of_the_size(
    search: Any, device: Any, options: dict[str, Any], budget_mib: int, size: int, limited_by: str
) -> None:
    device.budget = budget_mib * MIB
    plan = search(Lawful(device, law), options=options)
    assert (plan.batch_size, plan.limited_by) == (size, limited_by)


def test_a_limit_out_of_range(fit: Any, fake_device: Any) -> None:
    device = fake_device(budget_bytes=100 * MIB, base_bytes=60 * MIB)
    with pytest.warns(UserWarning, match="more than the device can provide, 100.0 MiB"):
        fit(Lawful(device, lambda size: size * MIB), BatchFinder(memory_limit=200 * MIB), device)
    message = "memory_limit must be above the 60.0 MiB that the process already holds, got 50.0 MiB"
    with pytest.raises(ValueError, match=message):
        fit(Lawful(device, law), BatchFinder(memory_limit="50MiB"), device)


class Copies(Callback):
    """Takes memory when training begins, as a copy of the weights does."""

    def __init__(self, device: Any, copy_bytes: int) -> None:
        self.device, self.copy_bytes = device, copy_bytes

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.device.use(self.copy_bytes)


@pytest.mark.parametrize(("copy_mib", "name", "warnings"), [(20, "cuda", 1), (2, "cuda", 0), (20, "host", 0)])
def test_more_memory_in_use_than_in_the_search_is_one_warning(
    fit: Any, fake_device: Any, recwarn: pytest.WarningsRecorder, copy_mib: int, name: str, warnings: int
) -> None:
    device = fake_device(budget_bytes=BUDGET, base_bytes=10 * MIB)
    device.name = name
    fit(Lawful(device, law), BatchFinder(max_batch_size=16), device, Copies(device, copy_mib * MIB))
    messages = [str(one.message) for one in recwarn if "Training begins with" in str(one.message)]
    assert len(messages) == warnings
    assert all("with 20.0 MiB more in use than the search did" in text for text in messages)


def test_an_error_when_nothing_fits_lists_the_memory(search: Any, device: Any) -> None:
    device.budget = 100 * MIB
    module = Lawful(device, law)
    with pytest.raises(RuntimeError) as error:
        search(module)
    for part in ("Nothing fits", "95.0 MiB", "parameters", "optimizer state", "activations", "Use a smaller"):
        assert part in str(error.value), part
    assert (module.batch_size, module.sizes) == (PROJECT_SIZE, [])


def test_objective_throughput_ends_at_a_smaller_size(search: Any, device: Any, monkeypatch: Any) -> None:
    now = [0.0]  # time passes only in steps
    monkeypatch.setattr("lightning_batchmem.measure.step_runner.time.perf_counter", lambda: now[0])

    def timed(size: int) -> int:
        now[0] += 0.01 + 1e-5 * size
        return 100 * MIB + size * MIB // 4

    device.budget = 2000 * MIB
    plan = search(Lawful(device, timed), options={"objective": "throughput"})
    assert plan.limited_by == "throughput"
    # B = s * t0 * M / (t0 + c * M * (1 - s)) with M = 5000, t0 = 0.01, c = 1e-5, s = 0.95: 3800
    assert plan.batch_size == pytest.approx(3800, rel=0.01)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_tiny_data_set(search: Any, device: Any, samples: int) -> None:
    plan = search(NoSize(device, law), train_dataloaders=loader(1, samples))
    assert (plan.batch_size, plan.limited_by) == (samples, "dataset")
    assert plan.verified == (samples > 1)  # one sample is below the first size
    assert not any("Values computed from" in note for note in plan.notes)  # no attribute has the size


@pytest.mark.parametrize("arguments", [{"fast_dev_run": True}, {"max_epochs": 0}, {"limit_train_batches": 0}])
def test_no_search_without_training(search: Any, device: Any, arguments: dict[str, Any]) -> None:
    module = Lawful(device, law)
    assert search(module, **arguments) is None
    assert module.batch_size == PROJECT_SIZE


def test_a_fit_after_an_error_in_setup_and_a_second_fit_search(fit: Any, device: Any) -> None:
    class FailsOnce(Lawful):
        def setup(self, stage: str) -> None:
            if not self.sizes:
                self.sizes.append(0)
                raise FileNotFoundError("no such file")

    finder, module = BatchFinder(multiple_of=1), FailsOnce(device, law)
    with pytest.raises(FileNotFoundError):
        fit(module, finder, device, max_steps=-1, max_epochs=1)
    trainer = module.trainer
    assert "setup_optimizers" not in vars(trainer.strategy)  # the hook of the search
    trainer.fit(module)
    assert module.batch_size == FOUND
    device.budget = 300 * MIB
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert finder.plan is not None
    assert finder.plan.batch_size == module.batch_size == found_size(300 * MIB, multiple_of=1)


# errors in a step ----------------------------------------------------------------------------------------------------


class Fails(Lawful):
    """Raises in one phase of a step with more than two samples."""

    def __init__(self, device: Any, phase: str, error: BaseException) -> None:
        super().__init__(device, law)
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


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer_step"])
@pytest.mark.parametrize("error", [IndexError("mine"), KeyboardInterrupt()], ids=repr)
def test_an_error_in_a_step_keeps_its_traceback_and_both_sizes_are_restored(
    fit: Any, device: Any, phase: str, error: BaseException
) -> None:
    finder, data, module = BatchFinder(), InData(), Fails(device, phase, error)
    module.batch_size = 7  # another than that of the datamodule
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((type(error), SystemExit)) as caught:
            fit(module, finder, device, datamodule=data)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it while it shuts down
    assert isinstance(error, KeyboardInterrupt) or any(entry.name == "_fail" for entry in caught.traceback)
    assert (module.batch_size, data.hparams.batch_size) == (7, PROJECT_SIZE)
    assert (module.sizes, finder.plan) == ([], None)
    assert all(parameter.grad is None for parameter in module.parameters())


class Plain(LightningModule):
    """A module that can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size, self.lr = PROJECT_SIZE, 0.1
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size)

    val_dataloader = train_dataloader


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_a_finder_that_ran_can_be_pickled(fit: Any, device: Any, run: str) -> None:
    finder = BatchFinder(max_batch_size=8)
    trainer = fit(Plain(), finder, device)
    if run == "validate":
        trainer.validate(Plain(), verbose=False)
    assert finder.plan is not None
    assert pickle.loads(pickle.dumps(finder)).plan == finder.plan


def test_a_learning_rate_finder_after_the_search_is_no_warning(
    fit: Any, device: Any, recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    finder, tuner = BatchFinder(max_batch_size=8), LearningRateFinder(num_training_steps=4)
    fit(Plain(), finder, device, tuner, default_root_dir=tmp_path)
    assert not [str(one.message) for one in recwarn if "BatchFinder" in str(one.message)]


def test_a_loader_built_before_the_search_is_a_warning(search: Any, device: Any) -> None:
    class Early(Lawful):
        def setup(self, stage: str) -> None:
            self.total_steps = self.trainer.estimated_stepping_batches

    with pytest.warns(UserWarning, match="The training loader was built before configure_optimizers"):
        search(Early(device, law), max_steps=-1, max_epochs=1)


class EndsEpochs(Lawful):
    last_batch = 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx > self.last_batch else None


def test_an_epoch_that_the_module_ends_is_begun_again(search: Any, device: Any) -> None:
    assert search(EndsEpochs(device, law)).batch_size == FOUND


class NeverTrains(EndsEpochs):
    last_batch = -1


def exhausted(*_: Any) -> Any:
    return next(iter(()))


class Exhausts(Lawful):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size, collate_fn=exhausted)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NeverTrains, "on_train_batch_start returned -1 for the first batch"),
        (Exhausts, "the training step raised StopIteration"),
    ],
)
def test_a_step_that_ends_the_epoch_is_an_error(search: Any, device: Any, make: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        search(make(device, law))


class NoSize(Lawful):
    def __init__(self, device_memory: Any, law: Any) -> None:
        super().__init__(device_memory, law)
        del self.batch_size

    train_dataloader = LightningModule.train_dataloader


class InData(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"batch_size": PROJECT_SIZE})

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.hparams.batch_size)


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
        (
            NoSize,
            {"train_dataloaders": CombinedLoader([loader(PROJECT_SIZE)], "sequential")},
            r'"min_size", .* got "sequential"',
        ),
        (TakesIterator, {}, r"training_step must take a batch .* dataloader_iter"),
    ],
)
def test_projects_whose_size_cannot_be_set(
    search: Any, device: Any, make: Any, arguments: dict[str, Any], message: str
) -> None:
    module = make(device, law)
    with pytest.raises(ValueError, match=message):
        search(module, **arguments)
    assert module.sizes == []


def test_a_device_without_a_peak_counter_is_refused(fit: Any, device: Any) -> None:
    with pytest.raises(ValueError, match="the device must have a peak memory counter"):
        fit(Lawful(device, law), BatchFinder(), None)


# the real host -------------------------------------------------------------------------------------------------------


class Deep(LightningModule):
    """Keeps twice 4 MiB of activations per sample.

    From 9 samples on each is larger than 32 MiB, the most that glibc takes from its heap, so that the peak is exact.
    """

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.layer = nn.Linear(16, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.layer(batch[0]).repeat(1, 65536)
        for _ in range(2):
            x = x.tanh()  # keeps its output
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(SAMPLES, 16)), batch_size=self.batch_size)


def test_on_the_host(tmp_path: Path) -> None:
    options = {"max_steps": 3, "default_root_dir": tmp_path}
    quiet_trainer(BatchFinder(max_batch_size=3), **options).fit(Deep())  # loads libraries, which take memory too
    limit = HostMemory().current().allocated_bytes + 400 * MIB
    finder, profiler = BatchFinder(memory_limit=limit), MemoryProfiler()
    quiet_trainer(profiler, finder, **options).fit(Deep())
    assert finder.plan is not None
    assert finder.plan.limited_by == "memory"
    assert finder.plan.measured_peak_bytes <= limit
    assert profiler.summary is not None
    assert profiler.summary.batch_size == finder.plan.batch_size
    assert profiler.summary.peak_bytes <= limit
    assert 11 <= finder.plan.batch_size <= 35  # 16 MiB each; a reserve for what the kernel holds more


def test_pages_of_files_are_not_memory_held_on_the_host(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(256 * MIB))
    mapped = torch.from_file(str(path), size=256 * MIB, dtype=torch.uint8)  # as in a data set on disk

    class Mapped(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            mapped.max()
            return super().training_step(batch, batch_idx)

    finder = BatchFinder(max_batch_size=3)
    quiet_trainer(finder, max_steps=1, default_root_dir=tmp_path).fit(Mapped())
    assert finder.plan is not None
    assert finder.plan.held_peak_bytes is not None
    assert finder.plan.held_peak_bytes < HostMemory().current().allocated_bytes - 64 * MIB


# settings of the trainer that a size may break ------------------------------------------------------------------------


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
    search: Any, device: Any, trainer: dict[str, Any], drop_last: bool, size: int, limited_by: str
) -> None:
    module = Evaluated(device, samples=40, drop_last=drop_last)
    plan = search(module, max_steps=-1, max_epochs=1, limit_train_batches=60, **trainer)
    assert (plan.batch_size, plan.limited_by) == (size, limited_by)
    assert module.evaluated


def test_a_setting_that_no_size_satisfies_is_an_error_before_any_step(search: Any, device: Any) -> None:
    module = Evaluated(device)
    message = "No .* lies between .*: val_check_interval allows no more than 0 samples"
    with pytest.raises(RuntimeError, match=message):
        search(module, limit_train_batches=40, val_check_interval=50)
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


def test_the_first_request_of_a_loader_is_a_multiple(search: Any, device: Any) -> None:
    class Grouped(Lawful):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader(1, batch_sampler=InGroups(self.batch_size))

    plan = search(Grouped(device, law), options={"multiple_of": 4, "max_batch_size": 16})
    assert [trial.batch_size % 4 for trial in plan.trials].count(0) == len(plan.trials) > 1
