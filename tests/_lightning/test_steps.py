"""What a hook may rely on in the steps of a search: the same as in the steps of a training."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.lawful import MIB, SAMPLES, Lawful, found_size, law, loader
from tests.helpers.plans import search_notes
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
    assert not any("left out" in note for note in search_notes(plan))


def small_loader(module):
    return loader(module.batch_size, 12)


class CountsBatches(Lawful):
    """Each batch of a validation has the number of those before it; the start hook forgets them."""

    def __init__(self, device_memory):
        super().__init__(device_memory, law)
        self.batches = [[], []]

    val_dataloader = small_loader

    def forget(self):
        self.batches = [[], []]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        assert batch_idx == len(self.batches[dataloader_idx])
        self.batches[dataloader_idx].append(batch)


class CountsFromStart(CountsBatches):
    def on_validation_epoch_start(self):
        self.forget()


class CountsToEpochEnd(CountsBatches):
    def on_validation_epoch_end(self):
        self.forget()


class CountsToEnd(CountsBatches):
    def on_validation_end(self):
        self.forget()


class CountsOfLoaders(CountsFromStart):
    def val_dataloader(self):
        return [small_loader(self), small_loader(self)]


class CountsInTest(CountsBatches):
    test_dataloader = small_loader
    on_test_epoch_end = CountsBatches.forget
    test_step = CountsBatches.validation_step


@pytest.mark.parametrize(
    "kind", [CountsFromStart, CountsToEpochEnd, CountsToEnd, CountsOfLoaders, CountsInTest]
)
@pytest.mark.parametrize("size", [4, 12])
def test_batches_of_an_evaluation_count_up(search, device, kind, size):
    stage = "test" if kind is CountsInTest else "fit"
    plan = search(kind(device), stage=stage, options={"max_batch_size": size})
    assert plan.batch_size == size


class KeepsOutputs(Lawful):
    """Its validation keeps as much of each batch as a step needs; an end hook frees it."""

    def __init__(self, device_memory):
        super().__init__(device_memory, lambda count_bytes: count_bytes)
        self.outputs = []
        self.keep = lambda count_bytes: device_memory.keep(count_bytes)

    def on_train_start(self):
        self.keep(sum(self.outputs))

    def training_step(self, batch, batch_idx):
        self.use(law(4 * len(batch[0])))
        return self.layer(batch[0]).mean()

    def val_dataloader(self):
        return loader(self.batch_size)

    def validation_step(self, batch, batch_idx):
        self.outputs.append(len(batch[0]) * MIB)
        self.keep(sum(self.outputs))
        self.use(law(len(batch[0])))

    def free(self):
        self.outputs.clear()
        self.keep(0)


class FreesAtEpochEnd(KeepsOutputs):
    def on_validation_epoch_end(self):
        self.free()


class FreesAtEnd(KeepsOutputs):
    def on_validation_end(self):
        self.free()


@pytest.mark.parametrize("kind", [FreesAtEpochEnd, FreesAtEnd])
@pytest.mark.parametrize("batches", [1, 2])
def test_outputs_that_only_an_end_hook_frees_are_those_of_one_validation(
    search, device, kind, batches
):
    plan = search(kind(device), limit_val_batches=batches, num_sanity_val_steps=2)
    # A training step needs more than the validation does with the outputs of two batches.
    assert plan.batch_size == found_size(500 * MIB, multiple_of=1) // 4
    assert plan.verified
