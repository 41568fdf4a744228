"""Whole searches in a real Trainer on a fake device: validation, other stages, what limits the size, what is left."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning_batchmem.measure.live_bytes import LiveStorages
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import BatchFinder, Plan
from lightning_batchmem.devices.base import MemoryStats
from lightning_batchmem.measure import limits
from lightning_batchmem.measure.limits import WorkerMemory
from tests.lawful import MIB, SAMPLES, Lawful, Sizes, found_size, law

BUDGET = 500 * MIB
LIMIT = 475 * MIB
FOUND = found_size(BUDGET, multiple_of=1)
FOUND_TWICE = found_size(BUDGET, multiple_of=2) // 2  # where each sample takes two MiB
PROBED = 8  # the second size
assert (FOUND, FOUND_TWICE) == (347, 173)


def loader(size: int | None, samples: int = SAMPLES, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(samples, 1)), batch_size=size, **arguments)


class Evaluated(Lawful):
    """Each sample of an evaluation takes twice as much as in training."""

    def __init__(self, device_memory: Any) -> None:
        super().__init__(device_memory, law)
        self.eval_batch_size = 7
        self.evaluated: list[int] = []
        modes: set[tuple[str, bool, bool]] = set()
        self.modes = lambda: modes  # a function, which the search does not restore

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.modes().add((self.trainer.state.stage, self.training, torch.is_grad_enabled()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.modes().add((self.trainer.state.stage, self.training, torch.is_grad_enabled()))
        self.evaluated.append(len(batch[0]))
        self.use(2 * len(batch[0]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.validation_step(batch, batch_idx)
        return torch.zeros(1)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Fixed(Evaluated):
    """Evaluates at one size, whatever ``batch_size`` is."""

    size = 50

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.size)

    test_dataloader = val_dataloader


class OwnSize(Evaluated):
    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.eval_batch_size)


@pytest.fixture
def device(fake_device: Any) -> Any:
    return fake_device(budget_bytes=BUDGET)


@pytest.fixture
def search(fit: Any, device: Any) -> Callable[..., Plan]:
    def run(module: LightningModule, *callbacks: Any, options: Any = None, **arguments: Any) -> Plan:
        finder = BatchFinder(**{"multiple_of": 1, **(options or {})})
        fit(module, finder, device, *callbacks, **{"max_steps": 1, "num_sanity_val_steps": 0, **arguments})
        assert finder.plan is not None
        return finder.plan

    return run


# Validation in training


def test_validation_is_a_phase_with_its_own_line(search: Any, device: Any) -> None:
    module = Evaluated(device)
    plan = search(module)
    assert plan.batch_size == FOUND_TWICE
    assert plan.memory is not None
    assert plan.memory.phase_at(FOUND_TWICE) == "evaluation"
    assert plan.memory.lines["evaluation"].slope == pytest.approx(2 * MIB)
    assert plan.memory.lines["forward"].slope == pytest.approx(MIB)
    assert module.modes() == {("train", True, True), ("validate", False, False)}
    assert device.num_ooms == 0


def test_a_validation_set_smaller_than_a_batch_is_used_as_it_is(search: Any, device: Any) -> None:
    class Small(Evaluated):
        def val_dataloader(self) -> DataLoader[Any]:
            return loader(self.batch_size, samples=50)

    plan = search(Small(device))
    assert plan.batch_size == FOUND
    assert plan.trials[-1].phase_peak_bytes["evaluation"] == law(100)


def test_validation_of_a_fixed_size_is_the_same_at_every_size(search: Any, device: Any) -> None:
    module = Fixed(device)
    plan = search(module)
    assert plan.batch_size == FOUND
    assert {trial.phase_peak_bytes["evaluation"] for trial in plan.trials} == {law(100)}
    module.size = 202
    with pytest.raises(RuntimeError, match=r"Nothing fits.*2 samples"):
        search(module)


def test_validation_has_its_own_size(search: Any, device: Any) -> None:
    module, sizes = OwnSize(device), Sizes()
    plan = search(module, sizes, options={"eval_batch_arg_name": "eval_batch_size"}, limit_val_batches=1)
    assert plan.evaluation is not None
    assert (plan.batch_size, plan.evaluation.batch_size) == (FOUND, FOUND_TWICE)
    assert (module.batch_size, module.eval_batch_size) == (FOUND, FOUND_TWICE)
    assert sizes.seen == {FOUND}
    assert f"validation: batch size {FOUND_TWICE}" in str(plan)


def test_validation_with_its_own_size_that_does_not_fit(search: Any, device: Any) -> None:
    class Large(OwnSize):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.use(1000)

    with pytest.raises(RuntimeError, match="validation: Nothing fits"):
        search(Large(device), options={"eval_batch_arg_name": "eval_batch_size"})
    with pytest.raises(ValueError, match="got 'other', which none of them has"):
        search(OwnSize(device), options={"eval_batch_arg_name": "other"})


@pytest.mark.parametrize(
    ("loaders", "reason"),
    [([(torch.zeros(4, 1),)], "must be torch DataLoaders"), (loader(None), "batch_size=None")],
    ids=["list", "none"],
)
def test_validation_that_cannot_be_measured_is_left_out(search: Any, device: Any, loaders: Any, reason: str) -> None:
    with pytest.warns(UserWarning, match=f"leaves validation out of the search: .*{reason}"):
        assert search(Evaluated(device), val_dataloaders=loaders, limit_val_batches=1).batch_size == FOUND


# Other stages


@pytest.fixture
def evaluate(fit: Any, device: Any) -> Callable[..., tuple[BatchFinder, Trainer]]:
    def run(module: LightningModule, **arguments: Any) -> tuple[BatchFinder, Trainer]:
        """A Trainer that has not trained."""
        finder = BatchFinder(multiple_of=1)
        return finder, fit(module, finder, device, max_epochs=0, num_sanity_val_steps=0, **arguments)

    return run


@pytest.mark.parametrize(("stage", "is_passed"), [("validate", False), ("test", True), ("predict", False)])
def test_other_stages_are_searched_with_forward_passes(stage: str, is_passed: bool, evaluate: Any, device: Any) -> None:
    module, dataloaders = Evaluated(device), loader(3)
    finder, trainer = evaluate(module)
    weight = module.layer.weight.detach().clone()
    getattr(trainer, stage)(module, dataloaders=dataloaders if is_passed else None)
    assert finder.plan is not None
    assert finder.plan.batch_size == FOUND_TWICE
    assert {phase for trial in finder.plan.trials for phase in trial.phase_peak_bytes} == {"evaluation"}
    assert set(module.evaluated) == {FOUND_TWICE, SAMPLES % FOUND_TWICE}
    assert module.modes() == {(stage, False, False)}
    assert torch.equal(weight, module.layer.weight)
    assert (dataloaders.batch_size if is_passed else module.batch_size) == FOUND_TWICE


def test_a_stage_whose_loaders_do_not_follow_is_left_unchanged(evaluate: Any, device: Any) -> None:
    module = Fixed(device)
    finder, trainer = evaluate(module)
    trainer.test(module)
    assert (finder.plan, set(module.evaluated), module.batch_size) == (None, {50}, 3)
    with pytest.warns(UserWarning, match=r"loaders of test_dataloader must have a batch size that can be set"):
        trainer.test(module, dataloaders=loader(None, samples=2))
    assert finder.plan is None


def test_no_search_in_a_stage_under_fast_dev_run(evaluate: Any, device: Any) -> None:
    module = Evaluated(device)
    finder, trainer = evaluate(module, fast_dev_run=True)
    trainer.validate(module)
    assert (finder.plan, set(module.evaluated)) == (None, {3})


def test_a_stage_that_failed_can_be_repeated(evaluate: Any, device: Any) -> None:
    class Fails(Evaluated):
        is_repaired = False

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if len(batch[0]) > 4 and not self.is_repaired:
                raise IndexError("of the user")

    module = Fails(device)
    finder, trainer = evaluate(module)
    with pytest.raises(IndexError, match="of the user"):
        trainer.validate(module)
    assert (finder.plan, module.batch_size, module.evaluated, module.training) == (None, 3, [], True)
    module.is_repaired = True
    trainer.validate(module)
    assert module.batch_size == FOUND_TWICE


# What limits the size


def test_a_fraction_of_the_batches_limits_the_size(search: Any, device: Any) -> None:
    device.budget = 10**6 * MIB
    plan = search(Lawful(device, law), limit_train_batches=0.25)
    assert (plan.batch_size, plan.limited_by) == (1250, "dataset")  # four batches, of which one is used


@pytest.mark.parametrize(
    ("arguments", "options"), [({"accumulate_grad_batches": 4}, {}), ({}, {"target_batch_size": 512})]
)
def test_a_full_step_has_two_micro_batches_under_accumulation(
    search: Any, device: Any, arguments: Any, options: Any
) -> None:
    plan = search(Lawful(device, law), options=options, **arguments)
    for trial in plan.trials:
        if trial.kind == "probe":
            assert trial.samples_run == 2 * trial.full_steps * trial.batch_size
    assert plan.effective_batch_size == plan.accumulate_grad_batches * plan.batch_size
    assert plan.accumulate_grad_batches == arguments.get("accumulate_grad_batches", 2)


def test_an_average_of_the_weights_takes_a_copy_of_the_parameters(search: Any, device: Any) -> None:
    plan = search(Lawful(device, law), StochasticWeightAveraging(0.01), max_epochs=1)
    assert plan.limit_bytes == LIMIT - 8  # a weight and a bias


class FakeHost:
    def budget_bytes(self) -> int:
        return 2000

    def current(self) -> MemoryStats:
        return MemoryStats(800)


def test_loader_workers_limit_the_size_on_a_device(search: Any, device: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(limits, "HostMemory", FakeHost)
    plan = search(Lawful(device, law), train_dataloaders=loader(3, num_workers=1))
    assert (plan.batch_size, plan.limited_by) == (100, "host memory")  # three batches ahead, 4 bytes a sample
    assert (plan.trials[-1].worker_bytes, plan.trials[-1].needed_bytes) == (1200, law(100))


def test_loader_workers_are_part_of_the_memory_on_the_host(search: Any, device: Any, monkeypatch: Any) -> None:
    device.name = "host"
    monkeypatch.setattr(LiveStorages, "is_possible", lambda: False)  # the fake device has no live tensors
    monkeypatch.setattr(WorkerMemory, "bytes_at", lambda self, size: (100 + size) * MIB)
    plan = search(Lawful(device, law))
    chosen = plan.trials[-1]
    assert (plan.batch_size, chosen.batch_size, plan.limited_by) == (111, 111, "memory")
    assert chosen.reserve_bytes == law(111) // 4 + 211 * MIB
    assert LIMIT - 3 * MIB < chosen.needed_bytes <= LIMIT
    device.budget = 150 * MIB
    with pytest.raises(RuntimeError, match=r"the memory held .*; DataLoader workers hold 102.0 MiB more\."):
        search(Lawful(device, law))


def test_a_device_that_fills_up_during_the_search(search: Any, device: Any) -> None:
    device.budget = 1000 * MIB

    class Shared(Lawful):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) > 100:
                device.budget = 600 * MIB
            return super().training_step(batch, batch_idx)

    plan = search(Shared(device, law))
    assert (plan.limit_bytes, plan.batch_size) == (600 * MIB, 465)  # 0.94 of the limit
    assert device.num_ooms == 0


def test_no_tensor_of_a_step_that_failed_is_left(search: Any, device: Any) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: set[int] = set()

    class Steep(Lawful):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            alive.add(sum(reference() is not None for reference in made))
            held = self.layer(batch[0]).tanh()  # in the frame of the traceback
            made.append(weakref.ref(held))
            return super().training_step(batch, batch_idx) + held.mean()

    search(Steep(device, lambda size: 99 * MIB + size * MIB + max(0, size - 30) * 60 * MIB))
    assert device.num_ooms > 0
    assert alive == {0}


class Padded(Lawful):
    """One sample in 64 is four times longer than the others."""

    def __init__(self, device_memory: Any) -> None:
        super().__init__(device_memory, lambda elements: law(elements // 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.use(batch.numel())
        return self.layer(batch[:, :1]).mean()

    def train_dataloader(self) -> DataLoader[Any]:
        samples: Any = [torch.zeros(40 if index % 64 == 33 else 10) for index in range(640)]
        pad = torch.nn.utils.rnn.pad_sequence
        return DataLoader(samples, self.batch_size, shuffle=True, collate_fn=lambda each: pad(each, batch_first=True))


def test_padded_samples_train_an_epoch(search: Any, device: Any) -> None:
    plan = search(Padded(device), max_steps=-1, max_epochs=1)
    assert plan.batch_size == 86  # 40 elements each
    assert any("Samples differ in size" in note for note in plan.notes)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        search(Padded(device), options={"worst_case": "typical"}, max_steps=-1, max_epochs=1)


# What is left of a search


class Watched(Lawful):
    """Notes the state in which each size is run first, and in which training starts."""

    def __init__(self, device_memory: Any, fails_at: int = 0) -> None:
        super().__init__(device_memory, law)
        self.fails_at = fails_at
        seen: dict[Any, Any] = {}
        self.seen = lambda: seen  # a function, which the search does not restore

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        has_finder = any(isinstance(callback, BatchFinder) for callback in self.trainer.callbacks)
        optimizer = self.optimizers(use_pl_optimizer=False)
        left = bool(optimizer.state), self.layer.bias.grad is None, self.layer.bias.item(), len(self.sizes)
        random = 0.0 if has_finder else torch.rand(1).item()
        hooks = len(optimizer._optimizer_step_post_hooks) if has_finder else 0
        state = (*left, self.trainer.global_step, self.trainer.fit_loop.epoch_loop.batch_idx, hooks, random)
        self.seen().setdefault("training" if has_finder else len(batch[0]), state)
        if len(batch[0]) == self.fails_at:
            raise IndexError("of the user")
        return super().training_step(batch, batch_idx)


def test_rehearsals_and_training_start_from_the_state_before_the_search(search: Any, device: Any) -> None:
    module = Watched(device)
    bias = module.layer.bias.item()
    search(module)
    seen = module.seen()
    assert seen["training"] == (False, True, bias, 0, 0, 0, 0, 0.0)
    assert seen[328] == seen[FOUND] == seen[2]
    assert seen[328][:-1] == seen["training"][:-1]
    assert seen[PROBED][0] is True  # probes follow each other
    assert seen[PROBED][2] != bias


class AtError(Callback):
    """The trainer's state when the error has left the search."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        optimizer_state = dict(trainer.optimizers[0].state)
        self.state = trainer.global_step, optimizer_state, trainer.accumulate_grad_batches, trainer.callbacks[1:]


@pytest.mark.parametrize("fails_at", [PROBED, 328])
def test_everything_is_restored_after_an_error(search: Any, device: Any, fails_at: int) -> None:
    device.enforces_limits = True
    module, at_error = Watched(device, fails_at), AtError()
    bias, random = module.layer.bias.item(), torch.get_rng_state()
    with pytest.raises(IndexError, match="of the user"):
        search(module, at_error, accumulate_grad_batches=4)
    assert fails_at in module.seen()
    assert "training" not in module.seen()
    assert at_error.state == (0, {}, 4, [at_error])
    assert (module.layer.bias.item(), module.layer.bias.grad) == (bias, None)
    assert torch.equal(random, torch.get_rng_state())
    assert (module.batch_size, module.sizes, device.budget) == (3, [], BUDGET)


class Logging(Lawful):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("samples", float(len(batch[0])))
        if len(batch[0]) < FOUND:  # in the search
            self.logger.experiment.config.update({"a": 1})
            self.logger.experiment["b"] = self.logger.experiment.runs[0].name
        return super().training_step(batch, batch_idx)


def test_nothing_is_logged(device: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("lightning_batchmem.batch_finder.device_memory_for", lambda _: device)
    logger, finder = CSVLogger(tmp_path), BatchFinder(multiple_of=1)
    arguments = {"accelerator": "cpu", "callbacks": [finder], "max_steps": 2}
    trainer = Trainer(logger=logger, log_every_n_steps=1, enable_progress_bar=False, **arguments)
    trainer.fit(Logging(device, law))
    assert trainer.loggers == [logger]
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[rows[0].split(",").index("samples")] for row in rows[1:]] == [str(float(FOUND))] * 2


def test_a_barebones_trainer(device: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("lightning_batchmem.batch_finder.device_memory_for", lambda _: device)
    finder = BatchFinder(multiple_of=1)
    Trainer(accelerator="cpu", barebones=True, callbacks=[finder], max_steps=1).fit(Lawful(device, law))
    assert finder.plan is not None
    assert finder.plan.batch_size == FOUND
