"""What a hook may rely on in the steps of a search: the same as in the steps of a training."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.lawful import SAMPLES, Lawful, law
from tests.helpers.samples import changed


class CountsEpochs(Lawful):
    """Takes one of the values of an epoch in each step; a hook begins them again."""

    def __init__(self, device_memory, values=SAMPLES):
        super().__init__(device_memory, law)
        self.values = values
        self.batches = []

    def on_train_epoch_start(self):
        self.of_epoch = iter(range(self.values))

    def training_step(self, batch, batch_idx):
        assert next(self.of_epoch) == batch_idx
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("batches", [1, 3])
def test_the_hook_comes_before_each_first_batch(search, device, batches):
    plan = search(CountsEpochs(device, batches), limit_train_batches=batches)
    assert plan.verified
    assert max(trial.full_steps for trial in plan.trials) > batches


class EndsEpoch(CountsEpochs):
    """Ends each epoch after two batches."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


def test_the_hook_comes_after_an_epoch_that_the_module_ends(search, device):
    assert search(EndsEpoch(device, 2)).verified


def sets_epoch(trainer, module):
    module.epoch = 9


class Late(Lawful):
    """A hook sets what a later state changes."""

    def __init__(self, device_memory, steps):
        super().__init__(device_memory, law)
        self.epoch = 0
        # A function keeps the list: the search restores what is in a module.
        self.keep = lambda step: steps.append(step)

    def on_train_epoch_start(self):
        self.epoch = self.current_epoch

    def training_step(self, batch, batch_idx):
        self.keep((len(batch[0]), self.epoch))
        return super().training_step(batch, batch_idx)


def test_the_hook_does_not_undo_a_later_state(search, device):
    steps = []
    plan = search(Late(device, steps), options={"later": sets_epoch}, limit_train_batches=1)
    assert plan.chosen.state
    # Each step of a probe is in a new epoch.
    of_probes = {trial.batch_size for trial in plan.trials if trial.kind == "probe"}
    assert {epoch for size, epoch in steps if size in of_probes} == {9}


class Downloaded(Lawful):
    """Only the first hundred of a thousand samples are there."""

    def train_dataloader(self):
        def sample(index):
            if index >= 100:
                raise FileNotFoundError(f"no file {index}")
            return (torch.zeros(1),)

        return DataLoader(changed(sample, 1000), batch_size=self.batch_size)


@pytest.mark.parametrize("limits", [{"limit_train_batches": 0.1}, {"overfit_batches": 0.1}])
def test_samples_outside_of_the_limits_are_not_read(search, device, limits):
    plan = search(Downloaded(device, law), options={"max_batch_size": 50}, **limits)
    assert plan.verified
    assert not any("left out" in note for note in plan.notes)
