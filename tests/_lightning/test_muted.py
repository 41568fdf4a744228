"""Callbacks and loggers that steps of a search read."""

import copy
import pickle
import types
from collections import Counter
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler
from torch import nn

from lightning_batchmem._lightning.muted import (
    MutedExperiment,
    muted_callback,
    muted_logger,
    muted_profiler,
)


class Keeper(Callback):
    def __init__(self):
        self.queue = [1]
        self.table = torch.zeros(2)
        self.layers = [nn.Linear(1, 1)]
        self.mocks = [Mock()]
        self.average = nn.Linear(1, 1)
        self.graph = torch.zeros(2, requires_grad=True) * 1
        self.large = torch.zeros(2**24 + 1)
        self.calls = []

    def on_train_batch_end(self, *_):
        self.calls.append("hook")

    def __del__(self):
        self.average.requires_grad_(False)

    def add(self, value):
        self.queue.append(value)
        self.table += value
        self.count = value


def test_a_callback_is_read_and_does_not_change():
    keeper = Keeper()
    muted = muted_callback(keeper)
    assert isinstance(muted, Keeper)
    assert muted.__class__ is Keeper
    assert (type(muted).__name__, muted.state_key) == ("Keeper", keeper.state_key)
    muted.on_train_batch_end(None, None, None, None, 0)
    # What no step reads takes no memory.
    assert "table" not in vars(muted)
    muted.add(5)
    assert (muted.queue, muted.table.tolist(), muted.count) == ([1, 5], [5, 5], 5)
    assert (keeper.queue, keeper.table.tolist(), hasattr(keeper, "count")) == ([1], [0, 0], False)
    for name in ("layers", "mocks"):
        assert getattr(muted, name) == getattr(keeper, name)
        assert getattr(muted, name) is not getattr(keeper, name)
    for name in ("average", "large"):
        assert getattr(muted, name) is getattr(keeper, name)
    muted.graph.add_(1)
    assert keeper.graph.tolist() == [0, 0]
    del muted
    assert keeper.calls == []
    assert keeper.average.weight.requires_grad


def test_hooks_of_an_instance_do_nothing_either():
    called = []
    callback = LambdaCallback(on_fit_start=lambda *_: called.append(1))
    muted_callback(callback).on_fit_start(None, None)
    assert called == []
    assert muted_callback(EarlyStopping("loss", patience=7)).patience == 7


@pytest.mark.parametrize(
    ("mute", "kind", "method"),
    [
        (muted_callback, Callback, "setup"),
        (muted_logger, Logger, "log_metrics"),
        (muted_logger, None, "anything"),
    ],
)
def test_a_mock_is_read_and_counts_no_calls(mute, kind, method):
    mock = Mock(spec=kind, version=3)
    muted = mute(mock)
    assert muted.version == 3
    assert kind is None or isinstance(muted, kind)
    getattr(muted, method)({"loss": 1.0})
    if mute is muted_logger:
        muted.experiment.log({"loss": 1.0})
    assert mock.mock_calls == []


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_logger_is_read_and_logs_nothing(kind, tmp_path):
    logger = kind(tmp_path, name="mine", version=3)
    muted = muted_logger(logger)
    assert isinstance(muted, kind)
    assert muted_logger(muted) is muted
    for name in ("name", "version", "save_dir", "log_dir", "root_dir"):
        assert getattr(muted, name) == getattr(logger, name)
    muted.log_metrics({"loss": 1.0}, step=1)
    muted.log_hyperparams({"lr": 1.0})
    muted.experiment.add_scalar("loss", 1.0)
    muted.save()
    muted.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_a_profiler_is_read_and_records_nothing():
    profiler = SimpleProfiler()
    profiler.start("mine")
    profiler.stop("mine")
    muted = muted_profiler(profiler)
    assert isinstance(muted, SimpleProfiler)
    assert muted_profiler(muted) is muted
    with muted.profile("other"):
        muted.start("third")
        muted.recorded_durations["mine"] = []
    muted.stop("fourth")
    assert list(profiler.recorded_durations) == list(muted.recorded_durations) == ["mine"]
    assert len(profiler.recorded_durations["mine"]) == 1


def test_an_experiment_is_read_and_does_not_change(tmp_path):
    logger = CSVLogger(tmp_path)
    real = logger.experiment
    real.log_metrics({"loss": 1.0}, 1)
    real.sums = {"a": 2}
    experiment = muted_logger(logger).experiment
    assert isinstance(experiment, type(real))
    assert (len(experiment.metrics), experiment.sums["a"]) == (1, 2)
    experiment.metrics.append(3)
    experiment.log_metrics({"loss": 2.0}, 2)
    experiment.sums["a"] = 3
    experiment.log_dir = None
    assert (len(real.metrics), real.sums, str(real.log_dir)) == (1, {"a": 2}, experiment.log_dir)


def test_an_experiment_that_does_not_exist_yet_accepts_anything():
    experiment = MutedExperiment()
    assert isinstance(experiment, MutedExperiment)
    with experiment.run(1).child[3] as run:
        run.value[2] = 4
        assert run.name
    config = MutedExperiment({"lr": 0.1, "steps": [1]})
    assert (list(experiment.runs), len(experiment.metrics), float(experiment.best)) == ([], 0, 0.0)
    assert (config["lr"], config["steps"], len(config), list(config)) == (
        0.1,
        [1],
        2,
        ["lr", "steps"],
    )
    assert "lr" in config
    assert "loss" not in experiment.summary


class Values(list):
    """A container of the project's own type."""


class Registry(Callback):
    def __init__(self):
        self.values = Values([1])
        self.counts = Counter()

    def __len__(self):
        return len(self.values)

    def __contains__(self, value):
        return value in self.values

    def __call__(self, value):
        self.values.append(value)
        self.counts[value] += 1
        return len(self)


def test_special_methods_and_containers_of_other_types_are_those_of_the_search():
    registry = Registry()
    muted = muted_callback(registry)
    assert muted(7) == 2
    assert (7 in muted, len(muted), type(muted.values)) == (True, 2, Values)
    assert (registry.values, registry.counts) == ([1], Counter())


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickled])
def test_a_muted_callback_can_be_copied(make_copy):
    copied = make_copy(muted_callback(Registry()))
    copied.setup()
    assert len(copied) == 1


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_a_muted_logger_writes_nothing(make_copy, tmp_path):
    muted = muted_logger(CSVLogger(tmp_path / "logs"))
    copied = make_copy(muted)
    copied.log_metrics({"loss": 1.0})
    copied.save()
    assert (copied.save_dir, list(tmp_path.iterdir())) == (muted.save_dir, [])
    make_copy(muted_profiler(SimpleProfiler())).start("step")


class Lazy:
    """A descriptor that only instances may read."""

    def __get__(self, instance, kind):
        return instance.value


class OddLogger(CSVLogger):
    value = 1
    lazy = Lazy()


def test_attributes_that_a_class_cannot_tell_are_left_out(tmp_path):
    with pytest.warns(UserWarning, match="A class of the project cannot be read"):
        muted = muted_logger(OddLogger(tmp_path))
    assert muted.log_metrics({"loss": 1.0}) is None


def test_a_container_that_contains_itself_is_shared():
    callback = Keeper()
    callback.queue.append(callback.queue)
    assert muted_callback(callback).queue[0] == 1


class Slotted(Callback):
    __slots__ = ("queue", "unset")
    started = False

    def __init__(self):
        self.queue = [1]
        self.started = True

    def __eq__(self, other):
        return isinstance(other, Slotted) and self.queue == other.queue

    __hash__ = Callback.__hash__


def test_slots_and_attributes_that_hide_those_of_the_class():
    callback = Slotted()
    muted = muted_callback(callback)
    assert muted.started
    assert muted == callback
    muted.queue.append(2)
    assert (muted.queue, callback.queue) == ([1, 2], [1])
    assert not hasattr(muted, "unset")
    muted.unset = 3
    assert (muted.unset, hasattr(callback, "unset")) == (3, False)


REGISTERED = []


class Registering(type):
    def __init__(cls, *_, **__):
        REGISTERED.append("metaclass")


class Careful(Callback, metaclass=Registering):
    """Registers its subclasses and objects, and what is read and set."""

    def __init_subclass__(cls, *, name):
        REGISTERED.append(name)

    def __new__(cls):
        REGISTERED.append("object")
        return super().__new__(cls)

    def __getattribute__(self, name):
        REGISTERED.append(name)
        return super().__getattribute__(name)

    def __setattr__(self, name, value):
        REGISTERED.append(name)
        super().__setattr__(name, value)


class Registered(Careful, name="registered"):
    def __init__(self):
        self.count = 1


def test_nothing_is_registered():
    callback = Registered()
    muted_callback(callback)
    REGISTERED.clear()
    muted = muted_callback(callback)
    muted.count += 1
    assert muted.count == 2
    # The owner is read, as without the search.
    assert not {"registered", "metaclass", "object"} & {*REGISTERED}
    assert REGISTERED.count("count") == 0
    assert callback.count == 1


class Table(dict, Callback):
    """Python makes its objects in another way."""


@pytest.mark.parametrize("mute", [muted_callback, muted_profiler])
def test_a_base_that_is_built_in(mute):
    assert isinstance(mute(Table(a=1)), Table)


class Connects(CSVLogger):
    """Its property needs a client, which a muted logger does not make."""

    clients = 0

    def client(self):
        self.clients += 1
        return types.SimpleNamespace(url="address")

    @property
    def url(self):
        return self.client().url


def test_a_property_that_fails_on_the_copy_does_not_run_on_the_owner(tmp_path):
    logger = Connects(tmp_path)
    with pytest.raises(AttributeError):
        _ = muted_logger(logger).url
    assert logger.clients == 0
