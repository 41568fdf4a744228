import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_batchmem._lightning.bounds import reached_samples, stage_bounds, training_bounds
from lightning_batchmem._lightning.data_source import stage_loaders
from lightning_batchmem.batches.loaders import LoaderInfo, count_samples
from lightning_batchmem.plan.options import UNBOUNDED_MAX_BATCH_SIZE, SearchOptions
from lightning_batchmem.plan.policy import SearchPolicy

MODES = ["min_size", "max_size", "max_size_cycle", "sequential"]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(100))


class SizedStream(Stream):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        if self.length is None:
            raise TypeError("no length")
        return self.length


def stage_of(*infos, mode="min_size"):
    combined = CombinedLoader([info.loader for info in infos], mode)
    return stage_loaders(combined, infos, "train_dataloader")


@pytest.mark.parametrize(
    ("mode", "last"), [("min_size", 3), ("max_size", 8), ("max_size_cycle", 8), ("sequential", 3)]
)
@pytest.mark.parametrize("factor", [1, 2])
def test_the_last_batch_is_that_of_the_loader_that_ends_the_epoch(mode, last, factor):
    def of(samples):
        dataset = TensorDataset(torch.zeros(samples * factor, 1))
        # The size of the loader is the batch size of the project, times the factor.
        return LoaderInfo(DataLoader(dataset, batch_size=4 * factor), 4 * factor, 4)

    # Beside it is a loader whose size is fixed.
    fixed = LoaderInfo(DataLoader(TensorDataset(torch.zeros(77, 1)), batch_size=5), 5, None)
    loaders = stage_of(fixed, of(58), of(33), mode=mode)
    assert loaders.last_batch_size(10) == last
    # All batches are full.
    assert loaders.last_batch_size(1) == 1
    assert stage_of(fixed).last_batch_size(10) == 5


def loader_of(samples, batch_size, drop_last, kind):
    dataset = TensorDataset(torch.zeros(samples, 1))
    if kind == "stream":
        return DataLoader(SizedStream(samples), batch_size=batch_size, drop_last=drop_last)
    if kind == "batch_sampler":
        return DataLoader(
            dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), batch_size, drop_last)
        )
    return DataLoader(dataset, batch_size=batch_size, drop_last=drop_last)


# The values are the samples, drop_last, the kind, the factor of the batch size, and a fixed size.
# The fixed size is used where the factor is None.
LOADERS = st.tuples(
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from(["plain", "batch_sampler", "stream"]),
    st.sampled_from([1, 1, 2, 3, None]),
    st.integers(1, 8),
)
STAGES = st.tuples(
    st.lists(LOADERS, min_size=1, max_size=3), st.sampled_from(MODES), st.integers(1, 4)
)
LIMITS = st.one_of(st.integers(1, 50), st.just(1.0), st.floats(0.01, 1.0))


def settings_of_trainer(**settings):
    defaults = {
        "limit_train_batches": 1.0,
        "limit_val_batches": 1.0,
        "overfit_batches": 0.0,
        "max_steps": -1,
        "val_check_interval": 1.0,
    }
    return SimpleNamespace(
        **{**defaults, "check_val_every_n_epoch": 1, "accumulate_grad_batches": 1, **settings}
    )


def largest(loaders, limit):
    trainer = settings_of_trainer(limit_train_batches=limit)
    return min(size for size, _ in stage_bounds(trainer, "train", loaders))


def stage_at(stage, batch_size):
    """The stage as a project builds it at ``batch_size``."""
    made, mode, _ = stage
    sized = []
    for samples, drop_last, kind, times, fixed in made:
        size = fixed if times is None else times * batch_size
        loader = loader_of(samples, size, drop_last, kind)
        sized.append(LoaderInfo(loader, size, None if times is None else batch_size))
    return stage_of(*sized, mode=mode)


@pytest.mark.parametrize(
    ("of_trainer", "arguments", "reached", "reached_by_two_ranks"),
    [
        ({}, {}, 100, 100),
        # A batch more, because the number of batches is rounded down.
        ({"limit_train_batches": 0.25}, {}, 26, 28),
        ({"limit_train_batches": 0.25}, {"shuffle": True}, math.inf, math.inf),
        ({"limit_train_batches": 0.25, "overfit_batches": 0.25}, {"shuffle": True}, 26, 28),
        # There are at most 4 samples in a batch.
        ({"limit_train_batches": 3}, {}, 12, 24),
        ({"max_steps": 5, "accumulate_grad_batches": 2}, {}, 40, 80),
        ({"limit_train_batches": 0.001}, {}, 1, 2),
        (
            {"limit_train_batches": 3},
            {"sampler": SubsetRandomSampler(range(50))},
            math.inf,
            math.inf,
        ),
    ],
)
def test_the_samples_that_a_training_reaches(of_trainer, arguments, reached, reached_by_two_ranks):
    loader = DataLoader(range(100), batch_size=2, **arguments)
    trainer = settings_of_trainer(
        callbacks=[], lightning_module=SimpleNamespace(automatic_optimization=True), **of_trainer
    )
    assert reached_samples(trainer, "train", 4, LoaderInfo(loader, 2, 2)) == reached
    of_two_ranks = LoaderInfo(loader, 2, 2, replicas=2)
    assert reached_samples(trainer, "train", 4, of_two_ranks) == reached_by_two_ranks


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@given(stage=STAGES, batch_size=st.integers(1, 50))
@settings(deadline=None)
def test_batches_are_those_of_lightning(stage, batch_size):
    loaders = stage_at(stage, batch_size)
    expected = len(iter(loaders.combined))
    # These loaders were made at another size.
    assert stage_at(stage, stage[2]).batches(batch_size) == expected
    assert loaders.batches(batch_size) == expected


@pytest.mark.slow
@given(stage=STAGES, limit=LIMITS)
@settings(deadline=None)
def test_the_largest_size_is_the_largest_that_lightning_trains_a_full_batch_of(stage, limit):
    def trains(batch_size):
        at_size = stage_at(stage, batch_size)
        followers = [info for info in at_size.sized if info.requested_at is not None]
        if any(info.size > count_samples(info.loader) for info in followers):
            return False
        try:
            limits = [
                _parse_num_batches(RunningStage.TRAINING, len(info.loader), limit)
                for info in followers
            ]
        except MisconfigurationException:
            return False
        return all(limit > 0 for limit in limits)

    loaders = stage_at(stage, stage[2])
    if not loaders.follows:
        assert largest(loaders, limit) == UNBOUNDED_MAX_BATCH_SIZE
        return
    trained_sizes = [size for size in range(1, 42) if trains(size)]
    assert largest(loaders, limit) == max(trained_sizes, default=0)


def test_streams_have_no_bound_and_no_end():
    stream = LoaderInfo(DataLoader(Stream(), batch_size=4), 4, 4)
    sized = LoaderInfo(loader_of(40, 4, False, "plain"), 4, 4)
    alone = stage_of(stream)
    assert largest(alone, 1.0) == UNBOUNDED_MAX_BATCH_SIZE
    assert alone.follows
    for mode, batches in zip(MODES, [10, math.inf, math.inf, math.inf], strict=True):
        both = stage_of(stream, sized, mode=mode)
        assert largest(both, 1.0) == 40
        assert both.batches(4) == batches


def one_loader(samples, *, drop_last=False, requested_at=2):
    return stage_of(LoaderInfo(loader_of(samples, 2, drop_last, "plain"), 2, requested_at))


@pytest.mark.parametrize(
    ("limit", "size"), [(1.0, 100), (5, 100), (0.5, 99), (0.1, 11), (0.03, 3), (0.001, 0)]
)
def test_a_fraction_must_leave_a_batch(limit, size):
    """0.1 of the batches is one only where there are ten: 9 of 11 samples and one of 1."""
    assert largest(one_loader(100), limit) == size


# The Trainer copies overfit_batches to the other two settings.
OVERFIT = dict.fromkeys(("overfit_batches", "limit_train_batches", "limit_val_batches"), 0.1)


# The Trainer of lightning 2.6 has this attribute too.
OF_2_6 = {"_val_check_time_interval": None}


@pytest.mark.parametrize(
    ("settings", "validation", "expected"),
    [
        # Without drop_last, 30 samples make at least one batch of any size.
        ({}, one_loader(30), (1000, "dataset")),
        ({}, one_loader(30, drop_last=True), (30, "validation data")),
        ({}, one_loader(30, drop_last=True, requested_at=None), (1000, "dataset")),
        ({}, one_loader(0, drop_last=True), (1000, "dataset")),
        # 30 samples make ten batches of 3, and 0.1 of ten batches is one.
        ({"limit_val_batches": 0.1}, one_loader(30), (3, "limit_val_batches")),
        ({"limit_val_batches": 5}, one_loader(30), (1000, "dataset")),
        ({"limit_train_batches": 0.1}, one_loader(30), (111, "limit_train_batches")),
        (OVERFIT, None, (111, "overfit_batches")),
        (OVERFIT, one_loader(30), (3, "overfit_batches")),
        ({"val_check_interval": 50}, None, (20, "val_check_interval")),
        ({"val_check_interval": 50, "limit_train_batches": 0.5}, None, (10, "val_check_interval")),
        ({"val_check_interval": 50, "limit_train_batches": 40}, None, (0, "val_check_interval")),
        ({"val_check_interval": 50, "check_val_every_n_epoch": None}, None, (1000, "dataset")),
        ({"val_check_interval": 0.01}, None, (1000, "dataset")),
        # Lightning 2.5.0 refuses a longer interval also without validation.
        ({"val_check_interval": 50, "limit_val_batches": 0}, None, (20, "val_check_interval")),
        ({**OF_2_6, "val_check_interval": 50}, None, (20, "val_check_interval")),
        (
            {**OF_2_6, "val_check_interval": 50, "limit_val_batches": 0},
            None,
            (1000, "dataset"),
        ),
    ],
)
def test_settings_that_bound_the_size(settings, validation, expected):
    options = SearchOptions(min_steps_per_epoch=None)
    trainer = settings_of_trainer(**settings)
    bounds = training_bounds(trainer, one_loader(1000), validation, options, SearchPolicy(), None)
    assert min(bounds, key=lambda bound: bound[0]) == expected


def test_an_interval_of_time_does_not_bound_the_size():
    trainer = settings_of_trainer(_val_check_time_interval=600.0)
    del trainer.val_check_interval
    options = SearchOptions(min_steps_per_epoch=None)
    bounds = training_bounds(trainer, one_loader(1000), None, options, SearchPolicy(), None)
    assert min(bounds, key=lambda bound: bound[0]) == (1000, "dataset")


@pytest.mark.parametrize(
    ("arguments", "settings", "project_size", "expected"),
    [
        ({}, {}, None, 100),
        ({}, {}, 300, 300),
        ({"min_batch_size": 200}, {}, 32, 200),
        ({"min_steps_per_epoch": 30}, {}, 32, 33),
        ({"min_steps_per_epoch": 2000}, {}, None, 2),
        ({}, {"accumulate_grad_batches": 4}, 2, 25),
        ({}, {"limit_train_batches": 0.5}, 2, 50),
        ({}, {"limit_train_batches": 10}, 2, 100),
        ({}, {"limit_train_batches": 3}, 2, "limit_train_batches"),
        ({}, {"limit_train_batches": 3, "overfit_batches": 3}, 2, "overfit_batches"),
        ({"min_steps_per_epoch": None}, {}, 2, None),
        ({"max_batch_size": 900}, {}, 2, None),
        ({"target_batch_size": 900}, {}, 2, None),
    ],
)
def test_an_epoch_keeps_optimizer_steps(arguments, settings, project_size, expected):
    options = SearchOptions(objective="memory", **arguments)
    trainer = settings_of_trainer(**settings)
    bounds = training_bounds(trainer, one_loader(1000), None, options, SearchPolicy(), project_size)
    sizes = {reason: size for size, reason in bounds}
    if isinstance(expected, str):
        # With three batches an epoch has three steps up to 333 samples.
        assert bounds[-1] == (333, expected)
        expected = None
    assert sizes.get("min_steps_per_epoch") == expected


def test_steps_of_an_epoch_on_ranks_and_of_streams():
    ranks = LoaderInfo(loader_of(1000, 2, False, "plain"), 2, 2, replicas=4)
    stream = LoaderInfo(DataLoader(Stream(), batch_size=2), 2, 2)
    for info, expected in ((ranks, 25), (stream, UNBOUNDED_MAX_BATCH_SIZE)):
        bounds = training_bounds(
            settings_of_trainer(), stage_of(info), None, SearchOptions(), SearchPolicy(), None
        )
        assert bounds[-1] == (expected, "min_steps_per_epoch")


def test_a_loader_of_half_the_size_follows_it_downwards():
    half = LoaderInfo(loader_of(10, 1, False, "plain"), 1, 2)
    assert [half.size_at(size) for size in (1, 2, 3, 4, 20)] == [1, 1, 1, 2, 10]
    assert largest(stage_of(half), 1.0) == 21
