import copy
import inspect
import logging
import pickle
import random
import re
import signal
import traceback
from unittest.mock import MagicMock, Mock, create_autospec
from weakref import ref

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import (
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import BatchFinder, MemoryProfiler, Plan
from lightning_batchmem._lightning import finder_run
from lightning_batchmem._lightning.errors import reason_of
from lightning_batchmem._lightning.trainer_state import trains_no_more
from lightning_batchmem.devices.host import HostMemory
from lightning_batchmem.find import SearchOnly
from lightning_batchmem.plan.policy import SearchPolicy, StepPolicy
from tests.helpers.lawful import (
    MIB,
    SAMPLES,
    Evaluated,
    Lawful,
    Sizes,
    found_size,
    law,
    loader,
    quiet_trainer,
)
from tests.helpers.plans import search_notes

PROJECT_SIZE = 3
# The fixture `device` has this budget.
BUDGET = 500 * MIB
FOUND = found_size(BUDGET, multiple_of=1)

# --- the search


def test_the_size_is_the_largest_that_fits_and_training_uses_it(search, device, capsys):
    sizes = Sizes()
    module = Lawful(device, law)
    plan = search(module, sizes, max_steps=3)
    assert isinstance(plan, Plan)
    assert plan.batch_size == module.batch_size == FOUND
    assert sizes.seen == {FOUND}
    assert (plan.limited_by, plan.verified, plan.limit_bytes) == ("memory", True, 475 * MIB)
    assert plan.measured_peak_bytes == law(FOUND)
    assert plan.predicted_peak_bytes == pytest.approx(law(FOUND), rel=1e-6)
    assert len({trial.batch_size for trial in plan.trials}) <= 5
    assert device.num_ooms == 0
    assert Plan.from_json(plan.to_json()) == plan
    note = "If you compute values from `batch_size` in __init__ or setup, they keep the old size."
    assert search_notes(plan).count(note) == 1
    printed = capsys.readouterr().out
    assert printed == f"{plan.short_text()}\n"
    rows = [line for line in printed.splitlines() if not line.startswith(" " * 12)]
    assert len(rows) <= 8


@pytest.mark.parametrize(
    ("options", "budget_mib", "size", "limited_by"),
    [
        ({"multiple_of": None}, 1000, found_size(1000 * MIB), "memory"),
        (
            {"memory_limit": "600MiB"},
            1000,
            found_size(1000 * MIB, memory_limit=600 * MIB, multiple_of=1),
            "memory",
        ),
        ({"max_batch_size": 40}, 10**6, 40, "max_batch_size"),
        ({"multiple_of": 7, "max_batch_size": 50}, 10**6, 49, "max_batch_size"),
        ({}, 10**6, SAMPLES, "dataset"),
        ({"min_steps_per_epoch": 10}, 1000, SAMPLES // 10, "min_steps_per_epoch"),
    ],
)
def test_limits_of_the_size(search, device, options, budget_mib, size, limited_by):
    device.budget = budget_mib * MIB
    plan = search(Lawful(device, law), options=options)
    assert (plan.batch_size, plan.limited_by) == (size, limited_by)


def test_the_reason_names_equal_batches_of_an_optimizer_step(search, device):
    options = {"target_batch_size": 100, "max_batch_size": 40}
    plan = search(Lawful(device, law), options=options)
    assert plan.batch_size == 25
    equal = " The batches of an optimizer step have equal sizes."
    assert plan.reason == f"25 samples: max_batch_size is 40.{equal}"
    plan = search(Lawful(device, law), options={**options, "max_batch_size": 50})
    assert (plan.batch_size, equal in plan.reason) == (50, False)


def test_a_limit_out_of_range(fit, fake_device):
    device = fake_device(available_bytes=100 * MIB, base_bytes=60 * MIB)
    with pytest.warns(UserWarning, match="more than the GPU can provide, 100.0 MiB"):
        fit(
            Lawful(device, lambda size: size * MIB),
            BatchFinder(memory_limit=200 * MIB, objective="memory"),
            device,
        )
    message = "memory_limit must be above the 60.0 MiB that the process already takes, got 50.0 MiB"
    with pytest.raises(ValueError, match=message) as raised:
        fit(Lawful(device, law), BatchFinder(memory_limit="50MiB", objective="memory"), device)
    # The note about other callbacks belongs to errors of the user's code.
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize(
    ("copy_mib", "name", "warnings"), [(20, "cuda", 1), (2, "cuda", 0), (20, "host", 0)]
)
def test_more_memory_in_use_than_in_the_search_is_one_warning(
    fit, fake_device, recwarn, copy_mib, name, warnings
):
    device = fake_device(available_bytes=BUDGET, base_bytes=10 * MIB)
    if name == "host":
        device.as_host()
    # The callback takes memory, as a copy of the weights does.
    copies = LambdaCallback(on_train_start=lambda *_: device.use(copy_mib * MIB))
    fit(Lawful(device, law), BatchFinder(max_batch_size=16, objective="memory"), device, copies)
    messages = [str(one.message) for one in recwarn if "Training begins with" in str(one.message)]
    assert len(messages) == warnings
    assert all("with 20.0 MiB more in use than the search did" in text for text in messages)
    # On CUDA a lower memory_limit would be enforced in training too.
    assert all(text.endswith("set a smaller max_batch_size.") for text in messages)


@pytest.mark.parametrize(("longest", "count"), [(4, 1), (1, 0)])
def test_a_batch_larger_than_all_measured_ones_is_one_warning(
    fit, fake_device, recwarn, longest, count
):
    device = fake_device(available_bytes=BUDGET, base_bytes=10 * MIB)
    module = Lawful(device, law)
    samples = [torch.zeros(1) for _ in range(100)]
    module.train_dataloader = lambda: DataLoader(
        samples, module.batch_size, collate_fn=lambda batch: [pad_sequence(batch, True)]
    )

    def add_longer_samples(*_):
        samples[70:] = [torch.zeros(longest)] * 30

    callback = LambdaCallback(on_train_start=add_longer_samples)
    finder = BatchFinder(max_batch_size=20, min_steps_per_epoch=None, objective="memory")
    fit(module, finder, device, callback, max_steps=5)
    assert module.batch_size == 20
    messages = [str(warning.message) for warning in recwarn]
    messages = [text for text in messages if "A training batch has" in text]
    assert len(messages) == count
    assert all("max_batch_size=5." in text for text in messages)


def test_an_error_when_nothing_fits_lists_the_memory(search, device):
    device.budget = 100 * MIB
    module = Lawful(device, law)
    with pytest.raises(RuntimeError) as error:
        search(module)
    for part in (
        "Nothing fits",
        "95.0 MiB",
        "parameters",
        "optimizer state",
        "activations",
        "Use a smaller",
    ):
        assert part in str(error.value), part
    assert (module.batch_size, module.sizes) == (PROJECT_SIZE, [])


def test_objective_throughput_ends_at_a_smaller_size(search, device, monkeypatch):
    # Time passes only in steps.
    now = [0.0]
    monkeypatch.setattr("lightning_batchmem.search.steps.time.perf_counter", lambda: now[0])

    def timed(size):
        now[0] += 0.01 + 1e-4 * size
        return 100 * MIB + size * MIB // 4

    device.budget = 2000 * MIB
    plan = search(Lawful(device, timed), options={"objective": "throughput"})
    assert plan.limited_by == "throughput"
    # 2,048 samples have 98 % of the throughput at 4,096, and 1,024 have 93 %.
    assert plan.batch_size == plan.fastest_batch_size == 2048
    sizes = [trial.batch_size for trial in plan.trials]
    # 2,048 and 4,096 are the first two sizes in a row that gain less than 5 %.
    assert sizes == [*(2**power for power in range(1, 13)), 2048]
    assert [trial.kind for trial in plan.trials] == ["probe"] * 12 + ["rehearsal"]
    assert plan.trials[-1].samples_per_s == pytest.approx(2048 / 0.2148)


def test_the_whole_optimizer_step_is_timed_under_a_target(search, device, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("lightning_batchmem.search.steps.time.perf_counter", lambda: now[0])

    def timed(size):
        now[0] += 1e-4 * size
        return 100 * MIB + size * MIB // 4

    class SlowUpdate(Lawful):
        def optimizer_step(self, *arguments):
            super().optimizer_step(*arguments)
            now[0] += 0.1

    device.budget = 2000 * MIB
    options = {"objective": "throughput", "target_batch_size": 1024}
    plan = search(SlowUpdate(device, timed), options=options)
    # An optimizer step of 1,024 samples takes 0.1024 s and an update of 0.1 s at any size.
    assert plan.trials[0].samples_per_s == pytest.approx(1024 / 0.2024, rel=0.01)
    assert (plan.batch_size, plan.accumulate_grad_batches) == (2, 512)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_tiny_data_set(search, device, samples):
    plan = search(NoSize(device, law), train_dataloaders=loader(1, samples))
    assert (plan.batch_size, plan.limited_by) == (samples, "dataset")
    # A data set of one sample is smaller than the first size of a search.
    assert plan.verified == (samples > 1)
    # No attribute has the size, so no value can be computed from it.
    assert not any("If you compute values" in note for note in search_notes(plan))


@pytest.mark.parametrize(
    "arguments", [{"fast_dev_run": True}, {"max_epochs": 0}, {"limit_train_batches": 0}]
)
def test_no_search_without_training(search, device, arguments):
    module = Lawful(device, law)
    assert search(module, **arguments) is None
    assert module.batch_size == PROJECT_SIZE


@pytest.mark.parametrize("name", ["max_epochs", "max_steps", "limit_train_batches"])
def test_a_limit_of_0_ends_a_training_from_a_checkpoint_too(name):
    trainer = quiet_trainer(**{name: 0})
    trainer.ckpt_path = "any.ckpt"
    assert trains_no_more(trainer)


@pytest.mark.parametrize(
    ("limit", "more"),
    [({"max_epochs": 1, "max_steps": -1}, {"max_epochs": 2}), ({"max_steps": 1}, {"max_steps": 2})],
)
def test_a_fit_that_trains_no_more_does_not_search(fit, device, limit, more):
    finder = BatchFinder(multiple_of=1, max_batch_size=4, objective="memory")
    module = Lawful(device, law)
    trainer = fit(module, finder, device, limit_train_batches=1, **limit)
    first = finder.plan
    trainer.fit(module)
    assert finder.plan is first
    for name, value in more.items():
        owner = trainer.fit_loop if name == "max_epochs" else trainer.fit_loop.epoch_loop
        setattr(owner, name, value)
    trainer.fit(module)
    assert finder.plan is not first


def test_a_fit_after_an_error_in_setup_and_a_second_fit_search(fit, device):
    class FailsOnce(Lawful):
        def setup(self, stage):
            if not self.sizes:
                self.sizes.append(0)
                raise FileNotFoundError("no such file")

    finder = BatchFinder(multiple_of=1, objective="memory")
    module = FailsOnce(device, law)
    with pytest.raises(FileNotFoundError):
        fit(module, finder, device, max_steps=-1, max_epochs=1)
    trainer = module.trainer
    # The search has removed its hook from the strategy.
    assert "setup_optimizers" not in vars(trainer.strategy)
    trainer.fit(module)
    assert module.batch_size == FOUND
    device.budget = 300 * MIB
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert finder.plan is not None
    # It also runs the size that the first fit has found.
    size = found_size(300 * MIB, multiple_of=1)
    assert finder.plan.batch_size == module.batch_size == pytest.approx(size, rel=0.03)


class RatedEvaluated(Evaluated):
    lr = 0.1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("stages", [["validate", "fit"], ["fit", "test", "fit"]])
def test_an_evaluation_before_a_training_changes_nothing_in_it(stages, reads_here, fake_device):
    # More samples fit than ten steps of an epoch leave to one of them.
    device = fake_device(available_bytes=4000 * MIB)
    module = RatedEvaluated(device)
    finder = BatchFinder(lr_scaling="linear", objective="memory")
    finder.device_memory = lambda _: device
    trainer = quiet_trainer(finder, max_epochs=1, limit_train_batches=10, limit_val_batches=1)
    plans = {}
    for number, stage in enumerate(stages):
        # Otherwise the second training would have no epoch.
        trainer.fit_loop.max_epochs = number + 1
        getattr(trainer, stage)(module)
        plans[stage] = finder.plan
    largest = SAMPLES // 10
    if "validate" in stages:
        assert plans["validate"].batch_size > largest
    assert (plans["fit"].batch_size, plans["fit"].limited_by) == (largest, "min_steps_per_epoch")
    assert module.batch_size == largest
    assert module.lr == 0.1 * (largest / PROJECT_SIZE)


@pytest.fixture
def trained(reads_here, device):
    """A module, a Trainer and its finder after a search and a training."""
    module = RatedEvaluated(device)
    finder = BatchFinder(objective="memory", multiple_of=1, min_steps_per_epoch=None)
    finder.device_memory = lambda _: device
    trainer = quiet_trainer(finder, max_epochs=1, limit_train_batches=2, limit_test_batches=1)
    Tuner(trainer).lr_find(module, num_training=3)
    return module, trainer, finder


def test_a_fit_after_lr_find_rehearses_the_size_that_was_found(trained):
    module, trainer, finder = trained
    found = finder.plan
    assert len(found.trials) > 2
    module.sizes.clear()
    trainer.fit(module)
    assert set(module.sizes) == {found.batch_size} == {finder.plan.batch_size}
    assert "the size of an earlier plan" in finder.plan.reason
    # Another limit is another question.
    finder._run.end()
    finder.device_memory(None).budget //= 2
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert finder.plan.batch_size < found.batch_size


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_after_a_fit_keeps_its_size(trained, stage, caplog):
    module, trainer, finder = trained
    trainer.fit(module)
    plan = finder.plan
    module.evaluated.clear()
    with caplog.at_level(logging.INFO):
        getattr(trainer, stage)(module)
    assert f"the project has batch size {plan.batch_size}, which fit has found" in caplog.text
    assert finder.plan is plan
    assert plan.batch_size in module.evaluated
    # Loaders that are passed, and another size, are questions that no plan has answered.
    for size, passed in ((plan.batch_size, loader(7)), (5, None)):
        module.batch_size = size
        getattr(trainer, stage)(module, dataloaders=passed)
        assert finder.plan is not plan
        finder.plan = plan


def test_another_module_that_has_this_size_too_is_searched(trained):
    """Whatever its size is, the plan was found for other layers."""
    module, trainer, finder = trained
    found = finder.plan
    other = RatedEvaluated(finder.device_memory(None))
    other.batch_size = found.batch_size
    other.factor = 8
    trainer.test(other)
    assert finder.plan.batch_size == max(other.evaluated) < found.batch_size == other.batch_size
    use = other.use
    other.use = lambda size: use(size // 16)
    trainer.fit(other)
    assert finder.plan.batch_size > found.batch_size
    # Back to the first one.
    trainer.fit_loop.max_epochs += 1
    trainer.fit(module)
    assert finder.plan.batch_size == found.batch_size


def test_plans_of_a_process_are_no_leak(search, device):
    plans = finder_run._PLANS_OF_PROCESS
    for _ in range(plans.maxlen):
        plans.append((ref(device), None))
    search(Lawful(device, law))
    assert len(plans) == plans.maxlen
    assert plans[-1][1].batch_size == FOUND
    plans.clear()


def test_an_evaluation_that_fails_restores_the_size_of_the_project(reads_here, device):
    module = Evaluated(device)
    finder = BatchFinder(objective="memory")
    finder.device_memory = lambda _: device
    after = LambdaCallback(on_validation_start=lambda *_: module.missing)
    with pytest.raises(AttributeError, match="missing"):
        quiet_trainer(finder, after).validate(module)
    assert finder.plan is not None
    assert module.batch_size == PROJECT_SIZE


# --- errors in a step


class Fails(Lawful):
    """Raises in one phase of a step with more than two samples."""

    def __init__(self, device, phase, error):
        super().__init__(device, law)
        self.phase = phase
        self.error = error

    def _fail(self, phase):
        if phase == self.phase and self.sizes and self.sizes[-1] > 2:
            raise self.error

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self._fail("forward")
        return loss

    def on_after_backward(self):
        self._fail("backward")

    def on_before_optimizer_step(self, optimizer):
        self._fail("optimizer_step")


class Weighted(Lawful):
    """Needs an attribute that another callback gives it."""

    def training_step(self, batch, batch_idx):
        return self.weight_of_loss * super().training_step(batch, batch_idx)


class WeightedAtStart(Lawful):
    def on_train_start(self):
        self.doubled = 2 * self.weight_of_loss


def give_weight(trainer, module):
    module.weight_of_loss = 2.0


@pytest.mark.parametrize("kind", [Weighted, WeightedAtStart])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_an_error_in_the_search_says_that_other_callbacks_do_nothing(search, device, kind, hook):
    with pytest.raises(AttributeError, match="weight_of_loss") as raised:
        search(kind(device, law), LambdaCallback(**{hook: give_weight}))
    # The own size was tried too.
    assert raised.value.__notes__ == [
        "BatchFinder: this error occurred in the search before the training, at batch size 3. If"
        " the step needs more samples, pass min_batch_size, or drop_last=True for the last batch of"
        " an epoch; if it can take no more, max_batch_size; if it needs what another callback sets"
        " in on_fit_start or later, let the callback set it in setup.",
        "Sizes below 3, your own, were left out: at 2 there was an error (AttributeError:"
        f" '{kind.__name__}' object has no attribute 'weight_of_loss').",
    ]


class KeepsWeights(Callback):
    def on_train_epoch_end(self, trainer, module):
        self.weights = module.state_dict()


class KeepsBest(ModelCheckpoint):
    def on_validation_end(self, trainer, module):
        self.weights = module.state_dict()


@pytest.mark.parametrize(
    ("callback", "is_named"),
    [
        (KeepsWeights(), True),
        (KeepsBest(save_top_k=0), True),
        (LambdaCallback(on_before_zero_grad=lambda *_: None), True),
        # Lightning's own callbacks, and what is called before the search.
        (Timer(), False),
        (MemoryProfiler(csv=False), False),
        (LambdaCallback(on_fit_start=lambda *_: None), False),
    ],
)
def test_a_note_names_callbacks_that_did_not_run(search, device, callback, is_named):
    options = {"enable_checkpointing": isinstance(callback, KeepsBest)}
    # The limit of the search is not that of this process.
    callback.device_memory = lambda _: device
    plan = search(Lawful(device, law), callback, **options)
    notes = [note for note in search_notes(plan) if "Callbacks do nothing in a search" in note]
    assert bool(notes) == is_named
    if is_named:
        assert f"not counted: {type(callback).__name__}. Leave room" in notes[0]
    # Below the limit there is room for what they keep.
    plan = search(Lawful(device, law), callback, options={"max_batch_size": 9}, **options)
    assert not any("Callbacks do nothing" in note for note in search_notes(plan))


def test_a_callback_may_give_the_module_an_attribute_in_setup(search, device):
    setup = LambdaCallback(setup=lambda trainer, module, stage: give_weight(trainer, module))
    assert search(Weighted(device, law), setup).verified


class Divides(Evaluated):
    """Needs ``least`` samples in a step, as minibatches, neighbours and k-means do."""

    def __init__(self, device, least, batch_size=16):
        super().__init__(device)
        self.batch_size = batch_size
        self.least = least

    def training_step(self, batch, batch_idx):
        batch[0].flatten().topk(self.least)
        return super().training_step(batch, batch_idx)


class StartsCodebook(Divides):
    """Its start, before the first step, needs that many samples."""

    def __init__(self, device, least, batch_size=16):
        super().__init__(device, 1, batch_size)
        self.most = least

    def on_train_start(self):
        random.Random(0).sample(range(self.batch_size), self.most)


class IsDivided(Divides):
    """Has its size in another attribute."""

    def __init__(self, device, least):
        super().__init__(device, least)
        del self.batch_size
        self.train_bs = 16

    def train_dataloader(self):
        return loader(self.train_bs)


@pytest.mark.parametrize("kind", [Divides, StartsCodebook, IsDivided])
@pytest.mark.parametrize("least", [9, 16])
def test_a_step_that_needs_more_than_two_samples(search, device, kind, least):
    plan = search(kind(device, least), limit_val_batches=0)
    assert plan.batch_size == FOUND
    assert min(trial.batch_size for trial in plan.trials) == 16
    (note,) = [note for note in search_notes(plan) if "were left out" in note]
    assert note.startswith("Sizes below 16, your own, were left out: at 2 there was an error (")


@pytest.mark.parametrize("size", [16, 2])
def test_a_step_that_needs_more_than_the_own_size_names_size_and_argument(search, device, size):
    module = Divides(device, 100, size)
    with pytest.raises(RuntimeError, match="index k") as raised:
        search(module, limit_val_batches=0)
    note, *others = raised.value.__notes__
    assert f"at batch size {size}. If the step needs more samples, pass min_batch_size," in note
    assert len(others) == (size == 16)
    # With 200, the last batch of an epoch has as many.
    options = {"min_batch_size": 100, "max_batch_size": 200}
    assert search(module, limit_val_batches=0, options=options).batch_size == 200


def test_an_own_size_that_is_needed_and_does_not_fit(search, device):
    with pytest.raises(RuntimeError, match="Nothing fits: 450 samples, the smallest") as raised:
        search(Divides(device, 300, 450), limit_val_batches=0)
    assert raised.value.__notes__[0].startswith("Sizes below 450, your own, were left out: at 2")
    assert "left out: at 2" in reason_of(raised.value)


class KeepsState(Evaluated):
    """Has one row of a state for each sample, as a recurrent network that keeps its state."""

    def __init__(self, device, rows):
        super().__init__(device)
        self.rows = rows

    def _begin(self):
        self.state = torch.zeros(self.rows(self), 1)

    def _step(self, batch):
        self.state = self.state + self.layer(batch[0]).detach()

    def on_train_epoch_start(self):
        self._begin()

    on_validation_epoch_start = on_train_epoch_start

    def training_step(self, batch, batch_idx):
        self._step(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self._step(batch)
        return super().validation_step(batch, batch_idx)

    def train_dataloader(self):
        return loader(self.batch_size, drop_last=True)

    val_dataloader = train_dataloader


def first_loader(module):
    return module.trainer.train_dataloader or module.trainer.val_dataloaders


@pytest.mark.parametrize(
    "rows",
    [
        lambda module: module.batch_size,
        lambda module: first_loader(module).batch_size,
        lambda module: len(next(iter(first_loader(module)))[0]),
    ],
)
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_state_with_a_row_for_each_sample(search, device, rows, stage):
    plan = search(KeepsState(device, rows), stage=stage, num_sanity_val_steps=1)
    assert plan.verified
    assert len({trial.batch_size for trial in plan.trials}) > 2


class Generates(Lawful):
    def training_step(self, batch, batch_idx):
        yield super().training_step(batch, batch_idx)


class Awaits(Lawful):
    async def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Generates, Awaits])
def test_a_step_that_does_not_run_when_called_is_refused(search, device, kind):
    with pytest.raises(ValueError, match="training_step must be an ordinary method, got"):
        search(kind(device, law))


def test_an_evaluation_step_that_does_not_run_when_called_is_refused(search, device):
    module = Evaluated(device)

    def predict_step(batch, batch_idx):
        yield batch

    module.predict_step = predict_step
    with pytest.raises(ValueError, match="predict_step must be an ordinary method, got"):
        search(module, stage="predict")


@pytest.mark.parametrize(
    ("phase", "error"),
    [
        *((phase, IndexError("mine")) for phase in ("forward", "backward", "optimizer_step")),
        ("backward", KeyboardInterrupt()),
    ],
)
def test_an_error_in_a_step_keeps_its_traceback_and_both_sizes_are_restored(
    fit, device, phase, error
):
    finder = BatchFinder(objective="memory")
    data = InData()
    module = Fails(device, phase, error)
    # The size of the module differs from that of the datamodule.
    module.batch_size = 7
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((type(error), SystemExit)) as caught:
            fit(module, finder, device, datamodule=data)
    finally:
        # Lightning ignores the signal while it shuts down, and does not undo that.
        signal.signal(signal.SIGINT, handler)
    if not isinstance(error, KeyboardInterrupt):
        assert any(entry.name == "_fail" for entry in caught.traceback)
    assert (module.batch_size, data.hparams.batch_size) == (7, PROJECT_SIZE)
    assert (module.sizes, finder.plan) == ([], None)
    assert all(parameter.grad is None for parameter in module.parameters())


class Scheduled(Fails):
    """A failing module with a scheduler."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


# Lightning looks for an earlier checkpoint of this callback, and warns if there is none.
@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=:UserWarning")
@pytest.mark.parametrize("error", [IndexError("mine"), KeyboardInterrupt()])
def test_a_checkpoint_can_be_written_after_an_error_in_the_search(fit, device, tmp_path, error):
    module = Scheduled(device, "backward", error)
    saved = OnExceptionCheckpoint(tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((type(error), SystemExit)):
            fit(module, BatchFinder(objective="memory"), device, saved, enable_checkpointing=True)
    finally:
        signal.signal(signal.SIGINT, handler)
    module.trainer.save_checkpoint(tmp_path / "later.ckpt")
    _, schedulers = module.configure_optimizers()
    for path in (tmp_path / "on_exception.ckpt", tmp_path / "later.ckpt"):
        assert torch.load(path)["lr_schedulers"] == [schedulers[0].state_dict()]


@pytest.mark.skipif(
    "save_on_exception" not in inspect.signature(ModelCheckpoint).parameters,
    reason="this version of Lightning does not have it",
)
def test_an_error_in_the_search_is_before_the_first_step_that_is_saved(fit, device, tmp_path):
    saver = ModelCheckpoint(tmp_path, save_on_exception=True)
    with pytest.raises(IndexError, match="mine"):
        fit(
            Scheduled(device, "backward", IndexError("mine")),
            BatchFinder(objective="memory"),
            device,
            saver,
            enable_checkpointing=True,
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "mock",
    [Mock, MagicMock, lambda spec: create_autospec(spec, instance=True)],
    ids=["Mock", "MagicMock", "create_autospec"],
)
def test_a_search_calls_no_mock_of_a_logger_or_callback(search, device, mock):
    callback = mock(Callback)
    plan = search(Lawful(device, law), callback, logger=mock(Logger), max_steps=3)
    assert plan.batch_size == FOUND
    assert callback.on_train_batch_start.call_count == 3


class Plain(LightningModule):
    """A module that can be pickled."""

    def __init__(self):
        super().__init__()
        self.batch_size = PROJECT_SIZE
        self.lr = 0.1
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        return loader(self.batch_size)

    val_dataloader = train_dataloader


def test_a_finder_that_ran_can_be_pickled_and_a_learning_rate_finder_is_no_warning(
    fit, device, recwarn, tmp_path
):
    finder = BatchFinder(max_batch_size=8, objective="memory")
    tuner = LearningRateFinder(num_training_steps=4)
    trainer = fit(Plain(), finder, device, tuner, default_root_dir=tmp_path)
    assert not [str(one.message) for one in recwarn if "BatchFinder" in str(one.message)]
    for _ in range(2):
        assert finder.plan is not None
        assert pickle.loads(pickle.dumps(finder)).plan == finder.plan
        trainer.validate(Plain(), verbose=False)


def changed(**attributes):
    """A class of modules with other methods."""
    return type("Changed", (Lawful,), attributes)


def test_a_loader_built_before_the_search_is_a_warning(search, device):
    early = changed(setup=lambda self, stage: self.trainer.estimated_stepping_batches)
    with pytest.warns(
        UserWarning, match="The training loader was built before configure_optimizers"
    ):
        search(early(device, law), max_steps=-1, max_epochs=1)


def test_an_epoch_that_the_module_ends_is_begun_again(search, device):
    ends_epochs = changed(
        on_train_batch_start=lambda self, batch, batch_idx: -1 if batch_idx > 1 else None
    )
    assert search(ends_epochs(device, law)).batch_size == FOUND


class Indexed(Lawful):
    """Notes each batch index with the number of batches in an epoch."""

    def __init__(self, device_memory, note):
        super().__init__(device_memory, law)
        self.note = note

    def training_step(self, batch, batch_idx):
        self.note((batch_idx, self.trainer.num_training_batches))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("samples", "options", "most_batches"),
    [
        (20, {}, 10),
        (24, {"accumulate_grad_batches": 2}, 12),
        (SAMPLES, {"limit_train_batches": 3}, 3),
        (SAMPLES, {"limit_train_batches": 0.002}, 5),
    ],
)
def test_a_batch_index_of_the_search_is_one_of_the_training(
    search, device, samples, options, most_batches
):
    seen = set()
    train_loader = loader(PROJECT_SIZE, samples)
    # The steps of a trial are more than the batches of an epoch at its first size.
    options = {"policy": SearchPolicy(steps=StepPolicy(warmup_steps=12)), **options}
    # A function is not restored, but the object of a method is.
    module = Indexed(device, lambda pair: seen.add(pair))
    search(module, train_dataloaders=train_loader, **options)
    # A search begins with two samples.
    assert max(count for _, count in seen) == most_batches
    assert [(index, count) for index, count in seen if index >= count] == []
    assert max(index for index, _ in seen) == most_batches - 1


class Dropping(Evaluated):
    """Notes the index of each training batch, each validation, and when gradients are dropped."""

    def __init__(self, device_memory, note):
        super().__init__(device_memory)
        self.note = note

    def training_step(self, batch, batch_idx):
        self.note(batch_idx)
        return super().training_step(batch, batch_idx)

    def on_validation_model_zero_grad(self):
        self.note("drop")
        super().on_validation_model_zero_grad()

    def validation_step(self, batch, batch_idx):
        has_gradients = self.layer.weight.grad is not None
        self.note("validation with gradients" if has_gradients else "validation")
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("accumulate", "after_batches"),
    [
        (1, {(0, "drop", "validation"), (1, "drop", "validation")}),
        # The first batch of the second epoch is in the middle of an accumulation.
        (2, {(2, 0, "validation with gradients"), (1, "drop", "validation")}),
    ],
)
def test_gradients_are_dropped_before_a_validation_as_in_training(
    search, device, accumulate, after_batches
):
    events = []
    search(
        # As above, the list must not be restored.
        Dropping(device, lambda event: events.append(event)),
        options={"max_batch_size": 8},
        accumulate_grad_batches=accumulate,
        limit_train_batches=3,
    )
    moments = zip(events, events[1:], events[2:], strict=False)
    begins = {m for m in moments if m[1] in (0, 1, 2, "drop") and "validation" in str(m[2])}
    # A rehearsal runs the last batch of the validation after the full ones, as another validation.
    assert begins == {*after_batches, ("validation", "drop", "validation")}


def test_an_error_in_training_ends_the_enforced_limit(search, device):
    device.enforces_limits = True
    budgets = []

    def fail(*_):
        budgets.append(device.budget)
        raise ValueError("in a batch")

    with pytest.raises(ValueError, match="in a batch"):
        search(
            Lawful(device, law),
            LambdaCallback(on_train_batch_start=fail),
            options={"memory_limit": 300 * MIB},
        )
    assert budgets == [300 * MIB]
    assert device.budget == BUDGET


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_finder_can_be_copied_while_it_enforces_a_limit(device, copied):
    device.enforces_limits = True
    finder = BatchFinder(objective="memory")
    finder._run.undo.enter_context(device.limit_enforced(200 * MIB))
    # The copy does not end the limit of this training.
    copied(finder).teardown(None, None, "fit")
    assert device.budget == 200 * MIB
    finder.teardown(None, None, "fit")
    assert device.budget == BUDGET


class Normed(Lawful):
    def __init__(self, device_memory, law):
        super().__init__(device_memory, law)
        self.layer = nn.Sequential(nn.BatchNorm1d(1), self.layer)


@pytest.mark.parametrize(("kind", "size"), [(Lawful, FOUND), (Normed, FOUND - 1)])
def test_a_last_batch_of_one_sample_is_avoided_with_batch_norm_only(search, device, kind, size):
    train_loader = loader(PROJECT_SIZE, 2 * FOUND + 1)
    plan = search(kind(device, law), train_dataloaders=train_loader)
    assert (plan.batch_size, plan.limited_by) == (size, "memory")


class NoSize(Lawful):
    def __init__(self, device_memory, law):
        super().__init__(device_memory, law)
        del self.batch_size

    train_dataloader = LightningModule.train_dataloader


class InData(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"batch_size": PROJECT_SIZE})

    def train_dataloader(self):
        return loader(self.hparams.batch_size)


# --- projects that do not work

CLAMPED = property(
    lambda self: self._size, lambda self, value: setattr(self, "_size", min(value, 16))
)
IN_SEQUENCE = {"train_dataloaders": CombinedLoader([loader(PROJECT_SIZE)], "sequential")}
NO_SIZE = {"limit_train_batches": 40, "val_check_interval": 50}


def loader_that_stops(module):
    """A loader whose ``collate_fn`` raises StopIteration."""
    return loader(module.batch_size, collate_fn=lambda _: next(iter(())))


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (
            changed(train_dataloader=lambda self: loader(min(self.batch_size, 16))),
            {},
            r"^ValueError.*must follow `batch_size` at every size, got loaders of batch sizes 16"
            r" instead of \d+ after",
        ),
        (
            changed(batch_size=CLAMPED),
            {},
            "^ValueError.*`batch_size` must keep the value it is set to, got 16 after .* pass"
            " max_batch_size=16",
        ),
        (NoSize, IN_SEQUENCE, '^ValueError.*"min_size", .* got "sequential"'),
        (
            changed(training_step=lambda self, dataloader_iter: None),
            {},
            "^ValueError.*training_step must take a batch .* dataloader_iter",
        ),
        (
            changed(on_train_batch_start=lambda self, batch, batch_idx: -1),
            {},
            "^RuntimeError.*on_train_batch_start returned -1 for the first batch",
        ),
        (
            changed(train_dataloader=loader_that_stops),
            {},
            "^RuntimeError.*the collate function raised StopIteration",
        ),
        (
            lambda device, law: Evaluated(device),
            NO_SIZE,
            "^NothingFitsError.*No .* lies between .*: val_check_interval allows no more than 0"
            " samples",
        ),
    ],
)
def test_projects_that_cannot_be_searched(search, device, make, arguments, message):
    module = make(device, law)
    with pytest.raises((ValueError, RuntimeError)) as error:
        search(module, **arguments)
    assert re.search(message, repr(error.value))
    assert (module.sizes, getattr(module, "batch_size", PROJECT_SIZE)) == ([], PROJECT_SIZE)


def test_a_device_without_a_peak_counter_is_refused(fit, device):
    with pytest.raises(ValueError, match="BatchFinder cannot search, because cpu"):
        fit(Lawful(device, law), BatchFinder(objective="memory"), None)


# --- the real host


class Deep(LightningModule):
    """Keeps twice 4 MiB of activations per sample.

    From 9 samples on each is larger than 32 MiB, the most that glibc takes from its heap, so that
    the peak is exact.
    """

    def __init__(self, batch_size=2):
        super().__init__()
        self.batch_size = batch_size
        self.layer = nn.Linear(16, 16)

    def training_step(self, batch, batch_idx):
        x = self.layer(batch[0]).repeat(1, 65536)
        for _ in range(2):
            # Autograd keeps the output of each call for the backward pass.
            x = x.relu()
        return x.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(SAMPLES, 16)), batch_size=self.batch_size)


def test_on_the_host(tmp_path):
    options = {"max_steps": 2, "default_root_dir": tmp_path}
    # The first run loads libraries, which take memory too.
    quiet_trainer(BatchFinder(max_batch_size=3, objective="memory"), **options).fit(Deep())
    limit = HostMemory().current().allocated_bytes + 400 * MIB
    finder = BatchFinder(memory_limit=limit, objective="memory")
    profiler = MemoryProfiler()
    quiet_trainer(profiler, finder, **options).fit(Deep())
    assert finder.plan is not None
    assert finder.plan.limited_by == "memory"
    assert finder.plan.measured_peak_bytes <= limit
    assert profiler.summary is not None
    assert profiler.summary.memory.batch_size == finder.plan.batch_size
    assert profiler.summary.memory.peak_bytes <= limit
    # A sample takes 16 MiB, and 0.25 of the room are 100 MiB. The room is larger if the search
    # returns memory of earlier tests to the system.
    assert 5 <= finder.plan.batch_size <= 12


# --- settings of the trainer that a size may break


@pytest.mark.parametrize(
    ("trainer", "drop_last", "size", "limited_by"),
    [
        ({"val_check_interval": 50}, False, 102, "val_check_interval"),
        ({"limit_val_batches": 0.1}, False, 4, "limit_val_batches"),
        ({"overfit_batches": 0.1}, False, 4, "overfit_batches"),
        ({}, True, 40, "validation data"),
    ],
)
def test_settings_that_a_size_may_break_bound_it(
    search, device, trainer, drop_last, size, limited_by
):
    module = Evaluated(device, samples=40, drop_last=drop_last)
    plan = search(module, max_steps=-1, max_epochs=1, limit_train_batches=60, **trainer)
    assert (plan.batch_size, plan.limited_by) == (size, limited_by)
    assert module.evaluated


def test_the_first_request_of_a_loader_is_a_multiple(search, device):
    def train_dataloader(module):
        assert module.batch_size % 4 == 0
        return loader(module.batch_size)

    grouped = changed(train_dataloader=train_dataloader)
    plan = search(grouped(device, law), options={"multiple_of": 4, "max_batch_size": 16})
    assert [trial.batch_size % 4 for trial in plan.trials].count(0) == len(plan.trials) > 1


def test_a_step_of_the_search_is_at_most_eleven_frames_below_the_hook(search, device):
    depths = []

    class Traced(Lawful):
        def training_step(self, batch, batch_idx):
            names = [frame.name for frame in traceback.extract_stack()]
            if "on_fit_start" in names:
                first = names.index("on_fit_start")
                depths.append(names.index("advance", first) - first - 1)
            return super().training_step(batch, batch_idx)

    search(Traced(device, law))
    assert depths
    assert max(depths) <= 11


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"mode": "power"}, "fits lines to a few sizes"),
        ({"init_val": 8}, "Pass min_batch_size"),
        ({"steps_per_trial": 3}, "chooses the steps"),
        ({"max_trials": 9, "max_batch_size": 64}, "pass max_batch_size"),
        ({"batch_size": 32}, "max_batch_size is the largest size to consider"),
        ({"trainer": {}}, "compare takes arguments of the Trainer in base="),
    ],
)
def test_arguments_of_lightnings_finder_are_refused_with_ours(arguments, advice):
    (name, *_) = arguments
    with pytest.raises(TypeError, match=rf"BatchFinder has no argument {name}\. .*{advice}"):
        BatchFinder(**arguments, objective="memory")


def test_other_arguments_are_refused_with_the_nearest_name():
    with pytest.raises(TypeError, match=r"no argument max_size\. Did you mean max_batch_size\?$"):
        BatchFinder(max_size=64)
    with pytest.raises(TypeError, match=r"no argument speed\. It has objective, .*, apply\.$"):
        BatchFinder(speed=3, objective="memory")
    message = r"takes its arguments by name, such as objective=\.\.\., got 'binsearch'$"
    with pytest.raises(TypeError, match=message):
        BatchFinder("binsearch")
    # A subclass of this package has the name that the user knows.
    with pytest.raises(TypeError, match=r"^BatchFinder has no argument max_size\."):
        SearchOnly(max_size=64)
    names = list(inspect.signature(BatchFinder).parameters)
    assert names[:2] == ["objective", "memory_limit"]


class OtherFinder(BatchFinder):
    """A project's own kind, whose property has an error."""

    @property
    def size_cap(self):
        return self.optins


def test_an_attribute_that_is_missing_in_a_property_is_named_itself():
    with pytest.raises(AttributeError, match="OtherFinder has no optins"):
        _ = OtherFinder().size_cap
    with pytest.raises(AttributeError, match="object has no attribute '_private'"):
        _ = OtherFinder()._private


def test_two_finders_are_refused_with_a_sentence(fit, device):
    module = Lawful(device, law)
    finders = BatchFinder(), BatchFinder(max_batch_size=8)
    with pytest.raises(ValueError, match=r"one BatchFinder, got several\. Remove the others\.$"):
        fit(module, finders[0], device, finders[1])
    assert module.sizes == []
    with pytest.raises(ValueError, match="one BatchFinder, got several"):
        fit(module, OtherFinder(), device, type("Sibling", (BatchFinder,), {})())


def test_there_is_no_plan_before_a_run(fit, device, caplog):
    finder = BatchFinder()
    with pytest.raises(AttributeError, match=r"^BatchFinder has no plan\. .* read finder\.plan"):
        _ = finder.plan
    assert not hasattr(copy.deepcopy(finder), "plan")
    with caplog.at_level("INFO"):
        fit(Lawful(device, law), finder, device, fast_dev_run=True)
    assert "BatchFinder does nothing under fast_dev_run, so finder.plan is None" in caplog.text
    assert finder.plan is None
