"""find_batch_size: the plan of BatchFinder, and nothing else."""

import copy
import random
import re
import threading

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger

from lightning_batchmem import BatchFinder, find_batch_size
from tests.helpers.contract_cases import CASES, SIZE
from tests.helpers.lawful import MIB, Lawful, found_size, law, loader, quiet_trainer
from tests.helpers.outcomes import assert_same, outcome_of
from tests.helpers.plans import search_notes

# In each of these cases, a search could leave a trace in another way.
PROJECTS = [
    "onecycle_with_persistent_workers",
    "manual_two_optimizers",
    "datamodule_that_caches_a_random_split",
    "entangled_attributes",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "onecycle_of_a_loader_with_generators",
            "a_combined_loader",
            "validation_loaders_passed_too",
            "scaled_learning_rate",
            "weights_averaged_stochastically",
            "hooks_on_tensors_that_ask_the_trainer",
        )
    ),
]


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
@pytest.mark.parametrize("name", PROJECTS)
def test_a_training_after_a_search_is_the_training_without(name, tmp_path, monkeypatch):
    case = CASES[name]
    plans = []
    fit = Trainer.fit

    def search_and_fit(trainer, model, **data):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "fit", fit)
            plans.append(
                find_batch_size(
                    trainer, model, **data, max_batch_size=SIZE, **case.finder, objective="memory"
                )
            )
        fit(trainer, model, **data)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", search_and_fit)
        searched = outcome_of(tmp_path / "searched", case, 4, None)
    hard_coded = outcome_of(tmp_path / "hard", case, 4, None)
    assert [(plan.batch_size, plan.verified) for plan in plans] == [(SIZE, True)]
    for key, value in hard_coded.items():
        assert_same(searched[key], value, key)


class Forbidden(Callback):
    """A callback of which no hook may run."""


def forbidden(*_, **__):
    raise AssertionError("a hook was called")


for hook in dir(Callback):
    if hook.startswith(("on_", "setup", "teardown")):
        setattr(Forbidden, hook, forbidden)


class Project(Lawful):
    """The hooks that ran."""

    def __init__(self, device_memory):
        super().__init__(device_memory, law)
        self.save_hyperparameters({"lr": 1.0, "cannot_be_pickled": lambda: None})
        self.hooks = []
        self.fails_at = 0

    def configure_callbacks(self):
        return [Forbidden(), ModelCheckpoint(monitor="none")]

    def setup(self, stage):
        self.hooks.append("setup")
        self.added = torch.nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        if len(batch[0]) == self.fails_at:
            raise LookupError("of the user")
        return super().training_step(batch, batch_idx)


class Data(LightningDataModule):
    def __init__(self, calls):
        super().__init__()
        self.hooks = []
        # A function is not restored, but the object of a method is.
        self.note = lambda call: calls.append(call)

    def prepare_data(self):
        self.note("prepare_data")

    def setup(self, stage):
        self.note(f"setup {stage.value}")
        self.hooks.append("setup")

    def teardown(self, stage):
        self.note(f"teardown {stage.value}")

    def train_dataloader(self):
        return loader(self.trainer.lightning_module.batch_size)


@pytest.mark.filterwarnings("ignore:Attribute .cannot_be_pickled. removed from hparams")
@pytest.mark.parametrize("fails_at", [0, 8])
def test_everything_is_as_before(fails_at, device, reads_here, monkeypatch, tmp_path):
    monkeypatch.setattr(BatchFinder, "device_memory", lambda *_: device)
    seed_everything(5, verbose=False)
    calls = []
    options = {"max_epochs": 1, "logger": CSVLogger(tmp_path), "enable_checkpointing": True}
    module = Project(device)
    data = Data(calls)
    trainer = quiet_trainer(Forbidden(), default_root_dir=tmp_path, **options)
    module.fails_at = fails_at
    owners = (
        module,
        data,
        trainer,
        trainer.state,
        trainer.fit_loop,
        trainer.fit_loop.epoch_loop,
        *trainer.callbacks,
    )

    def state():
        lists = list(trainer.callbacks), list(trainer.loggers), dict(module.hparams)
        return [dict(vars(owner)) for owner in owners], lists, list(module.hooks), list(data.hooks)

    def numbers():
        return torch.get_rng_state(), random.getstate(), np.random.get_state()[1]

    state_before = state()
    numbers_before = numbers()
    weights = copy.deepcopy(module.state_dict())
    if fails_at:
        with pytest.raises(LookupError, match="of the user"):
            find_batch_size(trainer, module, data, objective="memory")
        # There is no teardown, as in a training that fails.
        assert calls == ["prepare_data", "setup fit"]
    else:
        assert find_batch_size(trainer, module, data, objective="memory").batch_size == found_size(
            500 * MIB
        )
        assert calls == ["prepare_data", "setup fit", "teardown fit"]
    assert state() == state_before
    assert_same(numbers(), numbers_before, "random states")
    assert_same(module.state_dict(), weights, "weights")
    assert trainer.optimizers == trainer.lr_scheduler_configs == []
    assert list(tmp_path.iterdir()) == []


class Sized:
    """Has the batch size in its class, and cannot be restored."""

    batch_size = 4

    def __init__(self):
        self.lock = threading.Lock()


class OtherData(LightningDataModule):
    batch_size = 4


class SizedElsewhere(Lawful):
    """Has the batch size in an object of another kind."""

    def __init__(self, device, sized):
        super().__init__(device, law)
        del self.batch_size
        self.sized = sized

    def train_dataloader(self):
        return loader(self.sized.batch_size)


@pytest.mark.parametrize("make", [Sized, lambda: Sized, OtherData])
@pytest.mark.filterwarnings("ignore:BatchFinder cannot restore these")
def test_the_size_is_as_before_where_it_is_not_in_a_plain_object(make, device, monkeypatch):
    module = SizedElsewhere(device, make())
    monkeypatch.setattr(BatchFinder, "device_memory", lambda finder, _: device)
    plan = find_batch_size(
        quiet_trainer(max_epochs=1),
        module,
        batch_arg_name="sized.batch_size",
        max_batch_size=8,
        objective="memory",
    )
    assert plan.batch_size == 8
    assert module.sized.batch_size == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda step, model: find_batch_size(step, step, model=model, optimizer=None),
        lambda step, model: find_batch_size(step, model),
        lambda step, model: find_batch_size(trainer=step, model=model),
    ],
)
def test_a_loop_without_a_trainer_has_a_function_of_its_own(call):
    message = r"takes the Trainer first, .*, got <function.* call find_batch_size_of_loop\(step, "
    with pytest.raises(ValueError, match=message):
        call(lambda batch: None, CASES["sgd_momentum"].module(4))


def test_arguments_by_name():
    trainer = quiet_trainer(max_epochs=1)
    module = CASES["sgd_momentum"].module(4)
    assert (
        find_batch_size(
            trainer=trainer, model=module, max_batch_size=8, objective="memory"
        ).batch_size
        == 8
    )


def test_a_trainer_that_would_not_train():
    trainer = quiet_trainer(max_epochs=0)
    module = CASES["sgd_momentum"].module(4)
    with pytest.raises(
        ValueError, match="find_batch_size cannot search: the trainer has fast_dev_run"
    ):
        find_batch_size(trainer, module, objective="memory")
    with pytest.raises(
        ValueError, match="max_batch_size must be a whole number of at least 1, got 0"
    ):
        find_batch_size(trainer, module, max_batch_size=0, objective="memory")


@pytest.mark.parametrize(("has_bar", "text"), [(False, r"\Z"), (True, r"(BatchFinder: .*\n)+\Z")])
def test_only_the_progress_is_printed(has_bar, text, device, reads_here, monkeypatch, capsys):
    monkeypatch.setattr(BatchFinder, "device_memory", lambda *_: device)
    trainer = quiet_trainer(max_epochs=1, enable_progress_bar=has_bar)
    capsys.readouterr()
    find_batch_size(trainer, Lawful(device, law), objective="memory")
    printed = capsys.readouterr()
    assert re.match(text, printed.out)
    assert printed.err == ""


def test_a_strategy_that_starts_the_training_in_other_processes():
    trainer = quiet_trainer(strategy="ddp_spawn", devices=2, max_epochs=1)
    with pytest.raises(ValueError, match="or a strategy that starts other processes"):
        find_batch_size(trainer, CASES["sgd_momentum"].module(4), objective="memory")


def test_the_callbacks_of_the_training_count(device, reads_here, monkeypatch):
    """As in ``fit``, a copy of the weights for their average takes memory."""
    monkeypatch.setattr(BatchFinder, "device_memory", lambda *_: device)
    trainers = (
        quiet_trainer(max_epochs=1),
        quiet_trainer(StochasticWeightAveraging(0.1), max_epochs=1),
    )
    plans = [
        find_batch_size(trainer, Lawful(device, law), objective="memory") for trainer in trainers
    ]
    # The copy has a weight and a bias of four bytes each.
    less = ["left 0.000 MiB of the limit free" in " ".join(search_notes(plan)) for plan in plans]
    assert less == [False, True]


def test_what_is_no_trainer_or_no_module_is_named():
    module = Lawful(None, law)
    with pytest.raises(ValueError, match="takes the Trainer first, and then the module"):
        find_batch_size(module, quiet_trainer(), objective="memory")
    with pytest.raises(ValueError, match=r"model must be a LightningModule, got <function"):
        find_batch_size(quiet_trainer(), lambda: module, objective="memory")
    with pytest.raises(ValueError, match=r"got \[\]\. Pass loaders as train_dataloaders=\.$"):
        find_batch_size(quiet_trainer(), module, [])
    with pytest.raises(TypeError, match=r"argument dataloaders\. find_batch_size takes train_"):
        find_batch_size(quiet_trainer(), module, dataloaders=[])
    with pytest.raises(TypeError, match=r"train_dataloader\. find_batch_size takes train_"):
        find_batch_size(quiet_trainer(), module, train_dataloader=[])
