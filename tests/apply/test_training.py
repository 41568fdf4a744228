"""Accumulation for a target, the learning rate, and notes on both."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_batchmem import BatchFinder
from tests.lawful import MIB, Lawful, found_size, law

BUDGET, SMALLER_BUDGET = 560 * MIB, 336 * MIB
assert (found_size(BUDGET), found_size(SMALLER_BUDGET)) == (400, 200)


class Rated(Lawful):
    """Has a learning rate in an attribute."""

    def __init__(self, device_memory: Any, lr: Any = 0.1, batch_size: Any = 3, optimizer: Any = torch.optim.SGD):
        super().__init__(device_memory, law, batch_size)
        self.lr = lr
        self.optimizer = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=self.lr)


class Steps(Callback):
    """Samples between one optimizer step and the next."""

    def __init__(self) -> None:
        self.samples = 0
        self.per_step: list[int] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples += len(batch[0])
        if trainer.global_step > len(self.per_step):
            self.per_step.append(self.samples)
            self.samples = 0


@pytest.fixture
def device(fake_device: Any) -> Any:
    return fake_device(budget_bytes=BUDGET)


@pytest.mark.parametrize(
    ("target", "size", "accumulate", "effective", "limited_by"),
    [
        (1024, 256, 4, 1024, "memory"),
        (1, 1, 1, 1, "target_batch_size"),
        (1601, 400, 4, 1600, "memory"),  # a prime
    ],
)
def test_the_target_is_reached_by_accumulation(
    fit: Any, device: Any, target: int, size: int, accumulate: int, effective: int, limited_by: str
) -> None:
    finder, steps = BatchFinder(target_batch_size=target), Steps()
    trainer = fit(Lawful(device, law), finder, device, steps)
    plan = finder.plan
    assert plan is not None
    assert (plan.batch_size, plan.accumulate_grad_batches, plan.limited_by) == (size, accumulate, limited_by)
    assert plan.effective_batch_size == effective
    assert plan.verified
    assert trainer.accumulate_grad_batches == accumulate
    assert steps.per_step[0] == effective
    assert any("instead of" in note for note in plan.notes) == (effective != target)


def test_an_epoch_shorter_than_an_optimizer_step(fit: Any, device: Any) -> None:
    finder = BatchFinder(target_batch_size=4000, lr_scaling="linear", base_batch_size=400)
    module = Rated(device)
    fit(module, finder, device, limit_train_batches=2)
    assert finder.plan is not None
    assert (finder.plan.accumulate_grad_batches, finder.plan.effective_batch_size) == (10, 800)
    assert "an epoch ends after 2 of 10 batches per optimizer step" in finder.plan.notes
    assert module.lr == pytest.approx(0.2)


def test_steps_of_the_search_accumulate_for_a_target(fit: Any, device: Any) -> None:
    """Gradients are alive in the second micro batch, where the peak may be."""
    seen: set[bool] = set()

    class Watched(Lawful):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.add(self.layer.weight.grad is not None and self.trainer.accumulate_grad_batches > 1)
            return super().training_step(batch, batch_idx)

    fit(Watched(device, law), BatchFinder(target_batch_size=64), device)
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("automatic", "callbacks", "message"),
    [
        (True, [GradientAccumulationScheduler({0: 2})], "must be None with a GradientAccumulationScheduler"),
        (False, [], "must be None under manual optimization"),
    ],
)
def test_a_target_next_to_other_accumulation_is_refused(
    fit: Any, device: Any, automatic: bool, callbacks: list[Callback], message: str
) -> None:
    module = Lawful(device, law)
    module.automatic_optimization = automatic
    with pytest.raises(ValueError, match=f"target_batch_size {message}"):
        fit(module, BatchFinder(target_batch_size=64), device, *callbacks)
    assert module.sizes == []


@pytest.mark.parametrize(
    ("arguments", "project", "trainer", "expected"),
    [
        ({"lr_scaling": "linear", "base_batch_size": 100}, {}, {}, 0.4),
        # 400 x 2 over 40 x 2
        (
            {"lr_scaling": "linear", "min_steps_per_epoch": None},
            {"batch_size": np.int64(40), "lr": np.float32(0.5)},
            {"accumulate_grad_batches": 2},
            5.0,
        ),
    ],
)
def test_the_learning_rate_is_scaled(
    fit: Any, device: Any, arguments: Any, project: Any, trainer: Any, expected: float
) -> None:
    finder, module = BatchFinder(**arguments), Rated(device, **project)
    run = fit(module, finder, device, **trainer)
    assert finder.plan is not None
    assert finder.plan.learning_rate == module.lr == pytest.approx(expected)
    assert type(module.lr) is float
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(expected)
    assert f"{expected:.6g} instead of" in str(finder.plan)
    assert not any("learning rate" in note for note in finder.plan.notes)


def test_the_learning_rate_in_hparams(fit: Any, device: Any) -> None:
    class InHparams(Lawful):
        def __init__(self, learning_rate: float = 0.1) -> None:
            super().__init__(device, law)
            self.save_hyperparameters()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)

    module = InHparams()
    trainer = fit(module, BatchFinder(lr_scaling="linear", base_batch_size=100), device)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.4)
    assert module.hparams.learning_rate == pytest.approx(0.4)
    assert module.hparams_initial["learning_rate"] == pytest.approx(0.4)  # which Lightning logs


def test_a_second_fit_does_not_scale_again(fit: Any, device: Any) -> None:
    finder, module = BatchFinder(lr_scaling="linear", base_batch_size=100), Rated(device)
    fit(module, finder, device)
    device.budget = SMALLER_BUDGET
    fit(module, finder, device)
    assert module.lr == pytest.approx(0.2)


def test_a_learning_rate_that_is_not_used_is_a_warning(fit: Any, device: Any) -> None:
    module = Rated(device, optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=0.1))
    with pytest.warns(UserWarning, match="configure_optimizers does not use it"):
        fit(module, BatchFinder(lr_scaling="linear"), device)


@pytest.mark.parametrize(
    ("project", "message"),
    [
        (None, r"lr_scaling must be None for a module without `lr` .*, got 'linear'"),
        ({"lr": "1e-3"}, r"`lr` must be a number for lr_scaling, got '1e-3' of str"),
        ({"lr": torch.tensor(0.5)}, r"`lr` must be a number for lr_scaling, got tensor\(0.5000\) of Tensor"),
        ({"batch_size": "32"}, r"base_batch_size must be given .* `batch_size` .* got batch_size='32'"),
    ],
)
def test_projects_whose_learning_rate_cannot_be_scaled(fit: Any, device: Any, project: Any, message: str) -> None:
    def optimizer(parameters: Any, lr: Any) -> Any:
        return torch.optim.SGD(parameters, lr=float(lr))

    module = Lawful(device, law) if project is None else Rated(device, **project, optimizer=optimizer)
    with pytest.raises(ValueError, match=message):
        fit(module, BatchFinder(lr_scaling="linear"), device)
    assert module.sizes == []


@pytest.mark.parametrize(
    ("optimizer", "target", "expected"),
    [
        (torch.optim.SGD, None, 'from 3 to 400: for SGD, lr_scaling="linear" multiplies the learning rate by 133.3'),
        (torch.optim.SGD, 3, None),
    ],
)
def test_a_note_on_the_learning_rate_without_scaling(
    fit: Any, device: Any, optimizer: Any, target: Any, expected: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    finder, module = BatchFinder(target_batch_size=target), Rated(device, optimizer=optimizer)
    fit(module, finder, device)
    assert finder.plan is not None
    notes = [note for note in finder.plan.notes if "samples per optimizer step" in note]
    assert len(notes) == (expected is not None)
    for note in notes:
        assert expected is not None
        assert re.search(expected, note)
        assert note in capsys.readouterr().out
    assert module.lr == 0.1
