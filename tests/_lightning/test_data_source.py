import pickle

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_batchmem._lightning.data_source import WatchedFetches
from tests.helpers.lawful import quiet_trainer


class Watcher(Callback):
    """Notes requests and steps in their order."""

    def __init__(self):
        self.seen = []
        self.fetches = None

    def own(self):
        self.seen.append("request")

    def validation(self):
        self.seen.append("validation request")

    def on_train_start(self, trainer, pl_module):
        self.fetches = WatchedFetches(trainer, self.own, self.validation)
        # A loader that spawns workers may pickle the Trainer.
        pickle.dumps(trainer.fit_loop.epoch_loop._on_before_fetch.called)

    on_test_start = on_predict_start = on_train_start

    def on_train_batch_start(self, *_):
        self.seen.append("step")

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start

    def on_train_end(self, trainer, pl_module):
        self.fetches.close()

    on_test_end = on_predict_end = on_train_end


def test_each_batch_of_a_training_is_asked_for_before_its_step():
    watcher = Watcher()
    options = {"limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(watcher, max_epochs=2, **options)
    trainer.fit(BoringModel())
    assert watcher.seen == ["request", "step", "request", "step", "validation request", "step"] * 2
    for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop):
        assert "_on_before_fetch" not in vars(loop)


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_each_batch_of_an_evaluation_is_asked_for_before_its_step(stage):
    watcher = Watcher()
    watcher.on_test_start = watcher.on_predict_start = lambda trainer, module: setattr(
        watcher, "fetches", WatchedFetches(trainer, watcher.own, watcher.validation)
    )
    trainer = quiet_trainer(watcher, max_epochs=1, **{f"limit_{stage}_batches": 2})
    getattr(trainer, stage)(BoringModel())
    assert watcher.seen == ["request", "step"] * 2
