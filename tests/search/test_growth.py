"""Trainings whose steps keep more and more: what a plan says of them, and when it is verified."""

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_batchmem import BatchFinder
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import Growth
from tests.helpers.lawful import MIB, Lawful, found_size, loader, quiet_trainer
from tests.helpers.plans import search_notes

FIXED = 99 * MIB
FOUND = found_size(500 * MIB, multiple_of=1)


class Keeping(Lawful):
    """Each step keeps some memory, and some more for each of its samples."""

    def __init__(self, device_memory, kept_bytes, sample_bytes=0):
        super().__init__(device_memory, lambda count_bytes: count_bytes)
        self.kept_bytes = kept_bytes
        self.sample_bytes = sample_bytes
        self.kept = []
        self.keep = lambda count_bytes: device_memory.keep(count_bytes)

    def on_train_start(self):
        # The search restores the list, and the fake device does not know of it.
        self.keep(sum(self.kept))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        self.keep(sum(self.kept))
        self.use(FIXED + len(x) * MIB)
        self.kept.append(self.kept_bytes + self.sample_bytes * len(x))
        self.keep(sum(self.kept))
        return self.layer(x).mean()


class Frees(Keeping):
    """The end of an epoch frees what its steps have kept."""

    def on_train_epoch_end(self):
        self.kept.clear()
        self.keep(0)


class Ends(LightningModule):
    """Ends the training after three steps: only the plan is of interest."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.state.fn == "fit" and not self.trainer.fit_loop.restarting:
            self.trainer.should_stop = self.trainer.global_step >= 3


@pytest.mark.parametrize(("steps", "is_verified"), [(10, True), (4000, False)])
def test_a_plan_is_verified_if_what_grows_fits_too(search, device, steps, is_verified):
    class KeepsAll(Ends, Keeping):
        pass

    plan = search(KeepsAll(device, MIB), max_steps=steps)
    assert plan.verified == is_verified
    growth = plan.trials[-1].growth
    assert (growth.batch_bytes, growth.is_of_epoch) == (MIB, False)
    assert growth.batches == steps
    assert search_notes(plan)[0].startswith(
        "Equal steps need 1.0 MiB more each time: if it goes on, about "
    )
    assert f"and the training has {steps:,}." in search_notes(plan)[0]
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("steps", "is_lowered"), [(40, False), (50, True)])
def test_what_grows_on_the_host_gets_a_share_of_the_room(search, device, steps, is_lowered):
    device.as_host()
    # The device cannot count live bytes, so what it holds stands in for them.
    device.reports_requested_bytes = True
    plan = search(
        Frees(device, 2 * MIB),
        options={"memory_limit": 499 * MIB},
        max_steps=-1,
        max_epochs=1,
        limit_train_batches=steps,
    )
    trial = plan.trials[-1]
    room = 499 * MIB - trial.memory.held_bytes
    assert trial.growth.batches_run + 0.25 * room / (2 * MIB) >= steps
    assert plan.verified
    assert ("no room for what the steps keep" in plan.reason) == is_lowered


def test_a_list_of_losses_is_not_named(search, device):
    plan = search(Keeping(device, 512), max_steps=1)
    assert plan.verified
    assert not any("Equal steps" in note for note in search_notes(plan))


def test_what_an_epoch_frees_counts_for_an_epoch(search, device):
    plan = search(Frees(device, MIB), max_epochs=2, max_steps=-1)
    growth = plan.trials[-1].growth
    assert growth.is_of_epoch
    assert growth.batches == -(-5000 // plan.batch_size)
    assert plan.verified


class ClearsFirst(Keeping):
    """The begin of an epoch frees what the steps of the last one kept."""

    def on_train_epoch_start(self):
        self.kept.clear()
        self.keep(0)


def test_what_the_next_epoch_frees_counts_for_an_epoch(search, device):
    plan = search(ClearsFirst(device, MIB), max_epochs=40, max_steps=-1, limit_train_batches=9)
    growth = plan.trials[-1].growth
    assert (growth.is_of_epoch, growth.batches) == (True, 9)
    assert plan.verified


class Replaces(LightningModule):
    """Keeps a MiB of each step, in a list that the end of an epoch replaces."""

    def __init__(self):
        super().__init__()
        self.batch_size = 2
        self.layer = torch.nn.Linear(1, 1)
        self.kept = []

    def training_step(self, batch, batch_idx):
        self.kept.append(torch.ones(MIB // 4))
        return self.layer(batch[0]).mean()

    def on_train_epoch_end(self):
        self.kept = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

    def train_dataloader(self):
        return loader(self.batch_size, 64)


def test_a_list_that_is_replaced_is_freed():
    finder = BatchFinder(max_batch_size=8, objective="memory")
    quiet_trainer(finder, max_epochs=20).fit(Replaces())
    growth = finder.plan.trials[-1].growth
    assert (growth.batch_bytes, growth.batches) == (MIB, 8)
    assert growth.is_of_epoch


def test_there_was_room_for_what_the_trial_kept():
    growth = Growth(MIB, 10, batches_run=8)
    assert growth.fits(2 * MIB)
    assert not growth.fits(2 * MIB - 1)
    assert "about 10 steps fit, and the training has 10." in growth.note(2 * MIB).text


def test_steps_that_keep_nothing_have_no_growth(search, device):
    plan = search(Keeping(device, 0), max_steps=1)
    assert plan.batch_size == FOUND
    assert plan.trials[-1].growth is None


class KeepsInValidation(Keeping):
    """Its validation keeps outputs, which the end of the validation frees."""

    def validation_step(self, batch, batch_idx):
        self.keep(sum(self.kept))
        self.use(FIXED + len(batch[0]) * MIB)
        self.kept.append(MIB)
        self.keep(sum(self.kept))

    def val_dataloader(self):
        return loader(self.batch_size, 640)

    def on_validation_epoch_end(self):
        self.kept.clear()
        self.keep(0)


def test_what_the_end_of_a_validation_frees_counts_for_its_batches(search, device):
    module = KeepsInValidation(device, 0)
    plan = search(module, options={"max_batch_size": 64}, max_epochs=50, limit_train_batches=1)
    growth = plan.trials[-1].growth
    assert growth == Growth(MIB, 10, 7, is_of_epoch=True, is_of_validation=True)
    assert plan.verified
    assert search_notes(plan)[0].endswith("steps fit, and an evaluation has 10.")


@pytest.mark.parametrize("is_in_training", [True, False])
def test_what_all_evaluations_keep(reads_here, device, is_in_training):
    class KeepsAll(KeepsInValidation):
        on_validation_epoch_end = LightningModule.on_validation_epoch_end

    finder = BatchFinder(objective="memory", max_batch_size=64, min_steps_per_epoch=None)
    finder.device_memory = lambda _: device
    trainer = quiet_trainer(finder, max_epochs=3, limit_train_batches=1)
    (trainer.fit if is_in_training else trainer.validate)(KeepsAll(device, 0))
    batches = 30 if is_in_training else 10
    note = f"and all evaluations have {batches}. Let their end hook free it."
    assert search_notes(finder.plan)[0].endswith(note)


LIMIT = 475 * MIB


@pytest.mark.parametrize("kind", [Frees, ClearsFirst])
def test_the_size_is_lowered_until_what_an_epoch_keeps_fits(search, device, kind):
    plan = search(kind(device, 0, MIB // 25), max_epochs=3, max_steps=-1)
    # An epoch keeps a 25th of a MiB for each of 5,000 samples.
    most = (LIMIT - FIXED - 5000 * MIB // 25) // MIB
    assert 0.85 * most <= plan.batch_size <= most
    assert plan.verified
    assert plan.limited_by == "memory"
    assert plan.trials[-1].batch_size == plan.batch_size
    assert "no room for what the steps keep" in plan.reason
    assert "an epoch has" in search_notes(plan)[0]


def test_the_size_is_lowered_until_what_a_training_keeps_fits(search, device):
    plan = search(Keeping(device, 0, MIB // 25), max_steps=60, max_epochs=-1)
    most = (LIMIT - FIXED) / MIB / (1 + 60 / 25)
    assert 0.85 * most <= plan.batch_size <= most
    assert plan.verified


def test_what_a_short_training_keeps_is_measured_although_its_peaks_differ(search, device):
    plan = search(Keeping(device, 0, MIB // 2), max_steps=20, max_epochs=-1)
    most = (LIMIT - FIXED) / MIB / (1 + 20 / 2)
    assert plan.batch_size <= most or not plan.verified
    assert any("Equal steps need" in note for note in search_notes(plan))


def test_the_samples_of_a_step_are_kept_where_the_size_is_lowered(search, device):
    module = Keeping(device, 0, MIB // 25)
    module.batch_size = 200
    plan = search(module, options={"objective": "auto"}, max_steps=30, max_epochs=-1)
    most = (LIMIT - FIXED - 30 * 200 * MIB // 25) / MIB
    assert 0.5 * most <= plan.batch_size <= most
    assert plan.batch_size * plan.accumulate_grad_batches == 200
    assert plan.verified
    assert plan.trials[-1].growth.batches == 30 * plan.accumulate_grad_batches


def test_the_size_stays_where_a_smaller_one_does_not_help(search, device):
    class FreesAll(Ends, Frees):
        pass

    # All samples keep more than the limit.
    plan = search(FreesAll(device, 0, MIB // 10), max_epochs=1, max_steps=-1)
    assert not plan.verified
    assert plan.batch_size > 200
    assert "steps fit, and an epoch has" in search_notes(plan)[0]


def test_what_an_epoch_of_few_steps_frees_is_not_kept_in_a_rehearsal(search, device):
    plan = search(Frees(device, 0, MIB // 2), max_epochs=9, max_steps=-1, limit_train_batches=4)
    # Three batches are kept while the last one is computed.
    most = (LIMIT - FIXED) / MIB / 2.5
    assert 0.85 * most <= plan.batch_size <= most
    assert plan.verified
