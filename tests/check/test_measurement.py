"""The lines of a step, against numbers that are known from the shapes of its tensors."""

import gc
import random

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_batchmem._lightning.steps import TrainingSteps
from lightning_batchmem.check.measurement import measure

FEATURES = 256
HIDDEN = 1024
FLOAT_BYTES = 4
SAMPLE_BYTES = FEATURES * FLOAT_BYTES
WEIGHT_BYTES = FEATURES * HIDDEN * FLOAT_BYTES


class Network(LightningModule):
    """Wide, so that the gradient of a weight is larger than the activations of a few samples."""

    def __init__(self, depth=1, optimizer=torch.optim.SGD):
        super().__init__()
        self.optimizer = optimizer
        self.body = nn.Sequential()
        for _ in range(depth):
            self.body.append(nn.Linear(FEATURES, HIDDEN, bias=False))
            self.body.append(nn.Sigmoid())
            self.body.append(nn.Linear(HIDDEN, FEATURES, bias=False))

    def training_step(self, batch, batch_idx):
        return self.body(batch).mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.01)


def data(samples=64):
    return DataLoader(torch.randn(samples, FEATURES), batch_size=4)


def phases(make, **base):
    return measure(make, base).memory.phases


@pytest.fixture(autouse=True)
def reads_in_this_process(reads_here):
    """The start of a worker takes long."""


def test_bytes_of_a_sample_are_those_of_its_activations():
    measured = phases(lambda: (Network(), data()))
    # The most bytes of a sample are alive after the activation function, which has its input still.
    forward = measured["forward"]
    assert forward.sample_bytes_of_modules == {
        "": SAMPLE_BYTES,
        "body.0": HIDDEN * FLOAT_BYTES,
        "body.1": HIDDEN * FLOAT_BYTES,
    }
    assert sum(forward.sample_bytes_of_modules.values()) == forward.sample_bytes
    # In forward the weights and the gradients of the last step are alive.
    assert forward.fixed_bytes_of_modules["body.0"] == 2 * WEIGHT_BYTES
    # The rest is the sample that the batches are made of, and numbers that Lightning logs.
    assert 0 <= forward.fixed_bytes - 4 * WEIGHT_BYTES - SAMPLE_BYTES < 100
    assert list(measured) == ["forward", "backward", "optimizer_step"]


def test_a_larger_fixed_part_does_not_change_the_bytes_of_a_sample():
    small = phases(lambda: (Network(), data()))
    # Its states are as large as the weights, so that other moments have the peaks of 2 samples.
    large = phases(lambda: (Network(optimizer=torch.optim.Adam), data()))
    for phase in ("forward", "backward"):
        assert large[phase].sample_bytes == small[phase].sample_bytes
        grown_bytes = large[phase].fixed_bytes - small[phase].fixed_bytes
        assert grown_bytes == pytest.approx(4 * WEIGHT_BYTES, rel=1e-3)


def test_a_second_layer_is_in_its_modules():
    one = phases(lambda: (Network(), data()))["forward"]
    two = phases(lambda: (Network(depth=2), data()))["forward"]
    assert two.sample_bytes > one.sample_bytes
    assert two.sample_bytes_of_modules["body.4"] == HIDDEN * FLOAT_BYTES
    assert two.fixed_bytes_of_modules["body.3"] >= WEIGHT_BYTES


def test_what_the_process_held_before_is_not_part_of_it():
    make = lambda: (Network(), data())  # noqa: E731
    first = measure(make, {})
    others = [torch.randn(1000, 1000) for _ in range(3)]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    assert measure(make, {}) == first
    assert len(others) == 3
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]
    assert gc.isenabled()


class RandomLengths(Dataset):
    """Samples of random lengths, drawn when the data set is made."""

    def __init__(self):
        self.lengths = torch.randint(1, 500, (300,)).tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.zeros(self.lengths[index], FEATURES)


def padded(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def test_samples_of_random_lengths_are_the_same_in_each_measurement():
    def make():
        return Network(), DataLoader(RandomLengths(), batch_size=4, collate_fn=padded, shuffle=True)

    first = phases(make)
    torch.manual_seed(1)
    assert phases(make) == first


class OneLong(Dataset):
    """Samples of one row, and one of fifty."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.zeros(50 if index == 30 else 1, FEATURES)


def test_the_longest_of_64_samples_makes_all_batches():
    loader = DataLoader(OneLong(), batch_size=4, collate_fn=padded)
    forward = phases(lambda: (Network(), loader))["forward"]
    assert forward.sample_bytes == 50 * (SAMPLE_BYTES + 2 * HIDDEN * FLOAT_BYTES)


def test_a_step_comes_before_the_one_that_is_measured(monkeypatch):
    sizes = []
    make_batch = TrainingSteps.make_batch

    def noted(steps, batch_size, index, **keywords):
        sizes.append(batch_size)
        make_batch(steps, batch_size, index, **keywords)

    monkeypatch.setattr(TrainingSteps, "make_batch", noted)
    phases(lambda: (Network(), data()))
    assert sizes == [2, 2, 8, 8]


class OtherOperators(Network):
    """Small batches take another way than large ones."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if len(batch) < 4 else loss + batch.square().mean()


def test_a_step_with_other_operators_at_the_other_size_is_fitted_by_its_peaks():
    plain = phases(lambda: (Network(), data()))
    other = phases(lambda: (OtherOperators(), data()))
    assert list(other) == list(plain)
    assert other["forward"].sample_bytes >= plain["forward"].sample_bytes > 0


def test_accumulated_gradients():
    plain = phases(lambda: (Network(), data()))
    accumulated = phases(lambda: (Network(), data()), accumulate_grad_batches=4)
    # The gradients of the first batch are alive in backward of the second.
    assert accumulated["backward"].fixed_bytes > plain["backward"].fixed_bytes
    assert accumulated["backward"].sample_bytes == plain["backward"].sample_bytes


def test_manual_optimization_has_all_phases():
    class Manual(Network):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            optimizer.zero_grad()

    assert list(phases(lambda: (Manual(), data()))) == ["forward", "backward", "optimizer_step"]


@pytest.mark.parametrize(
    ("base", "samples", "message"),
    [
        ({"accelerator": "gpu"}, 64, "accelerator must be cpu for the memory test, got 'gpu'"),
        ({"devices": 2}, 64, "devices must be one device, got 2 on 1 nodes in 'the memory test'"),
        ({"compile": True}, 64, "compile must be False for the memory test"),
        ({"fast_dev_run": True}, 64, "the Trainer must be one that trains, got fast_dev_run"),
        ({}, 7, r"batches of 8 samples, got at most 7 \(dataset\)"),
    ],
)
def test_what_cannot_be_measured(base, samples, message):
    with pytest.raises(ValueError, match=message):
        measure(lambda: (Network(), data(samples)), base)


def test_a_compiled_step_is_refused(monkeypatch):
    monkeypatch.setattr(
        "lightning_batchmem.check.module_probe.TrialMeter.is_compiled", property(lambda _: True)
    )
    with pytest.raises(ValueError, match=r"cannot be counted: torch\.compile compiled a part of"):
        measure(lambda: (Network(), data()), {})
