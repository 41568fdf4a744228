"""The number of samples of each batch, against the batches that Lightning makes."""

import pickle
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_batchmem._lightning.data_source import validation_loop
from lightning_batchmem._lightning.profiled_stage import BatchSamples, WatchedCalls, log_dir_of
from lightning_batchmem._lightning.trainer_state import _CallsBefore
from lightning_batchmem.devices.foreign_values import begin_run
from tests.helpers.lawful import quiet_trainer


class Flat(BoringModel):
    """Its batches are flattened, so that no dimension of a tensor is the samples."""

    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(1, 32)).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    def train_dataloader(self):
        return flat(10, 4)

    val_dataloader = train_dataloader


class Flattened:
    def __init__(self, samples):
        self.x = torch.ones(1, 3 * len(samples), 2)
        self.truth = len(samples)

    def to(self, device, **_):
        return self


def flat(samples, batch_size, **arguments):
    return DataLoader(range(samples), batch_size=batch_size, collate_fn=Flattened, **arguments)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def parts_of(batch):
    parts = batch.values() if isinstance(batch, dict) else [batch]
    return [part for part in parts if part is not None]


class Counts(Callback):
    """The samples of each batch that were counted, and the true ones."""

    def __init__(self):
        self.counted = []
        self.true = []

    def on_train_start(self, trainer, pl_module):
        self.samples = BatchSamples(trainer)

    def on_validation_start(self, trainer, pl_module):
        self.samples = BatchSamples(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.counted.append(self.samples.in_batch(batch, batch_idx, dataloader_idx))
        self.true.append(sum(part.truth for part in parts_of(batch)))

    on_validation_batch_end = on_train_batch_end


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_the_samples_of_several_loaders_are_their_sum(mode, drop_last):
    loaders = {
        "a": flat(10, 4, drop_last=drop_last),
        "b": flat(7, 1),
        "c": DataLoader(
            range(9),
            batch_sampler=BatchSampler(SequentialSampler(range(9)), 2, drop_last),
            collate_fn=Flattened,
        ),
    }
    counts = Counts()
    trainer = quiet_trainer(counts, max_epochs=2, limit_val_batches=0)
    trainer.fit(Flat(), CombinedLoader(loaders, mode))
    assert counts.counted == counts.true


def test_loaders_that_follow_each_other_have_numbers_of_their_own():
    counts = Counts()
    trainer = quiet_trainer(counts)
    trainer.validate(Flat(), [flat(10, 4), flat(5, 3)], verbose=False)
    assert counts.counted == counts.true == [4, 4, 2, 3, 2]


def test_the_last_batch_of_a_stream_is_unknown():
    counts = Counts()
    trainer = quiet_trainer(counts, max_epochs=1, limit_val_batches=0)
    trainer.fit(Flat(), DataLoader(Stream(), batch_size=4, collate_fn=Flattened))
    assert (counts.counted, counts.true) == ([4, 4, None], [4, 4, 2])


class Rows(torch.Tensor):
    truth = 0


def without_none(samples):
    kept = [sample for sample in samples if sample is not None]
    return torch.ones(len(kept), 2).as_subclass(Rows)


def whole_batches(samples):
    return torch.ones(7, 2).as_subclass(Rows)


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        # A full batch has shown that the first dimension is the samples.
        (
            DataLoader([1, 1, 1, 1, 1, None, 1, 1], batch_size=4, collate_fn=without_none),
            [4, 3],
        ),
        (DataLoader(Stream(), batch_size=4, collate_fn=without_none), [4, 4, 2]),
        # The samples of the data set are batches.
        (DataLoader(range(3), batch_size=1, collate_fn=whole_batches), [7, 7, 7]),
    ],
)
def test_rows_count_where_they_are_the_samples(loader, expected):
    counts = Counts()
    trainer = quiet_trainer(counts, max_epochs=1, limit_val_batches=0)
    trainer.fit(Flat(), loader)
    assert counts.counted == expected


class Budget(BatchSampler):
    """Its ``batch_size`` is a number of tokens."""

    def __iter__(self):
        yield from ([0, 1, 2], [3])

    def __len__(self):
        return 2


class OfAnotherLibrary:
    batch_size = 3

    def __iter__(self):
        yield from (Flattened(range(3)), Flattened(range(3)))

    def __len__(self):
        return 2


def test_loaders_of_other_kinds():
    budget = DataLoader(range(4), batch_sampler=Budget(range(4), 100, False), collate_fn=Flattened)
    # Without a size in the loader, the first dimension of the tensors counts.
    for loader, expected in ((budget, [1, 1]), (OfAnotherLibrary(), [3, None])):
        counts = Counts()
        trainer = quiet_trainer(counts, max_epochs=1, limit_val_batches=0)
        trainer.fit(Flat(), loader)
        assert counts.counted == expected


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


class Mocked:
    """What a mock of a logger has as its directory."""


class Kept(Logger):
    """Has whatever a test wants as its directory."""

    name = "kept"
    version = 0

    def __init__(self, directory):
        super().__init__()
        self.directory = directory

    @property
    def log_dir(self):
        return self.directory

    save_dir = log_dir

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params):
        pass


@pytest.fixture(autouse=True)
def _run():
    begin_run()


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ("logs", "logs"),
        (Path("logs"), "logs"),
        (b"logs", "logs"),
        ("", None),
        (None, None),
        (3, None),
        (Mocked(), None),
    ],
    ids=repr,
)
def test_a_log_directory_of_any_kind(directory, expected):
    assert log_dir_of(quiet_trainer(logger=Kept(directory))) == expected


class Failing(type(Path())):
    def __fspath__(self):
        raise OSError("no")


def test_a_log_directory_that_cannot_be_read_is_one_warning():
    trainer = quiet_trainer(logger=Kept(Failing("logs")))
    with pytest.warns(UserWarning, match="The log directory cannot be read") as caught:
        found = [log_dir_of(trainer) for _ in range(2)]
    assert found == [None, None]
    assert len(caught) == 1


def test_a_log_directory_whose_property_raises_is_a_warning(monkeypatch):
    trainer = quiet_trainer()
    monkeypatch.setattr(Trainer, "log_dir", property(lambda self: 1 / 0))
    with pytest.warns(UserWarning, match="cannot be read: ZeroDivisionError"):
        assert log_dir_of(trainer) is None
