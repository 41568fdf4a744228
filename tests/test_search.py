"""What bounds the size besides training itself: validation, other stages, metrics that grow, loader workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric

import lightning_batchmem.measure.limits
from lightning_batchmem import BatchFinder
from lightning_batchmem.devices.base import MemoryStats
from lightning_batchmem.measure.limits import WorkerMemory
from tests.lawful import MIB, SAMPLES, Lawful, Sizes, law


def loader(size: int | None, samples: int = SAMPLES, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(samples, 1)), batch_size=size, **arguments)


class Evaluated(Lawful):
    """Each stage of evaluation takes twice as much a sample as training."""

    factor = 2

    def __init__(self, device_memory: Any, batch_size: int = 3) -> None:
        super().__init__(device_memory, law, batch_size)
        self.evaluated: list[int] = []
        self.modes: set[tuple[bool, bool]] = set()

        def use_twice(size: int) -> None:
            device_memory.free()
            device_memory.use(99 * MIB + self.factor * size * MIB)
            device_memory.free()

        self.use_twice = use_twice

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append(len(batch[0]))
        self.modes.add((self.training, torch.is_grad_enabled()))
        self.use_twice(len(batch[0]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.validation_step(batch, batch_idx)
        return torch.zeros(1)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Fixed(Evaluated):
    """Validates at a size of its own, whatever ``batch_size`` is."""

    own = 50

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.own)

    test_dataloader = val_dataloader


class OwnSize(Evaluated):
    def __init__(self, device_memory: Any) -> None:
        super().__init__(device_memory)
        self.eval_batch_size = 7

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.eval_batch_size)


def test_validation_that_follows_the_size_is_a_line_of_its_own(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1)
    module = Evaluated(device_memory)
    fit(module, finder, device_memory, num_sanity_val_steps=0)
    plan = finder.plan
    assert plan is not None
    assert plan.memory is not None
    assert plan.batch_size == 200  # training alone would have 400
    assert plan.memory.phase_at(200) == "evaluation"
    assert plan.memory.lines["evaluation"].slope == pytest.approx(2 * MIB)
    assert plan.memory.lines["forward"].slope == pytest.approx(MIB)
    assert device_memory.num_ooms == 0


def test_a_validation_set_smaller_than_a_batch_is_taken_as_it_is(fit: Any, fake_device: Any) -> None:
    class Small(Evaluated):
        def val_dataloader(self) -> DataLoader[Any]:
            return loader(self.batch_size, samples=50)

    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1)
    fit(Small(device_memory), finder, device_memory)
    assert finder.plan is not None
    assert finder.plan.batch_size > 300  # a validation batch of more than 200 would not fit, and there never is one
    assert finder.plan.trials[-1].phase_peak_bytes["evaluation"] == 199 * MIB


def test_validation_runs_as_validation_and_training_as_training(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    seen: set[tuple[bool, bool]] = set()

    class Watched(Evaluated):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.add((self.training, torch.is_grad_enabled()))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert self.trainer.validating
            assert self.entered
            seen.add((self.training, torch.is_grad_enabled()))
            super().validation_step(batch, batch_idx)

        def on_validation_epoch_start(self) -> None:
            self.entered = True

    module = Watched(device_memory)
    fit(module, BatchFinder(), device_memory, limit_val_batches=1, num_sanity_val_steps=0, max_steps=1)
    assert seen == {(True, True), (False, False)}
    assert module.training


def test_validation_of_a_fixed_size_is_the_same_at_every_size(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1)
    fit(Fixed(device_memory), finder, device_memory, num_sanity_val_steps=0)
    plan = finder.plan
    assert plan is not None
    assert plan.batch_size == 400
    assert {trial.phase_peak_bytes["evaluation"] for trial in plan.trials} == {199 * MIB}


def test_validation_of_a_fixed_size_that_does_not_fit_is_named(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    module = Fixed(device_memory)
    module.own = 202
    with pytest.raises(RuntimeError, match=r"nothing fits: 2 samples, .* ran out of memory \(in validation: "):
        fit(module, BatchFinder(), device_memory)


def test_validation_has_its_own_size_under_a_name_of_its_own(fit: Any, fake_device: Any) -> None:
    device_memory, sizes = fake_device(budget_bytes=500 * MIB), Sizes()
    finder = BatchFinder(multiple_of=1, eval_batch_arg_name="eval_batch_size")
    module = OwnSize(device_memory)
    fit(module, finder, device_memory, sizes, limit_val_batches=1, num_sanity_val_steps=1)
    assert finder.plan is not None
    assert finder.plan.evaluation is not None
    assert (finder.plan.batch_size, finder.plan.evaluation.batch_size) == (400, 200)
    assert (module.batch_size, module.eval_batch_size) == (400, 200)
    assert sizes.seen == {400}
    assert set(module.evaluated) == {200}
    assert "validation: batch size 200" in str(finder.plan)


def test_hooks_before_the_first_batch_may_ask_for_validation(fit: Any, fake_device: Any) -> None:
    class Asks(Fixed):
        def on_train_start(self) -> None:
            self.asked = self.trainer.num_val_batches[0]

    device_memory = fake_device(budget_bytes=500 * MIB)
    module = Asks(device_memory)
    fit(module, BatchFinder(), device_memory, num_sanity_val_steps=0)
    assert module.asked == SAMPLES // 50


def test_validation_data_that_are_no_loader_are_left_alone(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1)
    batches = [(torch.zeros(4, 1),)]
    with pytest.warns(UserWarning, match="validation is no part of the search"):
        fit(Evaluated(device_memory), finder, device_memory, val_dataloaders=batches, num_sanity_val_steps=0)
    assert finder.plan is not None
    assert finder.plan.batch_size == 400


def test_what_a_step_asks_of_its_logger_leads_nowhere(fake_device: Any, monkeypatch: Any, tmp_path: Path) -> None:
    class Talks(Lawful):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) < 400:  # in the search
                self.logger.experiment.config.update({"a": 1})
                self.logger.experiment["b"] = self.logger.experiment.runs[0].name
            return super().training_step(batch, batch_idx)

    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder()
    monkeypatch.setattr("lightning_batchmem.batch_finder.device_memory_for", lambda device: device_memory)
    logger = CSVLogger(tmp_path)
    trainer = Trainer(accelerator="cpu", logger=logger, callbacks=[finder], max_steps=2, enable_progress_bar=False)
    trainer.fit(Talks(device_memory, law))
    assert finder.plan is not None


def test_an_unknown_name_for_validations_size_is_said(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    with pytest.raises(ValueError, match="got 'eval_batch_size', which none of them has"):
        fit(Evaluated(device_memory), BatchFinder(eval_batch_arg_name="eval_batch_size"), device_memory)


def test_validation_loaders_that_cannot_be_probed_are_said(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1)
    unbatched = loader(None)
    with pytest.warns(UserWarning, match=r"validation is no part of the search: .* batch_size=None"):
        fit(
            Evaluated(device_memory),
            finder,
            device_memory,
            val_dataloaders=unbatched,
            limit_val_batches=1,
            num_sanity_val_steps=0,
        )
    assert finder.plan is not None
    assert finder.plan.batch_size == 400


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("passed", [False, True])
def test_other_stages_search_with_forward_passes(stage: str, passed: bool, fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1)
    module = Evaluated(device_memory)
    trainer = fit(
        module, finder, device_memory, max_epochs=0, num_sanity_val_steps=0
    )  # only for a trainer with the fake meter
    weight = module.layer.weight.detach().clone()
    dataloaders = loader(3) if passed else None
    getattr(trainer, stage)(module, dataloaders=dataloaders)
    assert finder.plan is not None
    assert finder.plan.batch_size == 200
    assert {name for trial in finder.plan.trials for name in trial.phase_peak_bytes} == {"evaluation"}
    assert set(module.evaluated) == {200}
    assert module.modes == {(False, False)}
    assert module.sizes == []  # no training step
    assert torch.equal(weight, module.layer.weight)
    assert (dataloaders.batch_size if dataloaders else module.batch_size) == 200


def test_a_stage_whose_loader_does_not_follow_is_left_alone(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1)
    module = Fixed(device_memory)
    trainer = fit(module, finder, device_memory, max_epochs=0, num_sanity_val_steps=0)
    trainer.test(module)
    assert finder.plan is None
    assert set(module.evaluated) == {50}
    assert module.batch_size == 3


def test_a_stage_whose_loader_cannot_be_set_is_left_alone_with_the_reason(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1)
    module = Evaluated(device_memory)
    trainer = fit(module, finder, device_memory, max_epochs=0, num_sanity_val_steps=0)
    with pytest.warns(UserWarning, match=r"loaders of test_dataloader must have a batch size that can be set"):
        trainer.test(module, dataloaders=loader(None, samples=2))
    assert finder.plan is None


def test_an_interrupted_validate_can_be_repeated(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1)

    class Fails(Evaluated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if len(batch[0]) > 4 and not self.repaired:
                raise IndexError("mine")

    module = Fails(device_memory)
    module.repaired = False
    trainer = fit(module, finder, device_memory, max_epochs=0, num_sanity_val_steps=0)
    with pytest.raises(IndexError, match="mine"):
        trainer.validate(module)
    assert module.batch_size == 3
    assert module.evaluated == []
    assert module.training
    module.repaired = True
    trainer.validate(module)
    assert set(module.evaluated) == {200}


def test_what_grows_with_every_step_is_said(fit: Any, fake_device: Any) -> None:
    class Keeps(Evaluated):
        def __init__(self, device_memory: Any) -> None:
            super().__init__(device_memory)
            self.scores = CatMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.scores.update(batch[0])

    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1)
    module = Keeps(device_memory)
    with pytest.warns(UserWarning, match=r"the metric 'scores' keeps what every step gives it"):
        fit(module, finder, device_memory, num_sanity_val_steps=0, limit_val_batches=1)
    assert finder.plan is not None
    (note,) = [note for note in finder.plan.notes if "scores" in note]
    # 400 samples of 4 bytes are 1,600 bytes a step, and 5000 samples make 13 of these
    assert "0.002 MiB more with each one, 0.020 MiB by the end of an epoch" in note


def test_a_limit_on_batches_bounds_the_size(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=10**6 * MIB), BatchFinder(multiple_of=1)
    fit(Lawful(device_memory, law), finder, device_memory, limit_train_batches=0.25)
    assert finder.plan is not None
    # a quarter of the batches is at least one: four batches of up to 1666 samples in 5000, the last one short
    assert (finder.plan.batch_size, finder.plan.limited_by) == (1666, "dataset")


def test_a_device_that_fills_up_meanwhile_is_noticed(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=1000 * MIB), BatchFinder(multiple_of=1)

    class Shared(Lawful):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) > 100:
                device_memory.budget = min(device_memory.budget, max(600 * MIB, law(len(batch[0]))))
            return super().training_step(batch, batch_idx)

    fit(Shared(device_memory, law), finder, device_memory)
    assert finder.plan is not None
    assert finder.plan.limit_bytes <= 999 * MIB
    assert law(finder.plan.batch_size) <= finder.plan.limit_bytes


class Ragged(TensorDataset):
    """One sample in 64 is four times longer than the others."""

    def __init__(self, long: int = 33) -> None:
        super().__init__(torch.arange(640))
        self.long = long

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(40 if index % 64 == self.long else 10)


class Reader(Lawful):
    """Pads, and takes memory for each element."""

    def __init__(self, device_memory: Any) -> None:
        super().__init__(device_memory, lambda elements: 99 * MIB + elements * MIB // 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.use(batch.numel())
        return self.layer(batch[:, :1]).mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Ragged(), batch_size=self.batch_size, shuffle=True, collate_fn=pad)


def pad(samples: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


@pytest.mark.parametrize("worst_case", [None, "longest", len])
def test_a_ragged_set_trains_an_epoch_without_running_out(fit: Any, fake_device: Any, worst_case: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1, worst_case=worst_case)
    fit(Reader(device_memory), finder, device_memory, max_steps=-1, max_epochs=1)
    assert finder.plan is not None
    assert finder.plan.batch_size == 100  # of 40 elements each
    assert device_memory.num_ooms == 0
    assert any("Samples differ in size" in note for note in finder.plan.notes) == (worst_case is None)


def test_typical_samples_are_used_on_request(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    with pytest.raises(torch.cuda.OutOfMemoryError):  # every 20th sample is drawn, and no long one is among them
        fit(
            Reader(device_memory),
            BatchFinder(multiple_of=1, worst_case="typical"),
            device_memory,
            max_steps=-1,
            max_epochs=1,
        )


def test_after_running_out_the_memory_is_free(fit: Any, fake_device: Any) -> None:
    """Whatever tensors the failed step had made are gone before the next size is tried, and so are the gradients."""
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class RunsOut(Lawful):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            alive.append(sum(reference() is not None for reference in made))
            held = self.layer(batch[0]).tanh()  # on the frame of the exception's traceback
            made.append(weakref.ref(held))
            return super().training_step(batch, batch_idx) + held.mean()

    fit(
        RunsOut(device_memory, lambda size: 99 * MIB + size * MIB + max(0, size - 30) * 60 * MIB), finder, device_memory
    )
    assert device_memory.num_ooms > 0
    assert set(alive) == {0}


# Loader workers


@pytest.fixture
def workers_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Let loader workers hold ``fixed + per_sample * batch_size`` MiB."""

    def hold(fixed: int, per_sample: int) -> None:
        monkeypatch.setattr(WorkerMemory, "bytes_at", lambda self, size: (fixed + per_sample * size) * MIB)

    return hold


class FakeHost:
    def budget_bytes(self) -> int:
        return 1000 * MIB

    def current(self) -> MemoryStats:
        return MemoryStats(300 * MIB)


def test_on_a_device_host_memory_is_a_second_bound(
    fit: Any, fake_device: Any, workers_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1)
    monkeypatch.setattr(lightning_batchmem.measure.limits, "HostMemory", FakeHost)
    workers_of(100, 5)
    fit(Lawful(device_memory, law), finder, device_memory)
    assert finder.plan is not None
    assert (finder.plan.batch_size, finder.plan.limited_by) == (120, "host memory")  # (1000 - 300 - 100) / 5
    assert finder.plan.measured_peak_bytes == law(120)
    assert [trial.worker_bytes for trial in finder.plan.trials][-1] == 700 * MIB


def test_on_the_host_workers_are_in_the_budget(fit: Any, fake_device: Any, workers_of: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(multiple_of=1)
    device_memory.name = "host"
    workers_of(100, 1)
    fit(Lawful(device_memory, law), finder, device_memory)
    assert finder.plan is not None
    assert (finder.plan.batch_size, finder.plan.limited_by) == (150, "memory")  # 99 + 100 + 2 a sample
    assert finder.plan.measured_peak_bytes == law(150) + 250 * MIB


class Heavy(TensorDataset):
    """Samples of 1 MiB."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(64, 1))

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return (torch.zeros(2**18),)


def test_batches_in_workers_are_counted(fit: Any, fake_device: Any) -> None:
    class WithWorkers(Lawful):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([batch[0][:, :1]], batch_idx)

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Heavy(), batch_size=self.batch_size, num_workers=2, prefetch_factor=3)

    device_memory, finder = fake_device(budget_bytes=10**6 * MIB), BatchFinder(max_batch_size=8)
    fit(WithWorkers(device_memory, law), finder, device_memory)
    assert finder.plan is not None
    chosen = finder.plan.trials[-1]
    assert chosen.batch_size == 8
    # two workers, three batches each, and one that is being fetched
    assert chosen.worker_bytes == 7 * 8 * MIB


def test_trainer_without_a_progress_bar_or_logger_is_enough(fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder()
    monkeypatch.setattr("lightning_batchmem.batch_finder.device_memory_for", lambda device: device_memory)
    trainer = Trainer(accelerator="cpu", barebones=True, callbacks=[finder], max_steps=1)
    trainer.fit(Lawful(device_memory, law))
    assert isinstance(trainer.lightning_module, LightningModule)
    assert finder.plan is not None
