"""What a search may change in a trainer, and what it leaves."""

import threading
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_batchmem import BatchFinder
from lightning_batchmem._lightning.clean_start import ProjectSnapshot, muted_trainer
from tests.helpers.lawful import Evaluated, quiet_trainer


def state_of(trainer):
    """Everything that the test below changes, as numbers and copies."""
    epoch_loop = trainer.fit_loop.epoch_loop
    optimizer_progress = epoch_loop.automatic_optimization.optim_progress.optimizer
    return {
        "progress": epoch_loop.batch_progress.current.ready,
        "optimizer steps": optimizer_progress.step.current.ready,
        "predicted": trainer.predict_loop.batch_progress.current.ready,
        "logged": list(epoch_loop._results),
        "validated": epoch_loop.val_loop._results.batch,
        "metrics": dict(trainer.callback_metrics),
        "scale": trainer.precision_plugin.scaler.get_scale(),
        "callbacks": list(trainer.callbacks),
        "loggers": [dict(vars(logger)) for logger in trainer.loggers],
        "attributes": [*vars(trainer), *vars(epoch_loop)],
    }


def test_the_trainer_is_restored_with_all_its_loops(tmp_path):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    trainer = quiet_trainer(Callback(), plugins=[plugin], logger=CSVLogger(tmp_path))
    before = state_of(trainer)
    with muted_trainer(trainer, ProjectSnapshot(LightningModule()), [Callback()]):
        epoch_loop = trainer.fit_loop.epoch_loop
        epoch_loop.batch_progress.increment_ready()
        epoch_loop.automatic_optimization.optim_progress.optimizer.step.increment_ready()
        trainer.predict_loop.batch_progress.increment_ready()
        epoch_loop._results.log("step", "loss", torch.ones(1))
        epoch_loop.val_loop._results.batch = 1
        trainer._logger_connector._callback_metrics["loss"] = 1
        plugin.scaler.scale(torch.ones(1))
        plugin.scaler.update(4.0)
        trainer.added = True
        # Any chain of calls and items works, and nothing is logged.
        trainer.loggers[0].experiment.anything().more[0](1)
        during = state_of(trainer)
    assert [name for name in before if during[name] == before[name]] == []
    assert state_of(trainer) == before
    assert list(tmp_path.iterdir()) == []


class Noted(Dataset):
    """Notes the samples that were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.read.append(index)
        return [torch.zeros(1)]


def test_loaders_of_validation_that_were_passed_leave_no_trace_either(fit, device):
    read = []
    noted = Noted()
    after = LambdaCallback(on_fit_start=lambda *_: read.append(list(noted.read)))
    loader = DataLoader(noted, batch_size=4)
    fit(Evaluated(device), BatchFinder(objective="memory"), device, after, val_dataloaders=loader)
    assert read == [[]]
    assert noted.read


class Counts:
    """A collate function that counts, in a lock and in a long list too."""

    def __init__(self):
        self.lock = threading.Lock()
        self.sizes = []
        self.words = [0] * 20_000
        self.stats = {"calls": [0], "lock": threading.Lock()}

    def __call__(self, samples):
        with self.lock, self.stats["lock"]:
            self.sizes.append(len(samples))
            self.words.append(len(samples))
            self.stats["calls"][0] += 1
        return default_collate(samples)

    collate = __call__


COLLATE = {
    "object": lambda counts: counts,
    "method": lambda counts: counts.collate,
    "partial": lambda counts: partial(counts.collate),
}


@pytest.mark.parametrize("kind", COLLATE)
def test_collate_functions_leave_no_trace(kind, fit, device, recwarn):
    counts = Counts()
    seen = []
    after = LambdaCallback(
        on_fit_start=lambda *_: seen.append(
            (list(counts.sizes), len(counts.words), list(counts.stats["calls"]))
        )
    )
    loader = DataLoader(Noted(), batch_size=4, collate_fn=COLLATE[kind](counts))
    fit(Evaluated(device), BatchFinder(objective="memory"), device, after, val_dataloaders=loader)
    assert seen == [([], 20_000, [0])]
    assert counts.sizes
    assert not [one for one in recwarn if "restore" in str(one.message)]


def test_what_a_collate_function_cannot_get_back_is_a_warning(fit, device):
    counts = Counts()
    counts.numbers = (number for number in range(3))

    class Makes(Evaluated):
        def val_dataloader(self):
            return DataLoader(Noted(), batch_size=4, collate_fn=counts)

    finder = BatchFinder(objective="memory")
    with pytest.warns(UserWarning, match=r"cannot restore these .*: collate_fn\.numbers"):
        fit(Makes(device), finder, device)
    passed = DataLoader(Noted(), batch_size=4, collate_fn=counts)
    with pytest.warns(UserWarning, match=r"cannot restore these .* loader\.collate_fn\.numbers"):
        fit(Evaluated(device), BatchFinder(objective="memory"), device, val_dataloaders=passed)
