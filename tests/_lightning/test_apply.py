"""Accumulation for a target, the learning rate, and notes on both."""

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger

from lightning_batchmem import BatchFinder
from tests.helpers.lawful import MIB, Lawful, Sizes, found_size, law, loader, quiet_trainer
from tests.helpers.plans import search_notes, training_notes

BUDGET = 552 * MIB
SMALLER_BUDGET = 328 * MIB
assert found_size(BUDGET, multiple_of=1) == 400
assert found_size(SMALLER_BUDGET, multiple_of=1) == 200


class Rated(Lawful):
    """Has a learning rate in an attribute."""

    def __init__(self, device, lr=0.1, batch_size=3, optimizer=torch.optim.SGD):
        super().__init__(device, law, batch_size)
        self.lr = lr
        self.optimizer = optimizer

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=self.lr)


@pytest.fixture
def device(device):
    device.budget = BUDGET
    return device


@pytest.mark.parametrize(
    ("target", "size", "accumulate", "effective", "limited_by"),
    [
        (1024, 256, 4, 1024, "memory"),
        (1, 1, 1, 1, "target_batch_size"),
        # The target is a prime, so a step has one sample less.
        (1601, 400, 4, 1600, "memory"),
    ],
)
def test_the_target_is_reached_by_accumulation(
    search, device, target, size, accumulate, effective, limited_by
):
    sizes = Sizes()
    module = Lawful(device, law)
    plan = search(module, sizes, options={"target_batch_size": target, "multiple_of": None})
    assert (plan.batch_size, plan.limited_by) == (size, limited_by)
    assert plan.accumulate_grad_batches == accumulate
    assert plan.effective_batch_size == sizes.per_step[0] == effective
    assert plan.verified
    assert module.trainer.accumulate_grad_batches == accumulate
    assert any("of target_batch_size" in text for text in training_notes(plan)) == (
        effective != target
    )


def test_an_epoch_shorter_than_an_optimizer_step(search, device):
    module = Rated(device, batch_size=400)
    options = {"target_batch_size": 4000, "lr_scaling": "linear"}
    plan = search(module, options=options, limit_train_batches=2)
    assert (plan.accumulate_grad_batches, plan.effective_batch_size) == (10, 800)
    warning = "An optimizer step has 800 samples, not the 4,000 of target_batch_size: 2 x 400."
    assert warning in training_notes(plan)
    assert module.lr == pytest.approx(0.2)


def test_steps_of_the_search_accumulate_for_a_target(search, device):
    """Gradients are alive in the second micro batch, where the peak may be."""
    seen = set()

    class Watched(Lawful):
        def training_step(self, batch, batch_idx):
            has_gradient = self.layer.weight.grad is not None
            seen.add(has_gradient and self.trainer.accumulate_grad_batches > 1)
            return super().training_step(batch, batch_idx)

    search(Watched(device, law), options={"target_batch_size": 64})
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("automatic", "callbacks", "message"),
    [
        (
            True,
            [GradientAccumulationScheduler({0: 2})],
            "must be None, because a GradientAccumulationScheduler sets it",
        ),
        (False, [], "must be None, because your training_step steps the optimizers"),
    ],
)
def test_a_target_next_to_other_accumulation_is_refused(
    search, device, automatic, callbacks, message
):
    module = Lawful(device, law)
    module.automatic_optimization = automatic
    with pytest.raises(ValueError, match=f"target_batch_size {message}"):
        search(module, *callbacks, options={"target_batch_size": 64})
    assert module.sizes == []


@pytest.mark.parametrize(
    ("project", "trainer", "expected"),
    [
        ({"batch_size": 100}, {}, 0.4),
        # The samples per optimizer step grow from 40 x 2 to 400 x 2, so the rate grows tenfold.
        (
            {"batch_size": np.int64(40), "lr": np.float32(0.5)},
            {"accumulate_grad_batches": 2},
            5.0,
        ),
    ],
)
def test_the_learning_rate_is_scaled(search, device, project, trainer, expected):
    module = Rated(device, **project)
    plan = search(module, options={"lr_scaling": "linear"}, **trainer)
    assert plan.learning_rate == module.lr == pytest.approx(expected)
    assert type(module.lr) is float
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(expected)
    assert f"learning rate {project.get('lr', 0.1):.6g} -> {expected:.6g}" in plan.training
    assert not any("learning rate" in note for note in search_notes(plan))


@pytest.mark.parametrize(
    ("samples", "size", "trainer", "before", "after"),
    [
        # A data set that is smaller than the batch: the step is that of all samples.
        (7, 32, {}, 7, 7),
        # Both epochs end with the first step, which has all samples of the epoch.
        (40, 8, {"accumulate_grad_batches": 9, "max_epochs": 1, "max_steps": -1}, 40, 40),
        # Two batches of an epoch are less than the four of a step.
        (5000, 8, {"accumulate_grad_batches": 4, "limit_train_batches": 2}, 16, 100),
    ],
)
def test_the_learning_rate_is_scaled_by_the_samples_that_a_step_has(
    search, device, samples, size, trainer, before, after
):
    class Few(Rated):
        def train_dataloader(self):
            return loader(self.batch_size, samples)

    options = {"lr_scaling": "linear", "max_batch_size": 50}
    plan = search(Few(device, batch_size=size), options=options, **trainer)
    assert plan.effective_batch_size == after
    assert plan.learning_rate == pytest.approx(0.1 * after / before)
    alone = search(Few(device, batch_size=size), options={"max_batch_size": 50}, **trainer)
    sentences = (*training_notes(alone), *search_notes(alone))
    assert any(f"instead of {before}" in text for text in sentences) == (after != before)


class RatedInHparams(Lawful):
    def __init__(self, device, learning_rate=0.1):
        super().__init__(device, law, batch_size=100)
        self.save_hyperparameters("learning_rate")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)


def test_the_learning_rate_in_hparams(search, device):
    module = RatedInHparams(device)
    search(module, options={"lr_scaling": "linear"})
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.4)
    assert module.hparams.learning_rate == pytest.approx(0.4)
    # Lightning logs these hyperparameters.
    assert module.hparams_initial["learning_rate"] == pytest.approx(0.4)


def test_a_second_fit_scales_from_the_size_of_the_first(fit, device):
    finder = BatchFinder(multiple_of=1, lr_scaling="linear", objective="memory")
    module = Rated(device, batch_size=100)
    for available_bytes, expected in ((BUDGET, 0.4), (SMALLER_BUDGET, 0.2)):
        device.budget = available_bytes
        fit(module, finder, device)
        # The size of the first fit is one of the sizes that the second one runs.
        assert module.lr == pytest.approx(expected, rel=0.01)


def test_the_finder_of_lightning_is_refused(search, device):
    module = Lawful(device, law)
    with pytest.raises(ValueError, match="callbacks must have one BatchFinder or one BatchSizeFi"):
        search(module, BatchSizeFinder())
    assert module.sizes == []


def test_a_learning_rate_that_is_not_used_is_a_warning(search, device):
    module = Rated(device, optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=0.1))
    message = (
        "the module, 0.1 -> 13.3333, but those of the optimizers changed otherwise, 0.1 -> 0.1"
    )
    with pytest.warns(UserWarning, match=message):
        search(module, options={"lr_scaling": "linear"})


class ScalesItself(Rated):
    """Scales its rate by its batch size, for one of two groups or for all."""

    def __init__(self, device, groups):
        super().__init__(device, batch_size=100)
        self.groups = groups

    def configure_optimizers(self):
        rate = self.lr * self.batch_size / 256
        weight, bias = self.parameters()
        others = {"params": [bias], "lr": rate if self.groups == 1 else 0.01}
        return torch.optim.SGD([{"params": [weight]}, others], lr=rate)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_project_that_scales_its_rate_itself(search, device, groups):
    plan = search(ScalesItself(device, groups))
    assert not training_notes(plan)
    assert plan.project_recipe.learning_rates[0] == pytest.approx(0.1 * 100 / 256)
    assert plan.recipe.learning_rates[0] == pytest.approx(0.1 * 400 / 256)
    # It would be scaled twice.
    changes = "0.0390625 -> 0.625" + ", 0.01 -> 0.01" * (groups - 1)
    message = f"the module, 0.1 -> 0.4, but those of the optimizers changed otherwise, {changes}."
    with pytest.warns(UserWarning, match=message):
        search(ScalesItself(device, groups), options={"lr_scaling": "linear"})


@pytest.mark.parametrize(
    ("project", "message"),
    [
        (None, r"lr_scaling must be None for a module without `lr` .*, got 'linear'"),
        ({"lr": "1e-3"}, r"`lr` must be a number for lr_scaling, got '1e-3' of str"),
        (
            {"lr": torch.tensor(0.5)},
            r"`lr` must be a number for lr_scaling, got tensor\(0.5000\) of Tensor",
        ),
        (
            {"batch_size": "32"},
            r"`batch_size` must be a positive whole number for lr_scaling and objective=",
        ),
    ],
)
def test_projects_whose_learning_rate_cannot_be_scaled(search, device, project, message):
    def optimizer(parameters, lr):
        return torch.optim.SGD(parameters, lr=float(lr))

    if project is None:
        module = Lawful(device, law)
    else:
        module = Rated(device, **project, optimizer=optimizer)
    with pytest.raises(ValueError, match=message):
        search(module, options={"lr_scaling": "linear"})
    assert module.sizes == []


@pytest.mark.parametrize("target", [None, 100])
def test_a_note_on_the_learning_rate_without_scaling(search, device, target, capsys):
    module = Rated(device, batch_size=100)
    plan = search(module, options={"target_batch_size": target})
    assert len(training_notes(plan)) == (target is None)
    change = 'lr_scaling="linear" multiplies the rate by 4 (SGD).'
    for warning in training_notes(plan):
        assert warning.startswith("An optimizer step has 400 samples instead of 100 at the same")
        assert change in warning
        assert warning in " ".join(capsys.readouterr().out.split())
    assert module.lr == 0.1


def test_lr_scaling_without_an_optimizer_is_not_named(search, device):
    class WithoutOptimizer(Rated):
        def configure_optimizers(self):
            return None

    # Lightning's own warning of it is another one.
    with pytest.warns(UserWarning, match="returned `None`") as warned:
        search(WithoutOptimizer(device), options={"lr_scaling": "linear"})
    assert not any("lr_scaling changed" in str(one.message) for one in warned)


class FirstValues(CSVLogger):
    """In a run of MLflow, a parameter keeps its first value. Nested names are joined there too."""

    def __init__(self, directory, **params):
        super().__init__(directory)
        self.params = {}
        self.log_hyperparams(params)

    def log_hyperparams(self, params=None):
        for name, value in (params or {}).items():
            text = str(vars(value) if isinstance(value, SimpleNamespace) else value)
            if self.params.setdefault(name, text) != text:
                raise RuntimeError(f"Changing param values is not allowed: {name}")


class Logged(Rated):
    """Saves its hyperparameters, and logs what a script may log itself."""

    def __init__(self, device, batch_size=3, lr=0.1, scheme=None):
        super().__init__(device, lr, batch_size)
        self.save_hyperparameters("batch_size", "lr", "scheme")
        self.scheme = scheme
        if scheme is not None:
            del self.batch_size

    def on_train_start(self):
        self.logger.log_hyperparams({"batch_size": self.hparams.batch_size, "own": 1})

    def train_dataloader(self):
        return loader(self.batch_size if self.scheme is None else self.scheme.bs)

    def test_step(self, batch, batch_idx):
        self.use(len(batch[0]))

    def test_dataloader(self):
        return loader(50)


REFUSED = r"BatchFinder: a logger refuses another `{}` .* has {} instead of {}, {}\.$"


def test_a_logger_that_refuses_another_size(fit, device, tmp_path):
    logger = FirstValues(tmp_path, batch_size=3, lr=0.1)
    module = Logged(device)
    finder = BatchFinder(objective="memory", min_steps_per_epoch=None, multiple_of=1)
    message = REFUSED.format("batch_size", 400, 3, "logged as `batch_size_of_training`")
    with pytest.warns(UserWarning, match=message):
        trainer = fit(module, finder, device, logger=logger)
    assert (trainer.global_step, module.batch_size) == (3, 400)
    expected = {"batch_size": "3", "lr": "0.1", "scheme": "None", "own": "1"}
    assert logger.params == {**expected, "batch_size_of_training": "400"}
    assert "log_hyperparams" not in vars(logger)
    # Each stage logs the hyperparameters again, also in a Trainer without the finder.
    trainer.test(module)
    quiet_trainer(logger=logger).test(module)
    # The next fold finds another size, for which the logger has no name left.
    device.budget = SMALLER_BUDGET
    message = REFUSED.format("batch_size", 200, 3, "not logged")
    with pytest.warns(UserWarning, match=message):
        trainer = fit(Logged(device), finder, device, logger=logger)
    assert trainer.global_step == 3


def test_a_logger_that_refuses_the_size_that_an_earlier_fit_has_found(fit, device, tmp_path):
    module = Logged(device)
    finder = BatchFinder(objective="memory", min_steps_per_epoch=None, multiple_of=1)
    logger = FirstValues(tmp_path / "first")
    fit(module, finder, device, logger=logger)
    assert logger.params["batch_size"] == "400"
    message = REFUSED.format("batch_size", 400, 3, "logged as `batch_size_of_training`")
    with pytest.warns(UserWarning, match=message):
        trainer = fit(module, finder, device, logger=FirstValues(tmp_path, batch_size=3))
    assert trainer.global_step == 3


def test_a_logger_that_takes_other_objects_than_dictionaries(fit, device, tmp_path):
    logged = []

    class Takes(CSVLogger):
        def log_hyperparams(self, params=None):
            logged.append(params)

    class LogsObject(Logged):
        def on_train_start(self):
            self.logger.log_hyperparams(3)

    fit(LogsObject(device), BatchFinder(objective="memory"), device, logger=Takes(tmp_path))
    assert logged[-1] == 3


def test_a_logger_that_refuses_a_nested_size_and_a_rate(fit, device, tmp_path):
    logger = FirstValues(tmp_path, scheme=SimpleNamespace(bs=100), lr=0.1)
    module = Logged(device, scheme=SimpleNamespace(bs=100))
    finder = BatchFinder.optional(
        objective="memory", min_steps_per_epoch=None, multiple_of=1, lr_scaling="linear"
    )
    message = REFUSED.format("bs", 400, 100, "logged as `bs_of_training`")
    with pytest.warns(UserWarning, match=message), pytest.warns(UserWarning, match="another `lr`"):
        trainer = fit(module, finder, device, logger=logger)
    assert trainer.global_step == 3
    assert (module.scheme.bs, module.lr) == (400, pytest.approx(0.4))
    assert float(logger.params["lr_of_training"]) == pytest.approx(0.4)
    assert logger.params["bs_of_training"] == "400"


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_logger_is_copied_without_the_training(fit, device, tmp_path, make_copy):
    copies = []

    class Copies(Logged):
        def on_train_start(self):
            copies.append(make_copy(self.logger))

    options = {"objective": "memory", "lr_scaling": "linear"}
    fit(Copies(device), BatchFinder(**options), device, logger=CSVLogger(tmp_path))
    copied = copies[-1]
    copied.log_hyperparams({"own": 1})
    assert copied.experiment.hparams["own"] == 1
    assert "trainer" not in repr(vars(copied)).lower()


def test_another_error_of_a_logger_is_raised(fit, device, tmp_path):
    logger = FirstValues(tmp_path, own=2)
    with pytest.raises(RuntimeError, match="Changing param values is not allowed: own"):
        fit(Logged(device), BatchFinder(), device, logger=logger)
