"""What a search may change in a trainer, and what it leaves."""

import copy
import pickle
import threading
from contextlib import ExitStack
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_batchmem import BatchFinder
from lightning_batchmem._lightning import muted
from lightning_batchmem._lightning.clean_start import (
    ProjectSnapshot,
    muted_trainer,
)
from lightning_batchmem._lightning.muted import (
    MutedExperiment,
    muted_callback,
    muted_logger,
    muted_profiler,
)
from tests.helpers.lawful import FAST, Evaluated, quiet_trainer


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


# Callbacks, loggers and profilers do nothing in a search, and are as before after it.


class Plain(Callback):
    def __init__(self):
        self.calls = []
        self.queue = [1]

    def on_train_batch_end(self, *_):
        self.calls.append("hook")

    def add(self, value):
        self.queue.append(value)


class Slotted(Plain):
    __slots__ = ("spare", "unset")

    def __init__(self):
        super().__init__()
        self.spare = [1]


class OfInstance(Plain):
    """Has a hook as an attribute of the instance."""

    def __init__(self):
        super().__init__()
        self.on_train_batch_end = lambda *_: self.calls.append("own")
        self.last = 1


class Table(dict, Plain):
    """Python makes its objects in another way."""

    __hash__ = object.__hash__

    def __init__(self):
        dict.__init__(self, a=1)
        Plain.__init__(self)


MUTED = [Plain, Slotted, OfInstance, Table]


def kept(callback):
    """Names and values of all attributes of an object."""
    state = object.__getstate__(callback)
    attributes, slots = state if isinstance(state, tuple) else (state, {})
    # Lightning gives callbacks the last two.
    items = [item for item in attributes.items() if item[0] not in ("log", "log_dict")]
    return copied(items), copied(slots.items()), type(callback)


def copied(items):
    return [(name, list(value) if type(value) is list else value) for name, value in items]


@pytest.mark.parametrize("kind", MUTED)
@pytest.mark.parametrize("error", [None, LookupError, KeyboardInterrupt])
def test_a_callback_does_nothing_and_is_itself_again(kind, error):
    callback = kind()
    before = kept(callback)
    try:
        with muted_callback(callback):
            callback.on_train_batch_end(None, None, None, None, 0)
            assert callback.on_fit_start(1) is None
            if error is not None:
                raise error
    except (LookupError, KeyboardInterrupt):
        assert error is not None
    assert callback.calls == []
    assert kept(callback) == before
    callback.on_train_batch_end(None, None, None, None, 0)
    assert len(callback.calls) == 1


@pytest.mark.parametrize("kind", MUTED)
def test_what_a_step_does_with_hooks_is_gone(kind):
    callback = kind()
    before = kept(callback)
    with muted_callback(callback), muted_callback(callback):
        callback.on_train_end = print
        del callback.on_train_start
    assert kept(callback) == before


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, None])
def test_copies_of_what_is_muted_do_nothing_either(make_copy, tmp_path):
    make_copy = make_copy or (lambda value: pickle.loads(pickle.dumps(value)))
    callback = EarlyStopping("loss", patience=7)
    logger = CSVLogger(tmp_path / "logs")
    profiler = SimpleProfiler()
    with muted_callback(callback), muted_logger(logger), muted_profiler(profiler):
        copied = make_copy(callback)
        copied.on_fit_start()
        of_logger = make_copy(logger)
        of_logger.log_metrics({"loss": 1.0})
        of_logger.save()
        make_copy(profiler).start("step")
    assert (copied.patience, of_logger.save_dir) == (7, logger.save_dir)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_logger_is_read_and_logs_nothing(kind, tmp_path):
    logger = kind(tmp_path, name="mine", version=3)
    other = kind(tmp_path, name="other", version=4)
    names = ("name", "version", "save_dir", "log_dir", "root_dir")
    experiment = type(logger.experiment)
    before = [kept(logger), [getattr(logger, name) for name in names], [*vars(kind).items()]]
    files = list(tmp_path.rglob("*"))
    with muted_logger(logger), muted_logger(other), muted_logger(logger):
        assert type(logger) is kind
        assert [getattr(logger, name) for name in names] == before[1]
        logger.log_metrics({"loss": 1.0}, step=1)
        logger.log_hyperparams({"lr": 1.0})
        logger.experiment.add_scalar("loss", 1.0)
        assert isinstance(logger.experiment, experiment)
        assert float(logger.experiment.best) == 0.0
        logger.experiment = 1
        logger.save()
        logger.finalize("success")
    after = [kept(logger), [getattr(logger, name) for name in names], [*vars(kind).items()]]
    assert after == before
    assert list(tmp_path.rglob("*")) == files


class Inherits(CSVLogger):
    pass


def test_a_class_has_its_experiment_again_after_an_error(tmp_path):
    undo = ExitStack()
    undo.enter_context(muted_logger(Inherits(tmp_path)))
    assert "experiment" in vars(Inherits)
    with pytest.raises(LookupError), undo:
        raise LookupError
    assert "experiment" not in vars(Inherits)
    assert isinstance(Inherits.experiment, property)


@pytest.mark.parametrize("spec", [Logger, None])
def test_a_mock_of_a_logger_logs_nothing(spec):
    mock = Mock(spec=spec, version=3)
    with muted_logger(mock):
        assert mock.version == 3
        mock.experiment.log({"loss": 1.0})
        if spec is not None:
            mock.log_metrics({"loss": 1.0})
    assert mock.mock_calls == []


def test_a_profiler_is_read_and_records_nothing():
    profiler = SimpleProfiler()
    profiler.start("mine")
    profiler.stop("mine")
    before = kept(profiler)
    with muted_profiler(profiler):
        with profiler.profile("other"):
            profiler.start("third")
            profiler.stop("fourth")
        assert list(profiler.recorded_durations) == ["mine"]
    assert kept(profiler) == before
    assert len(profiler.recorded_durations["mine"]) == 1


def test_an_experiment_is_read_and_does_not_change(tmp_path):
    logger = CSVLogger(tmp_path)
    real = logger.experiment
    real.log_metrics({"loss": 1.0}, 1)
    real.sums = {"a": 2}
    with muted_logger(logger):
        experiment = logger.experiment
    assert (len(experiment.metrics), experiment.sums["a"]) == (1, 2)
    experiment.metrics.append(3)
    experiment.log_metrics({"loss": 2.0}, 2)
    experiment.sums["a"] = 3
    experiment.log_dir = None
    assert (len(real.metrics), real.sums, str(real.log_dir)) == (1, {"a": 2}, experiment.log_dir)
    assert logger.experiment is real


def test_an_experiment_that_does_not_exist_yet_accepts_anything():
    experiment = MutedExperiment()
    with experiment.run(1).child[3] as run:
        run.value[2] = 4
        assert run.name
    assert list(experiment.runs) == []


class Project(LightningModule):
    """Changes each callback in its steps, and may end a search."""

    batch_size = 2

    def __init__(self, error):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.error = error

    def training_step(self, batch, batch_idx):
        for callback in self.trainer.callbacks:
            if isinstance(callback, Plain):
                callback.add(batch_idx)
                callback.added = batch_idx
        if self.error is not None and len(batch) == 8:
            raise self.error
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self):
        return DataLoader(torch.ones(16, 4), batch_size=self.batch_size)


class After(Callback):
    """Writes down what others are, after the search that came before."""

    def __init__(self, others):
        self.others = others
        self.seen = []

    def on_fit_start(self, trainer, pl_module):
        self.seen = [kept(other) for other in self.others]
        methods = [*vars(trainer.logger).values(), *vars(trainer.profiler).values()]
        self.seen += [method for method in methods if method is muted._nothing]

    def on_exception(self, trainer, pl_module, exception):
        self.on_fit_start(trainer, pl_module)


@pytest.mark.parametrize("error", [None, LookupError("of a step"), KeyboardInterrupt()])
def test_a_search_leaves_callbacks_loggers_and_profilers_as_they_were(error, reads_here, tmp_path):
    plain = [kind() for kind in MUTED]
    logger = CSVLogger(tmp_path)
    profiler = SimpleProfiler()
    silent = LambdaCallback(on_train_batch_end=lambda *_: None)
    after = After([*plain, silent])
    finder = BatchFinder(max_batch_size=8, objective="memory")
    finder.policy = FAST
    callbacks = [finder, *plain, silent, after]
    trainer: Trainer = quiet_trainer(
        *callbacks, max_steps=1, logger=logger, profiler=profiler, log_every_n_steps=1
    )
    before = [kept(other) for other in after.others]
    of_classes = [[*vars(kind)] for kind in (CSVLogger, *map(type, plain))]
    if error is None:
        trainer.fit(Project(error))
    else:
        with pytest.raises((LookupError, KeyboardInterrupt, SystemExit)):
            trainer.fit(Project(error))
    assert after.seen == before
    assert [[*vars(kind)] for kind in (CSVLogger, *map(type, plain))] == of_classes
    assert trainer.callbacks[: len(callbacks)] == callbacks
    assert trainer.profiler is profiler
    # The next fit calls the hooks again.
    calls = {type(one): list(one.calls) for one in plain}
    assert all(bool(found) == (error is None) for found in calls.values()), calls
