from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_batchmem import BatchFinder, MemoryProfiler, Plan
from lightning_batchmem.devices.host import HostMemory
from tests.lawful import MIB, SAMPLES, Lawful, Sizes, law


def test_the_size_is_the_largest_that_fits_and_training_runs_with_it(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=1000 * MIB)
    finder, sizes = BatchFinder(multiple_of=1), Sizes()
    module = Lawful(device_memory, lambda size: 99 * MIB + size * MIB)
    fit(module, finder, device_memory, sizes)
    assert isinstance(finder.plan, Plan)
    assert finder.plan.batch_size == module.batch_size == 900
    assert sizes.seen == {900}
    assert finder.plan.limited_by == "memory"
    assert finder.plan.verified
    assert finder.plan.limit_bytes == 1000 * MIB
    assert finder.plan.measured_peak_bytes == 999 * MIB
    assert finder.plan.predicted_peak_bytes == pytest.approx(999 * MIB, rel=1e-6)
    assert device_memory.num_ooms == 0
    assert len({trial.batch_size for trial in finder.plan.trials}) <= 6
    assert all(trial.step_seconds is not None and trial.step_seconds > 0 for trial in finder.plan.trials)
    assert finder.plan.memory is not None
    assert finder.plan.memory.predict_bytes(500) == pytest.approx(599 * MIB, rel=1e-6)
    assert Plan.from_json(finder.plan.to_json()) == finder.plan


def test_what_the_probes_left_cached_is_given_back_before_training(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder()
    fit(Lawful(device_memory, law), finder, device_memory)
    assert finder.plan is not None
    assert device_memory.num_releases == 2 * len(finder.plan.trials) + 1  # before and after each size, and at the end


def test_sizes_of_64_and_more_are_multiples_of_8(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=1000 * MIB)
    finder = BatchFinder()
    fit(Lawful(device_memory, lambda size: 100 * MIB + size * MIB), finder, device_memory)
    assert finder.plan is not None
    assert finder.plan.batch_size == 896
    assert all(trial.batch_size % 8 == 0 for trial in finder.plan.trials if trial.batch_size >= 64)


@pytest.mark.parametrize(
    ("memory_limit", "expected"), [(600 * MIB, 500), ("600MiB", 500), (0.6, 500), (2000 * MIB, 900), (None, 900)]
)
@pytest.mark.filterwarnings("ignore:memory_limit=.* is more than the device can give")
def test_memory_limit(fit: Any, fake_device: Any, memory_limit: Any, expected: int) -> None:
    device_memory = fake_device(budget_bytes=1000 * MIB)
    finder = BatchFinder(memory_limit=memory_limit, multiple_of=1)
    fit(Lawful(device_memory, lambda size: 99 * MIB + size * MIB), finder, device_memory)
    assert finder.plan is not None
    assert finder.plan.batch_size == expected


def test_a_limit_above_the_budget_is_said(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=100 * MIB)
    with pytest.warns(UserWarning, match="more than the device can give"):
        fit(Lawful(device_memory, lambda size: size * MIB), BatchFinder(memory_limit=200 * MIB), device_memory)


@pytest.mark.parametrize(
    ("finder", "size", "limited_by"),
    [
        (BatchFinder(max_batch_size=40), 40, "max_batch_size"),
        (BatchFinder(multiple_of=7, max_batch_size=50), 49, "max_batch_size"),
        (BatchFinder(multiple_of=1), SAMPLES, "dataset"),
    ],
)
def test_what_bounds_the_size(fit: Any, fake_device: Any, finder: BatchFinder, size: int, limited_by: str) -> None:
    device_memory = fake_device(budget_bytes=10**6 * MIB)
    fit(Lawful(device_memory, lambda size: 99 * MIB + size * MIB), finder, device_memory)
    assert finder.plan is not None
    assert (finder.plan.batch_size, finder.plan.limited_by) == (size, limited_by)


def test_reserved_bytes_are_what_the_limit_counts(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=2000 * MIB)
    device_memory.reserved_ratio = 1.25
    finder = BatchFinder(multiple_of=1, memory_limit=1000 * MIB)
    fit(Lawful(device_memory, lambda size: 99 * MIB + size * MIB), finder, device_memory)
    assert finder.plan is not None
    assert finder.plan.batch_size == 700
    assert finder.plan.measured_peak_bytes == 799 * MIB * 1.25


def bent(size: int) -> int:
    """Flat, then so steep that the first look beyond the bend runs out of memory."""
    return 100 * MIB + size * MIB // 10 + max(0, size - 30) * 60 * MIB


def test_a_size_that_ran_out_of_memory_is_stepped_down_from(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=1000 * MIB)
    finder, sizes = BatchFinder(multiple_of=1), Sizes()
    fit(Lawful(device_memory, bent), finder, device_memory, sizes)
    plan = finder.plan
    assert plan is not None
    assert device_memory.num_ooms >= 1  # else this test shows nothing
    assert [trial.outcome for trial in plan.trials].count("out_of_memory") == device_memory.num_ooms
    assert bent(plan.batch_size) <= 1000 * MIB
    assert bent(plan.batch_size * 5 // 4) > 1000 * MIB
    assert any(trial.batch_size == plan.batch_size and trial.outcome == "ok" for trial in plan.trials)
    assert sizes.seen == {plan.batch_size}


def test_nothing_fits_is_an_error_that_says_what_the_memory_is_made_of(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=100 * MIB)
    module = Lawful(device_memory, lambda size: 99 * MIB + size * MIB)
    with pytest.raises(RuntimeError) as error:
        fit(module, BatchFinder(), device_memory)
    for part in ("nothing fits", "100.0 MiB", "parameters", "optimizer state", "activations", "would help"):
        assert part in str(error.value), part
    assert module.batch_size == 3
    assert module.sizes == []
    assert device_memory.num_ooms >= 1


def test_objective_throughput_ends_at_a_smaller_size(fit: Any, fake_device: Any, monkeypatch: Any) -> None:
    """With ten milliseconds a step and ten microseconds a sample the knee lies far below what fits."""
    clock = iter_clock(monkeypatch, lambda size: 0.01 + 1e-5 * size)
    device_memory = fake_device(budget_bytes=2000 * MIB)
    finder = BatchFinder(objective="throughput", multiple_of=1)
    module = Lawful(device_memory, lambda size: clock(size) or 100 * MIB + size * MIB // 4)
    fit(module, finder, device_memory)
    plan = finder.plan
    assert plan is not None
    # B = s * t0 * M / (t0 + c * M * (1 - s)) with M = 5000, t0 = 0.01, c = 1e-5, s = 0.95: 3800
    assert plan.limited_by == "throughput"
    assert plan.batch_size == pytest.approx(3800, rel=0.01)
    assert plan.verified


def iter_clock(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> Callable[[int], None]:
    """Time that passes only when a step says so."""
    now = [0.0]
    monkeypatch.setattr("lightning_batchmem.measure.trial.time.perf_counter", lambda: now[0])

    def advance(size: int) -> None:
        now[0] += seconds(size)

    return advance


class Fails(Lawful):
    """Raises in one phase of the step once the batch has more than two samples."""

    def __init__(self, device_memory: Any, where: str, error: BaseException) -> None:
        super().__init__(device_memory, lambda size: size * MIB)
        self.where = where
        self.error = error

    def _maybe(self, where: str) -> None:
        if where == self.where and self.sizes and self.sizes[-1] > 2:
            raise self.error

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self._maybe("forward")
        return loss

    def on_after_backward(self) -> None:
        self._maybe("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._maybe("optimizer_step")


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer_step"])
def test_a_users_error_keeps_its_traceback_and_the_run_is_restored(fit: Any, fake_device: Any, where: str) -> None:
    device_memory = fake_device(budget_bytes=1000 * MIB)
    module = Fails(device_memory, where, IndexError("mine"))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    random = torch.get_rng_state()
    finder = BatchFinder()
    with pytest.raises(IndexError, match="mine") as error:
        fit(module, finder, device_memory)
    assert any(entry.name == "_maybe" for entry in error.traceback)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert module.batch_size == 3
    assert module.sizes == []
    assert finder.plan is None
    assert all(parameter.grad is None for parameter in module.parameters())


def test_ctrl_c_in_a_probe_restores_too(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=1000 * MIB)
    module = Fails(device_memory, "forward", KeyboardInterrupt())
    weight = module.layer.weight.detach().clone()
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(module, BatchFinder(), device_memory)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it while it shuts down
    assert torch.equal(weight, module.layer.weight)
    assert module.batch_size == 3


def test_a_failed_search_leaves_different_sizes_different(fit: Any, fake_device: Any) -> None:
    device_memory, data = fake_device(budget_bytes=500 * MIB), DataInHparams()
    module = Fails(device_memory, "forward", IndexError("mine"))
    module.batch_size = 7
    with pytest.raises(IndexError, match="mine"):
        fit(module, BatchFinder(), device_memory, datamodule=data)
    assert (module.batch_size, data.hparams.batch_size) == (7, 3)


class FailsInSetup(Lawful):
    def setup(self, stage: str) -> None:
        if not self.sizes:
            self.sizes.append(0)
            raise FileNotFoundError("no such file")


def test_a_fit_that_failed_in_setup_can_be_repeated(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder()
    module = FailsInSetup(device_memory, law)
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[finder], logger=False, enable_checkpointing=False)
    with pytest.raises(FileNotFoundError):
        trainer.fit(module)
    assert "setup_optimizers" not in vars(trainer.strategy)
    fit(module, finder, device_memory)
    assert finder.plan is not None


def test_a_size_that_was_asked_for_too_early_is_said(fit: Any, fake_device: Any) -> None:
    class AsksInSetup(Lawful):
        def setup(self, stage: str) -> None:
            self.steps_expected = self.trainer.estimated_stepping_batches

    device_memory = fake_device(budget_bytes=500 * MIB)
    with pytest.warns(UserWarning, match="the training loader was built before configure_optimizers"):
        fit(AsksInSetup(device_memory, law), BatchFinder(), device_memory, max_steps=-1, max_epochs=1)


def test_the_same_trainer_twice(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder()
    module = Lawful(device_memory, law)
    trainer = fit(module, finder, device_memory, max_steps=-1, max_epochs=1)
    device_memory.budget = 300 * MIB
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert finder.plan is not None
    assert finder.plan.batch_size == module.batch_size == 200


def test_two_finders_are_refused(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `BatchFinder`"):  # Lightning's own
        fit(Lawful(device_memory, law), BatchFinder(), device_memory, BatchFinder())


@pytest.mark.parametrize(
    ("finder", "samples", "message"),
    [
        (
            BatchFinder(min_batch_size=100),
            48,
            r"min_batch_size is 100 and the data set leaves room for no more than 48 samples",
        ),
        (BatchFinder(multiple_of=100), 48, r"no multiple of 100"),
    ],
)
def test_an_empty_range_of_sizes_is_said(
    fit: Any, fake_device: Any, finder: BatchFinder, samples: int, message: str
) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    loader = DataLoader(TensorDataset(torch.zeros(samples, 1)), batch_size=3)
    with pytest.raises(RuntimeError, match=message):
        fit(NoSize(device_memory, law), finder, device_memory, train_dataloaders=loader)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_tiny_data_set(fit: Any, fake_device: Any, samples: int) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder()
    loader = DataLoader(TensorDataset(torch.zeros(samples, 1)), batch_size=1)
    fit(NoSize(device_memory, law), finder, device_memory, train_dataloaders=loader)
    assert finder.plan is not None
    assert (finder.plan.batch_size, finder.plan.limited_by) == (samples, "dataset")
    assert finder.plan.verified == (samples > 1)  # below the smallest probe there is nothing to search


def test_no_training_needs_no_search(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder()
    module = Lawful(device_memory, law)
    fit(module, finder, device_memory, max_epochs=0)
    assert finder.plan is None
    assert module.batch_size == 3


class EndsEpochsEarly(Lawful):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx > self.last_batch else None


def test_an_epoch_that_the_module_ends_is_begun_again(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder()
    module = EndsEpochsEarly(device_memory, law)
    module.last_batch = 1
    fit(module, finder, device_memory)
    assert finder.plan is not None
    assert finder.plan.batch_size == 400


def test_a_module_that_skips_every_batch_is_said(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    module = EndsEpochsEarly(device_memory, law)
    module.last_batch = -1
    with pytest.raises(RuntimeError, match="on_train_batch_start returned -1 for the first batch"):
        fit(module, BatchFinder(), device_memory)


# Where the size lives


class InHparams(Lawful):
    def __init__(self, device_memory: Any, law: Any, size: int = 3) -> None:
        super().__init__(device_memory, law)
        del self.batch_size
        self.save_hyperparameters({"batch_size": size})

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(SAMPLES, 1)), batch_size=self.hparams.batch_size)


class NoSize(Lawful):
    def __init__(self, device_memory: Any, law: Any) -> None:
        super().__init__(device_memory, law)
        del self.batch_size

    train_dataloader = LightningModule.train_dataloader


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.micro_batch = 3

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(SAMPLES, 1)), batch_size=self.micro_batch)


class DataInHparams(LightningDataModule):
    def __init__(self, batch_size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(SAMPLES, 1)), batch_size=self.hparams.batch_size)


def test_in_hparams(fit: Any, fake_device: Any) -> None:
    device_memory, sizes = fake_device(budget_bytes=500 * MIB), Sizes()
    module = InHparams(device_memory, law)
    fit(module, BatchFinder(), device_memory, sizes)
    assert sizes.seen == {400}
    assert module.hparams.batch_size == 400
    assert module.hparams_initial["batch_size"] == 400  # what Lightning logs


def test_in_a_datamodule_under_another_name(fit: Any, fake_device: Any) -> None:
    device_memory, sizes, data = fake_device(budget_bytes=500 * MIB), Sizes(), Data()
    fit(NoSize(device_memory, law), BatchFinder(batch_arg_name="micro_batch"), device_memory, sizes, datamodule=data)
    assert sizes.seen == {400}
    assert data.micro_batch == 400


def test_in_a_datamodules_hparams_and_the_modules_both(fit: Any, fake_device: Any) -> None:
    device_memory, sizes, data = fake_device(budget_bytes=500 * MIB), Sizes(), DataInHparams()
    module = InHparams(device_memory, law)
    fit(module, BatchFinder(), device_memory, sizes, datamodule=data)
    assert sizes.seen == {400}
    assert (data.hparams.batch_size, module.hparams.batch_size) == (400, 400)


def test_in_a_loader_passed_to_fit(fit: Any, fake_device: Any) -> None:
    device_memory, sizes = fake_device(budget_bytes=500 * MIB), Sizes()
    loader = DataLoader(TensorDataset(torch.zeros(SAMPLES, 1)), batch_size=3)
    fit(NoSize(device_memory, law), BatchFinder(), device_memory, sizes, train_dataloaders=loader)
    assert sizes.seen == {400}
    assert loader.batch_size == 400


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        return (torch.zeros(1) for _ in range(SAMPLES))


def test_a_stream_without_length(fit: Any, fake_device: Any) -> None:
    device_memory, sizes = fake_device(budget_bytes=500 * MIB), Sizes()
    loader = DataLoader(Numbers(), batch_size=3, collate_fn=lambda samples: (torch.stack(samples),))
    finder = BatchFinder()
    fit(NoSize(device_memory, law), finder, device_memory, sizes, train_dataloaders=loader)
    assert sizes.seen == {400}


# What cannot work


class Stubborn(Lawful):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(SAMPLES, 1)), batch_size=32)


class TakesIterator(Lawful):
    def training_step(self, dataloader_iter: Any) -> None:
        """Never called."""


def one_loader(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(10, 1)), **arguments)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (Stubborn, {}, r"train_dataloader must use `batch_size`, got a loader of batch size 32"),
        (NoSize, {"datamodule": Data()}, r"batch_arg_name must name an attribute .* got 'batch_size'"),
        (NoSize, {"train_dataloaders": one_loader(batch_size=None)}, r"got batch_size=None"),
        (NoSize, {"train_dataloaders": one_loader(batch_sampler=[[0], [1, 2]])}, r"got the batch sampler list"),
        (
            NoSize,
            {"train_dataloaders": [one_loader(batch_size=2), one_loader(batch_size=4)]},
            r"loaders that are passed must have one batch size, got 2, 4",
        ),
        (
            NoSize,
            {"train_dataloaders": CombinedLoader([one_loader(), one_loader()], "sequential")},
            r'must be combined by "min_size", .* got "sequential"',
        ),
        (NoSize, {"train_dataloaders": {"a": [torch.zeros(2, 1)]}}, r"must be torch DataLoaders .* got Tensor"),
        (TakesIterator, {}, r"training_step must take a batch .* dataloader_iter"),
    ],
)
def test_what_cannot_work_is_said_before_any_step(
    fit: Any, fake_device: Any, make: Any, arguments: dict[str, Any], message: str
) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    module = make(device_memory, law)
    try:
        with pytest.raises(ValueError, match=message):
            fit(module, BatchFinder(), device_memory, **arguments)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert module.sizes == []


def test_a_device_without_a_peak_counter_is_refused(fit: Any, fake_device: Any) -> None:
    module = Lawful(fake_device(budget_bytes=500 * MIB), law)
    with pytest.raises(ValueError, match="must have a peak memory counter"):
        fit(module, BatchFinder(), None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"objective": "speed"}, r'objective must be "memory" or "throughput", got \'speed\''),
        ({"memory_limit": 1.5}, r"memory_limit must be .* got 1.5"),
        ({"max_batch_size": 0}, r"max_batch_size must be .* got 0"),
        ({"min_batch_size": -1}, r"min_batch_size must be .* got -1"),
        ({"min_batch_size": 8, "max_batch_size": 4}, r"max_batch_size must be at least min_batch_size=8, got 4"),
        ({"multiple_of": 2.5}, r"multiple_of must be .* got 2.5"),
        ({"batch_arg_name": "hparams.batch_size"}, r"batch_arg_name must be .* got 'hparams.batch_size'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchFinder(**arguments)


def test_arguments_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        BatchFinder("memory")  # type: ignore[misc]


def test_fast_dev_run_needs_no_search(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder()
    fit(Lawful(device_memory, law), finder, device_memory, fast_dev_run=True)
    assert finder.plan is None


def test_two_fits_in_a_row(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder()
    module = Lawful(device_memory, law)
    fit(module, finder, device_memory)
    device_memory.budget = 300 * MIB
    fit(module, finder, device_memory)
    assert finder.plan is not None
    assert finder.plan.batch_size == module.batch_size == 200


def test_the_table_and_the_plan_are_printed(fit: Any, fake_device: Any, capsys: pytest.CaptureFixture[str]) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder()
    fit(Lawful(device_memory, law), finder, device_memory)
    printed = capsys.readouterr().out
    assert "batch size 400, limited by memory, verified by real steps" in printed
    assert str(finder.plan) in printed
    assert "499.0" in printed  # the peak at the chosen size, in the table


# For real


class Deep(LightningModule):
    """Activations that one can count: four times 1 MiB for each sample are kept for backward.

    From 33 samples on each is larger than 32 MiB, the most that glibc takes from its heap, so that the peak is exact.
    """

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.layer = nn.Linear(16, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        x = self.layer(x).repeat(1, 16384)
        for _ in range(4):
            x = x.tanh()  # keeps its output
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(SAMPLES, 16)), batch_size=self.batch_size)


def test_on_the_host_itself(tmp_path: Path) -> None:
    limit = HostMemory().current().allocated_bytes + 1200 * MIB
    finder, profiler = BatchFinder(memory_limit=limit), MemoryProfiler()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=10,
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
    # 1200 MiB hold at most 300 samples of 4 MiB; temporaries and the host's margin take their share
    assert 80 <= finder.plan.batch_size <= 300
