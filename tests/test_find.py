"""find_batch_size: the plan of BatchFinder, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger

import lightning_batchmem.batch_finder
from lightning_batchmem import find_batch_size
from tests.lawful import MIB, Lawful, found_size, law, loader
from tests.test_contract import CASES, SIZE, assert_same, outcome_of

# ways of a search to leave a trace
PROJECTS = [
    "onecycle_of_a_loader_with_generators",
    *("onecycle_with_persistent_workers", "manual_two_optimizers", "validation_of_its_own_size", "a_combined_loader"),
    *("validation_loaders_passed_too", "scaled_learning_rate", "weights_averaged_stochastically"),
    *("datamodule_that_caches_a_random_split", "entangled_attributes", "hooks_on_tensors_that_ask_the_trainer"),
]


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
@pytest.mark.parametrize("name", PROJECTS)
def test_a_training_after_a_search_is_the_training_without(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, plans, fit = CASES[name], [], Trainer.fit

    def search_and_fit(trainer: Trainer, model: LightningModule, **data: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "fit", fit)
            plans.append(find_batch_size(trainer, model, **data, max_batch_size=SIZE, **case.finder))
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

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("on_", "setup", "teardown")):
            raise AssertionError(f"{name} was called")
        return super().__getattribute__(name)


class Project(Lawful):
    """The hooks that ran."""

    def __init__(self, device_memory: Any) -> None:
        super().__init__(device_memory, law)
        self.save_hyperparameters({"lr": 1.0, "cannot_be_pickled": lambda: None})
        self.hooks: list[str] = []
        self.fails_at = 0

    def configure_callbacks(self) -> list[Callback]:
        return [Forbidden(), ModelCheckpoint(monitor="none")]

    def setup(self, stage: Any) -> None:
        self.hooks.append("setup")
        self.added = torch.nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch[0]) == self.fails_at:
            raise LookupError("of the user")
        return super().training_step(batch, batch_idx)


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[str] = []
        OF_DATA.clear()

    def prepare_data(self) -> None:
        OF_DATA.append("prepare_data")

    def setup(self, stage: Any) -> None:
        OF_DATA.append(f"setup {stage.value}")
        self.hooks.append("setup")

    def teardown(self, stage: Any) -> None:
        OF_DATA.append(f"teardown {stage.value}")

    def train_dataloader(self) -> Any:
        return loader(self.trainer.lightning_module.batch_size)


OF_DATA: list[str] = []


def trainer_in(folder: Path) -> Trainer:
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=CSVLogger(folder),
        callbacks=[Forbidden()],
        max_epochs=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.filterwarnings("ignore:Attribute .cannot_be_pickled. removed from hparams")
@pytest.mark.parametrize("fails_at", [0, 8])
def test_everything_is_as_before(fails_at: int, fake_device: Any, monkeypatch: Any, tmp_path: Path) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    monkeypatch.setattr(lightning_batchmem.batch_finder, "device_memory_for", lambda device: device_memory)
    seed_everything(5, verbose=False)
    module, data, trainer = Project(device_memory), Data(), trainer_in(tmp_path)
    module.fails_at = fails_at
    owners = (module, data, trainer, trainer.state, trainer.fit_loop, trainer.fit_loop.epoch_loop, *trainer.callbacks)
    before = [dict(vars(owner)) for owner in owners]
    lists = [list(trainer.callbacks), list(trainer.loggers), dict(module.hparams), list(module.hooks), list(data.hooks)]
    numbers = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    if fails_at:
        with pytest.raises(LookupError, match="of the user"):
            find_batch_size(trainer, module, data)
        assert OF_DATA == ["prepare_data", "setup fit"]  # as in a training that fails
    else:
        assert find_batch_size(trainer, module, data).batch_size == found_size(500 * MIB)
        assert OF_DATA == ["prepare_data", "setup fit", "teardown fit"]
    assert [dict(vars(owner)) for owner in owners] == before
    assert [
        list(trainer.callbacks),
        list(trainer.loggers),
        dict(module.hparams),
        list(module.hooks),
        list(data.hooks),
    ] == lists
    assert_same((torch.get_rng_state(), random.getstate(), np.random.get_state()[1]), numbers, "random states")
    assert_same(dict(module.state_dict()), weights, "weights")
    assert trainer.optimizers == trainer.lr_scheduler_configs == []
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_that_would_not_train(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=0, accelerator="cpu", logger=False, enable_progress_bar=False)
    with pytest.raises(ValueError, match="trainer must be one that trains in this process for find_batch_size, got"):
        find_batch_size(trainer, CASES["sgd_momentum"].module(4))
    with pytest.raises(ValueError, match="max_batch_size must be a whole number of at least 1, got 0"):
        find_batch_size(trainer, CASES["sgd_momentum"].module(4), max_batch_size=0)


def test_the_callbacks_of_the_training_count(fake_device: Any, monkeypatch: Any) -> None:
    """As in ``fit``, a copy of the weights for their average takes memory."""
    device_memory = fake_device(budget_bytes=200 * MIB)
    monkeypatch.setattr(lightning_batchmem.batch_finder, "device_memory_for", lambda device: device_memory)
    limits = []
    for callbacks in ([], [StochasticWeightAveraging(0.1)]):
        trainer = Trainer(accelerator="cpu", callbacks=callbacks, logger=False, max_epochs=1, enable_progress_bar=False)
        limits.append(find_batch_size(trainer, Lawful(device_memory, law)).limit_bytes)
    assert limits == [190 * MIB, 190 * MIB - 8]  # two numbers of four bytes
