"""What a search may change in a trainer, and what it leaves."""

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, Dataset

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
        "loggers": list(trainer.loggers),
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
