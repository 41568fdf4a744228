"""Trainings whose steps keep more and more: what a plan says of them, and when it is verified."""

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_batchmem import BatchFinder
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import Growth
from tests.helpers.lawful import MIB, Lawful, found_size, loader, quiet_trainer

FIXED = 99 * MIB
FOUND = found_size(500 * MIB, multiple_of=1)


class Keeping(Lawful):
    """Each step keeps some memory; the end of an epoch may free it."""

    def __init__(self, device_memory, kept_bytes, *, frees=False, fails=False):
        super().__init__(device_memory, lambda count_bytes: count_bytes)
        self.kept_bytes = kept_bytes
        self.frees = frees
        self.fails = fails
        self.kept = []
        self.keep = lambda count_bytes: device_memory.keep(count_bytes)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        self.keep(sum(self.kept))
        self.use(FIXED + len(x) * MIB)
        self.kept.append(self.kept_bytes)
        self.keep(sum(self.kept))
        return self.layer(x).mean()

    def on_train_epoch_end(self):
        # The training has one step.
        if self.fails and len(self.kept) > 1:
            raise ValueError("a whole epoch is missing")
        if self.frees:
            self.kept.clear()
            self.keep(0)


@pytest.mark.parametrize(
    ("steps", "is_verified"),
    [(10, True), (4000, False)],
)
def test_a_plan_is_verified_if_what_grows_fits_too(search, device, steps, is_verified):
    class Ends(Keeping):
        """Ends the training after three steps: only the plan is of interest."""

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.state.fn == "fit" and not self.trainer.fit_loop.restarting:
                self.trainer.should_stop = self.trainer.global_step >= 3

    plan = search(Ends(device, MIB), max_steps=steps)
    assert plan.verified == is_verified
    growth = plan.trials[-1].growth
    assert (growth.batch_bytes, growth.falls_at_epoch_end) == (MIB, False)
    assert growth.batches == steps
    assert plan.notes[0].startswith("Equal steps need 1.0 MiB more each time: about ")
    assert f"and the training has {steps:,}." in plan.notes[0]
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("steps", "is_verified"), [(40, True), (50, False)])
def test_what_grows_on_the_host_gets_a_share_of_the_room(search, device, steps, is_verified):
    device.as_host()
    # The device cannot count live bytes, so what it holds stands in for them.
    device.reports_requested_bytes = True
    plan = search(
        Keeping(device, 2 * MIB, frees=True),
        options={"memory_limit": 499 * MIB},
        max_steps=-1,
        max_epochs=1,
        limit_train_batches=steps,
    )
    trial = plan.trials[-1]
    room = 499 * MIB - trial.held_bytes
    assert (trial.growth.batches_run + 0.25 * room / (2 * MIB) >= steps) == is_verified
    assert plan.verified == is_verified


def test_a_list_of_losses_is_not_named(search, device):
    plan = search(Keeping(device, 512), max_steps=1)
    assert plan.verified
    assert not any("Equal steps" in note for note in plan.notes)


def test_what_an_epoch_frees_counts_for_an_epoch(search, device):
    plan = search(Keeping(device, MIB, frees=True), max_epochs=2, max_steps=-1)
    growth = plan.trials[-1].growth
    assert growth.falls_at_epoch_end
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
    assert (growth.falls_at_epoch_end, growth.batches) == (True, 9)
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
    assert growth.falls_at_epoch_end


def test_there_was_room_for_what_the_trial_kept():
    growth = Growth(MIB, 10, batches_run=8)
    assert growth.fits(2 * MIB)
    assert not growth.fits(2 * MIB - 1)
    assert "about 10 steps fit, and the training has 10." in growth.note(2 * MIB)


def test_a_hook_that_needs_a_whole_epoch_does_not_end_the_search(search, device):
    with pytest.warns(UserWarning, match="Memory after the end of an epoch cannot be read"):
        plan = search(Keeping(device, MIB, fails=True), max_steps=1)
    assert not plan.trials[-1].growth.falls_at_epoch_end


def test_steps_that_keep_nothing_have_no_growth(search, device):
    plan = search(Keeping(device, 0), max_steps=1)
    assert plan.batch_size == FOUND
    assert plan.trials[-1].growth is None


class Predicts(Lawful):
    """Returns 64 KiB for each sample."""

    def predict_step(self, batch, batch_idx):
        self.use(FIXED // MIB + len(batch[0]))
        self.indices.append(batch_idx)
        return torch.zeros(len(batch[0]), 2**14)

    def on_predict_epoch_end(self):
        self.note_end()

    def predict_dataloader(self):
        return loader(self.batch_size, 1000)


@pytest.mark.parametrize("returns", [True, False])
def test_predictions_that_lightning_returns_are_counted(fit, device, returns):
    device.as_host()
    finder = BatchFinder(max_batch_size=16, objective="memory")
    module = Predicts(device, lambda count: count * MIB)
    # A list of the search is not the list of the module.
    indices = module.indices = []
    ends = []
    module.note_end = lambda: ends.append(1)
    trainer = fit(module, finder, device, max_epochs=0)
    trainer.predict(module, return_predictions=returns)
    (rehearsal,) = [trial for trial in finder.plan.trials if trial.kind == "rehearsal"]
    sentence = "Equal steps need 1.0 MiB more of the CPU's memory each time: about "
    assert any(note.startswith(sentence) for note in finder.plan.notes) == returns
    if returns:
        assert rehearsal.growth == Growth(2**20, 63, has_predictions=True)
        assert "and the prediction has 63. Pass return_predictions=False" in finder.plan.notes[0]
    assert indices == list(range(63))
    # Its hook may write the predictions.
    assert ends == [1]


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
    assert growth == Growth(MIB, 10, falls_at_epoch_end=True, batches_run=7)
    assert plan.verified


def test_an_epoch_that_does_not_fit_does_not_end_the_search(search, device):
    starts = []

    class FailsInTheEnd(Keeping):
        def on_fit_start(self):
            # The fake device keeps what the search does not restore.
            self.keep(0)

        def on_train_start(self):
            starts.append(1)

        def training_step(self, batch, batch_idx):
            # The first request of loaders, a probe and a rehearsal come before the epochs.
            if len(starts) == 4:
                raise torch.OutOfMemoryError("made up")
            return super().training_step(batch, batch_idx)

    options = {"min_batch_size": 2, "max_batch_size": 2}
    plan = search(FailsInTheEnd(device, MIB), options=options, max_steps=1)
    assert len(starts) == 5
    assert plan.trials[-1].growth.batch_bytes == MIB
