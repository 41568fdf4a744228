"""What follows from the size: accumulation for a target, the learning rate, and what is said of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_batchmem import BatchFinder
from tests.lawful import MIB, Lawful, Sizes, law


class Rated(Lawful):
    """Has a learning rate, in an attribute."""

    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD

    def __init__(self, device_memory: Any, lr: float = 0.1, batch_size: int = 3) -> None:
        super().__init__(device_memory, law, batch_size)
        self.lr = lr

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=self.lr)


class RatedInHparams(Lawful):
    def __init__(self, device_memory: Any) -> None:
        super().__init__(device_memory, law)
        self.save_hyperparameters({"learning_rate": 0.1})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)


class Steps(Callback):
    """Samples between one optimizer step and the next."""

    def __init__(self) -> None:
        self.samples = 0
        self.of_steps: list[int] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples += len(batch[0])
        if trainer.global_step > len(self.of_steps):
            self.of_steps.append(self.samples)
            self.samples = 0


@pytest.mark.parametrize(
    ("target", "size", "accumulate", "limited_by"),
    [
        (1024, 256, 4, "memory"),  # 400 fit
        (600, 300, 2, "memory"),
        (64, 64, 1, "target_batch_size"),
        (1, 1, 1, "target_batch_size"),
    ],
)
def test_the_target_is_kept_by_accumulation(
    fit: Any, fake_device: Any, target: int, size: int, accumulate: int, limited_by: str
) -> None:
    device_memory, finder, steps = fake_device(budget_bytes=500 * MIB), BatchFinder(target_batch_size=target), Steps()
    trainer = fit(Lawful(device_memory, law), finder, device_memory, steps)
    plan = finder.plan
    assert plan is not None
    assert (plan.batch_size, plan.accumulate_grad_batches, plan.limited_by) == (size, accumulate, limited_by)
    assert plan.effective_batch_size == target
    assert plan.verified
    assert size in [trial.batch_size for trial in plan.trials]
    assert trainer.accumulate_grad_batches == accumulate
    assert set(steps.of_steps) == {target}
    assert device_memory.num_ooms == 0


def test_a_target_that_cannot_be_kept_is_rounded_and_said(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=400 * MIB), BatchFinder(target_batch_size=1009)
    fit(Lawful(device_memory, law), finder, device_memory)
    plan = finder.plan
    assert plan is not None
    assert (plan.batch_size, plan.accumulate_grad_batches, plan.effective_batch_size) == (252, 4, 1008)
    assert "1,008 samples per optimizer step instead of 1,009: 4 x 252" in plan.notes
    assert "step      1008 samples, in 4 batches" in str(plan)


def test_an_epoch_shorter_than_a_step_is_said_and_counted(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    finder = BatchFinder(target_batch_size=4000, lr_scaling="linear", base_batch_size=400)
    module = Rated(device_memory)
    fit(module, finder, device_memory, limit_train_batches=2)
    plan = finder.plan
    assert plan is not None
    assert (plan.batch_size, plan.accumulate_grad_batches, plan.effective_batch_size) == (400, 10, 800)
    assert "an epoch has 2 of the 10 batches that make an optimizer step, which ends with it" in plan.notes
    assert module.lr == pytest.approx(0.2)


def test_under_a_target_probes_accumulate(fit: Any, fake_device: Any) -> None:
    """Gradients are alive in the second micro-batch, which may be where the peak is."""
    seen: set[bool] = set()

    class Looks(Lawful):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.add(self.layer.weight.grad is not None and self.trainer.accumulate_grad_batches > 1)
            return super().training_step(batch, batch_idx)

    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(target_batch_size=64)
    fit(Looks(device_memory, law), finder, device_memory)
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"accumulate": True}, "target_batch_size must be None with a GradientAccumulationScheduler"),
        ({"manual": True}, "target_batch_size must be None under manual optimization"),
    ],
)
def test_who_else_accumulates_is_said(fit: Any, fake_device: Any, arguments: dict[str, bool], said: str) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    module = Lawful(device_memory, law)
    module.automatic_optimization = "manual" not in arguments
    callbacks = [GradientAccumulationScheduler({0: 2})] if "accumulate" in arguments else []
    with pytest.raises(ValueError, match=said):
        fit(module, BatchFinder(target_batch_size=64), device_memory, *callbacks)
    assert module.sizes == []


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.4), ("sqrt", 0.2)])
def test_the_learning_rate_follows_the_samples_of_a_step(
    fit: Any, fake_device: Any, rule: Any, expected: float
) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(lr_scaling=rule, base_batch_size=100)
    module = Rated(device_memory)
    trainer = fit(module, finder, device_memory)
    assert finder.plan is not None
    assert finder.plan.learning_rate == module.lr == pytest.approx(expected)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(expected)
    assert f"lr        {expected:.6g} instead of 0.1" in str(finder.plan)
    assert finder.plan.notes == ()


def test_the_size_before_the_search_is_the_base_by_default(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(lr_scaling="linear")
    module = Rated(device_memory, batch_size=40)
    fit(module, finder, device_memory, accumulate_grad_batches=2)
    assert module.lr == pytest.approx(1.0)  # 400 x 2 over 40 x 2


def test_the_learning_rate_in_hparams(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(lr_scaling="linear", base_batch_size=100)
    module = RatedInHparams(device_memory)
    trainer = fit(module, finder, device_memory)
    assert module.hparams.learning_rate == pytest.approx(0.4)
    assert module.hparams_initial["learning_rate"] == pytest.approx(0.4)  # what Lightning logs
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.4)


def test_a_second_fit_does_not_scale_again(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(lr_scaling="linear", base_batch_size=100)
    module = Rated(device_memory)
    fit(module, finder, device_memory)
    device_memory.budget = 300 * MIB
    fit(module, finder, device_memory)
    assert module.lr == pytest.approx(0.2)


def test_a_learning_rate_that_is_not_used_is_said(fit: Any, fake_device: Any) -> None:
    class Ignores(Rated):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    device_memory = fake_device(budget_bytes=500 * MIB)
    with pytest.warns(UserWarning, match="configure_optimizers does not use it"):
        fit(Ignores(device_memory), BatchFinder(lr_scaling="linear"), device_memory)


def test_a_module_without_a_learning_rate_is_said_before_any_step(fit: Any, fake_device: Any) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    module = Lawful(device_memory, law)
    with pytest.raises(ValueError, match=r"lr_scaling must be None for a module without `lr` .*, got 'linear'"):
        fit(module, BatchFinder(lr_scaling="linear"), device_memory)
    assert module.sizes == []
    assert module.batch_size == 3


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (torch.optim.SGD, r"from 3 to 400: for SGD the linear rule \(Goyal et al. 2017, arXiv 1706.02677\)"),
        (torch.optim.AdamW, r"for AdamW the square root rule \(Malladi et al. 2022, arXiv 2205.10287\)"),
        (torch.optim.Adagrad, "for Adagrad we know of no rule"),
    ],
)
def test_the_rule_for_the_optimizer_is_said_when_nobody_asked(
    fit: Any, fake_device: Any, optimizer: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder()
    module = Rated(device_memory)
    module.optimizer = optimizer
    fit(module, finder, device_memory)
    assert finder.plan is not None
    (note,) = finder.plan.notes
    assert re.search(said, note)
    assert note in capsys.readouterr().out
    assert module.lr == 0.1


def test_nothing_is_said_when_the_samples_of_a_step_stay(fit: Any, fake_device: Any) -> None:
    device_memory, finder = fake_device(budget_bytes=500 * MIB), BatchFinder(target_batch_size=12)
    fit(Rated(device_memory), finder, device_memory, Sizes(), accumulate_grad_batches=4)
    assert finder.plan is not None
    assert (finder.plan.batch_size, finder.plan.notes) == (12, ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target_batch_size": 0}, r"target_batch_size must be .* got 0"),
        ({"lr_scaling": "cubic"}, r'lr_scaling must be None, "linear" or "sqrt", got \'cubic\''),
        ({"base_batch_size": 32}, r"base_batch_size must come with lr_scaling, got 32 without it"),
        ({"lr_scaling": "sqrt", "base_batch_size": 1.5}, r"base_batch_size must be .* got 1.5"),
        (
            {"worst_case": "largest"},
            r"worst_case must be None, .* or a callable .* got 'largest'",
        ),
        ({"eval_batch_arg_name": "a b"}, r"eval_batch_arg_name must be the name of an attribute, got 'a b'"),
        ({"eval_batch_arg_name": "batch_size"}, r"eval_batch_arg_name must differ from batch_arg_name"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchFinder(**arguments)
