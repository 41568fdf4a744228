import pickle

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_batchmem._lightning.data_source import validation_loop
from lightning_batchmem._lightning.profiled_stage import WatchedCalls
from lightning_batchmem._lightning.trainer_state import _CallsBefore
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

    def after(self):
        self.seen.append("after")

    def end(self):
        self.seen.append("end")

    def on_train_batch_end(self, *_):
        assert self.seen[-1] == "end"
        self.seen.pop()

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def on_train_start(self, trainer, pl_module):
        self.fetches = WatchedCalls(trainer, self.own, self.validation, self.after, self.end)
        # A loader that spawns workers may pickle the Trainer.
        pickle.dumps(trainer.fit_loop.epoch_loop._on_before_fetch.functions)

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
    steps = ["request", "step", "request", "step", "after", "validation request", "step", "after"]
    assert watcher.seen == steps * 2
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop, validation_loop(trainer))
    progress = [one.batch_progress for one in loops[1:]]
    for owner in (trainer, *loops, *progress):
        assert not any(isinstance(value, _CallsBefore) for value in vars(owner).values())


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_each_batch_of_an_evaluation_is_asked_for_before_its_step(stage):
    watcher = Watcher()
    watcher.on_test_start = watcher.on_predict_start = lambda trainer, module: setattr(
        watcher,
        "fetches",
        WatchedCalls(trainer, watcher.own, watcher.validation, watcher.after, watcher.end),
    )
    trainer = quiet_trainer(watcher, max_epochs=1, **{f"limit_{stage}_batches": 2})
    getattr(trainer, stage)(BoringModel())
    assert watcher.seen == ["request", "step"] * 2


class Saver(Watcher):
    """Saves a checkpoint after a step, with what the project has in place of Lightning's method."""

    def on_train_batch_end(self, trainer, *_):
        super().on_train_batch_end()
        trainer.save_checkpoint("after a step")


class Setter(Watcher):
    """Sets something else in place of Lightning's method."""

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint = note


saved = []


def note(path):
    saved.append(path)


ONE_STEP = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0}


def test_what_a_project_has_set_is_called_and_stays():
    watcher = Saver()
    trainer = quiet_trainer(watcher, **ONE_STEP)
    trainer.save_checkpoint = note
    trainer.fit(BoringModel())
    assert saved == ["after a step"]
    assert trainer.save_checkpoint is note
    # The checkpoint, and the end of the epoch.
    assert watcher.seen == ["request", "step", "after", "after"]


def test_what_a_project_sets_later_stays():
    trainer = quiet_trainer(Setter(), **ONE_STEP)
    trainer.fit(BoringModel())
    assert trainer.save_checkpoint is note
