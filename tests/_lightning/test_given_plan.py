"""A training takes the plan of another run as if its size had been hard-coded."""

import copy
import json
import pickle
import re
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_batchmem import BatchFinder, Plan
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.recipe import Recipe
from tests.helpers import lawful
from tests.helpers.lawful import MIB, Lawful, Sizes, law, loader
from tests.helpers.plans import plan_with

# The fixture `device` has a limit of 475 MiB.
PLAN = replace(
    Plan.from_json(json.dumps(lawful.SAVED_PLAN)),
    limit_bytes=475 * MIB,
    parameters="2 in 2 tensors",
    strategy="SingleDeviceStrategy, 32-true",
    recipe=Recipe(batch_size=64, effective_batch_size=64),
    project_recipe=Recipe(batch_size=3, effective_batch_size=3),
)


@pytest.fixture
def train(fit, device):
    """Train with a plan; returns the module, the Trainer and the finder."""

    def run(plan=PLAN, module=None, *callbacks, options=None, optional=False, **arguments):
        kind = BatchFinder.optional if optional else BatchFinder
        finder = kind(plan=plan, apply=True, **(options or {}))
        module = module or Lawful(device, law)
        trainer = fit(module, finder, device, *callbacks, **arguments)
        return module, trainer, finder

    return run


def test_the_training_has_the_size_and_no_other_step(train, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    module, trainer, finder = train(str(path))
    assert (module.batch_size, module.sizes) == (64, [64] * 3)
    assert trainer.accumulate_grad_batches == 1
    assert finder.plan.trials == PLAN.trials
    assert (
        finder.plan.reason == f"64 samples: the size of the plan in {path}, found at another start."
    )
    printed = capsys.readouterr().out
    assert printed.count("  training  ") == printed.count("  why  ") == 1
    assert "steps of 3 -> 64 samples" in printed
    # The file is not written again.
    assert path.read_text() == PLAN.to_json()


DIFFERENCES = {
    "device": ({"device": "another GPU"}, "the device was another GPU and is CPU"),
    "limit": ({"limit_bytes": 600 * MIB}, "the limit was 600.0 MiB and is 475.0 MiB"),
    "ranks": ({"recipe": Recipe(64, 1, 8, 512)}, "the number of ranks was 8 and is 1"),
    "own size": (
        {"project_recipe": Recipe(4)},
        "the batch size of the project was 4 and is 3",
    ),
    "accumulation": (
        {
            "recipe": Recipe(64, 3, effective_batch_size=192),
            "project_recipe": Recipe(3, accumulate_grad_batches=2),
        },
        "the accumulation of the project was 2 and is 1",
    ),
    "strategy": (
        {"strategy": "DDPStrategy, 32-true"},
        "the strategy was DDPStrategy, 32-true and is SingleDeviceStrategy, 32-true",
    ),
    "precision": (
        {"strategy": "SingleDeviceStrategy, bf16-mixed"},
        "the strategy was SingleDeviceStrategy, bf16-mixed and is SingleDeviceStrategy, 32-true",
    ),
    "parameters": (
        {"parameters": "7 in 3 tensors"},
        "the number of parameters was 7 in 3 tensors and is 2 in 2 tensors",
    ),
    "place": ({"place": "task.size"}, "the plan sets `task.size`, which neither the module nor"),
    "rate": (
        {"recipe": replace(PLAN.recipe, learning_rate=0.1)},
        "the plan sets the learning rate, but the module has neither `lr` nor `learning_rate`",
    ),
    "evaluation": (
        {"recipe": Recipe()},
        "the plan in the code is one of an evaluation. Name another file, or",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_plan_of_another_training_is_an_error_in_code(train, device, name):
    change, text = DIFFERENCES[name]
    module = Lawful(device, law)
    with pytest.raises(ValueError, match=re.escape(text)):
        train(plan_with(PLAN, **change), module)
    assert module.sizes == []


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_plan_of_another_training_is_a_warning_under_the_variable(train, name):
    change, text = DIFFERENCES[name]
    start = "BatchFinder leaves the batch size of the project as it is: "
    with pytest.warns(UserWarning, match=re.escape(start) + ".*" + re.escape(text)):
        module, trainer, finder = train(plan_with(PLAN, **change), optional=True)
    assert (module.sizes, trainer.accumulate_grad_batches, finder.plan) == ([3] * 3, 1, None)


def test_a_size_that_cannot_be_set_leaves_the_training_as_it_is(train, device):
    class Bounded(Lawful):
        @property
        def batch_size(self):
            return self.size

        @batch_size.setter
        def batch_size(self, size):
            self.size = min(size, 50)

    module = Bounded(device, law)
    with pytest.warns(UserWarning, match="`batch_size` must keep the value it is set to, got 50"):
        train(plan_with(PLAN, accumulate_grad_batches=2), module, optional=True)
    assert module.sizes == [3] * 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("{", "must be the JSON of a Plan, got '{'"),
        ("[]", "must be the JSON of a Plan"),
        (
            '{"limited_by": "memory"}',
            "plans of version 0.5 and older cannot be read by this version",
        ),
    ],
)
def test_a_file_without_a_plan(train, tmp_path, text, why):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    start = f"the plan in {path} cannot be read ("
    with pytest.raises(ValueError, match=re.escape(start) + ".*" + re.escape(why)):
        train(path)
    with pytest.warns(UserWarning, match=re.escape(why)):
        module, _, _ = train(path, optional=True)
    assert module.sizes == [3] * 3


def test_a_size_that_an_argument_does_not_allow(train):
    with pytest.raises(ValueError, match="it has batch size 64, and max_batch_size is 63"):
        train(PLAN, options={"max_batch_size": 63})
    module, _, _ = train(PLAN, options={"max_batch_size": 64})
    assert module.sizes == [64] * 3


@pytest.mark.parametrize("arguments", [{}, {"plan": None}, {"plan": "plan.json", "then": "exit"}])
def test_the_arguments_are_checked(arguments):
    with pytest.raises(ValueError, match="apply=True must come with a plan"):
        BatchFinder(apply=True, **arguments)


@pytest.mark.parametrize("plan", [None, PLAN, "logs"])
def test_a_run_that_only_searches_needs_a_file(plan):
    with pytest.raises(ValueError, match='then="exit" must come with a file for the plan'):
        BatchFinder(plan=plan, then="exit")


def test_what_follows_the_search_is_checked():
    with pytest.raises(ValueError, match='then must be one of "train", "exit", got \'stop\''):
        BatchFinder(plan="plan.json", then="stop")


def test_a_lower_limit_in_which_the_size_still_fits_does_no_harm(train):
    # As on a machine where other processes hold memory for a while.
    rehearsed = replace(PLAN.trials[-1], kind="rehearsal", batch_size=64, outcome="ok")
    memory = replace(rehearsed.memory, held_peak_bytes=400 * MIB)
    plan = replace(PLAN, limit_bytes=600 * MIB, trials=(replace(rehearsed, memory=memory),))
    assert train(plan)[0].sizes == [64] * 3


def test_a_higher_limit_does_no_harm(train):
    assert train(replace(PLAN, limit_bytes=200 * MIB))[0].sizes == [64] * 3


def test_a_simulated_plan(train):
    plan = plan_with(PLAN, device="simulated RTX-4090", simulated=True, verified=False)
    module, _, finder = train(plan)
    assert (module.sizes, finder.plan.verified) == ([64] * 3, False)


def test_the_size_at_its_place(train, device):
    class InTask(Lawful):
        def __init__(self):
            super().__init__(device, law)
            self.task = {"size": 3}

        def train_dataloader(self):
            return loader(self.task["size"])

    module, _, _ = train(replace(PLAN, place="task.size"), InTask())
    assert (module.sizes, module.task, module.batch_size) == ([64] * 3, {"size": 64}, 3)


def test_a_constant_in_the_hook(train, device):
    class Constant(Lawful):
        def train_dataloader(self):
            return loader(5)

    module, _, _ = train(replace(PLAN, place="train_dataloader()"), Constant(device, law))
    assert module.sizes == [64] * 3


def test_loaders_that_were_passed(train):
    module, _, _ = train(train_dataloaders=loader(3))
    assert module.sizes == [64] * 3


def test_a_datamodule_and_its_hyperparameters_in_the_logger(train, device, tmp_path):
    class Data(LightningDataModule):
        def __init__(self, batch_size):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return loader(self.hparams.batch_size)

    module = Lawful(device, law)
    del module.batch_size
    logger = CSVLogger(tmp_path, name="", version="")
    train(PLAN, module, datamodule=Data(3), logger=logger)
    assert module.sizes == [64] * 3
    assert (tmp_path / "hparams.yaml").read_text() == "batch_size: 64\n"


def test_a_budget(train, device):
    class OfBudget(Lawful):
        max_tokens = 3

        def train_dataloader(self):
            # The batches of a budget count samples here.
            return loader(self.max_tokens)

    plan = replace(PLAN, place="max_tokens", budget_name="max_tokens")
    module, _, finder = train(plan, OfBudget(device, law))
    assert (module.sizes, module.batch_size) == ([64] * 3, 3)
    assert str(finder.plan).startswith("max_tokens 64, limited by memory")


def test_a_size_that_the_setup_of_the_module_sets(train, device):
    class SetsUp(Lawful):
        def setup(self, stage):
            self.batch_size = 3

    assert train(PLAN, SetsUp(device, law))[0].sizes == [64] * 3


def test_accumulation_settings_and_learning_rate(train, device):
    class WithRate(Lawful):
        lr = 0.1

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    settings = {"limit_train_batches": 12, "log_every_n_steps": 4}
    recipe = Recipe(64, 2, 1, 128, learning_rate=0.2, trainer_settings=settings)
    per_step = Sizes()
    module, trainer, finder = train(
        replace(
            PLAN, recipe=recipe, project_recipe=replace(PLAN.project_recipe, learning_rate=0.1)
        ),
        WithRate(device, law),
        per_step,
        max_steps=-1,
        max_epochs=1,
    )
    assert (module.sizes, per_step.per_step[:6]) == ([64] * 12, [128] * 6)
    assert (module.lr, trainer.optimizers[0].param_groups[0]["lr"]) == (0.2, 0.2)
    assert trainer.log_every_n_steps == 4
    assert finder.plan.recipe.learning_rates == (0.2,)


def test_each_fit_of_a_script_has_the_size_and_its_evaluations_too(train, device):
    class Judged(Lawful):
        def __init__(self):
            super().__init__(device, law)
            self.judged = []

        def validation_step(self, batch, batch_idx):
            self.judged.append(len(batch[0]))

        def val_dataloader(self):
            return loader(self.batch_size, 128)

        test_step, test_dataloader = validation_step, val_dataloader

    module, trainer, finder = train(PLAN, Judged(), num_sanity_val_steps=1)
    # The sanity check comes first.
    assert module.judged == [64]
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    assert module.judged == [64] * 5
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module)
    assert module.sizes == [64] * 6
    assert finder.plan.project_batch_size == 3


def test_a_second_fit_has_the_accumulation_of_the_first(train):
    plan = plan_with(PLAN, recipe=Recipe(64, 2, effective_batch_size=128, learning_rates=(0.001,)))
    module, trainer, finder = train(plan)
    assert "An optimizer step has 128 samples instead of 3" in str(finder.plan.notes)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module)
    assert trainer.global_step == 6
    assert (set(module.sizes), trainer.accumulate_grad_batches) == ({64}, 2)


def test_a_checkpoint_with_another_size(fit, train, device, tmp_path, recwarn):
    saver = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    searched = BatchFinder(objective="memory", max_batch_size=100)
    options = {"max_epochs": 1, "max_steps": -1, "enable_checkpointing": True}
    fit(Lawful(device, law), searched, device, saver, **options)
    assert searched.plan.batch_size == 100
    recwarn.clear()
    path = tmp_path / "last.ckpt"
    module, _, finder = train(PLAN, ckpt_path=path, max_epochs=2, max_steps=-1)
    assert set(module.sizes[:-1]) == {64}
    assert finder.plan.batch_size == finder.state_dict()["plan"]["batch_size"] == 64
    assert not [one for one in recwarn if "BatchFinder" in str(one.message)]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_the_finder_applies_its_plan_too(fit, device, copied):
    finder = copied(BatchFinder(plan=PLAN, apply=True))
    module = Lawful(device, law)
    fit(module, finder, device)
    assert module.sizes == [64] * 3


def test_the_plan_of_a_search_in_a_training(search, train, device, tmp_path):
    path = tmp_path / "plan.json"
    searched = search(Lawful(device, law), options={"plan": path, "max_batch_size": 50})
    module, _, finder = train(path)
    assert module.sizes == [50] * 3
    # The number of its steps, and the time of its search, are those of the first training.
    noted = plan_with(searched, notes=(Note("cost", "It took long."), *searched.notes))
    path.write_text(noted.to_json())
    module, _, finder = train(path)
    assert finder.plan.recipe == replace(searched.recipe, num_steps=None)
    assert finder.plan.notes == searched.notes
    assert (
        finder.plan.training
        == "steps of 3 -> 50 samples: 16.7 times the samples, learning rate 0.001 unchanged"
    )


@pytest.mark.parametrize("arguments", [{"fast_dev_run": True}, {"max_epochs": 0}])
def test_a_training_of_few_or_no_steps(train, arguments):
    module, _, _ = train(**{"max_steps": -1, **arguments})
    assert module.batch_size == 64
    assert len(module.sizes) == bool("fast_dev_run" in arguments)
