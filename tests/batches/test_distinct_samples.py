"""Steps that need distinct samples, such as those of pairwise losses."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_batchmem.plan.policy import ReadingPolicy
from tests.helpers.lawful import FAST, Lawful, law
from tests.helpers.samples import pad


class Rows(Dataset):
    """Rows of random numbers, of one length or of many."""

    def __init__(self, is_ragged):
        generator = torch.Generator().manual_seed(0)
        lengths = [6 + index % 7 if is_ragged else 6 for index in range(200)]
        self.rows = [torch.rand(length, generator=generator) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Pairs(Lawful):
    """The distances of all pairs have no gradient where two samples are the same."""

    def __init__(self, device, *, is_ragged=False, shuffle=False):
        super().__init__(device, law)
        self.layer = nn.Linear(12, 3)
        self.rows = Rows(is_ragged)
        self.shuffle = shuffle

    def train_dataloader(self):
        return DataLoader(self.rows, self.batch_size, collate_fn=pad, shuffle=self.shuffle)

    def training_step(self, batch, batch_idx):
        self.use(len(batch))
        padded = nn.functional.pad(batch, (0, 12 - batch.shape[1]))
        x = self.layer(padded)
        squares = (x[:, None] - x[None]).square().sum(-1)
        return squares[~torch.eye(len(x), dtype=torch.bool)].sqrt().mean()

    def on_before_optimizer_step(self, optimizer):
        if not all(parameter.grad.isfinite().all() for parameter in self.parameters()):
            raise ValueError("gradients are not finite")


def reading(**numbers):
    return replace(FAST, reading=ReadingPolicy(**numbers))


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_step_that_needs_distinct_samples(search, device, is_ragged, shuffle):
    module = Pairs(device, is_ragged=is_ragged, shuffle=shuffle)
    # However slow the machine is, all samples are read.
    policy = reading(equal_sizes=200)
    plan = search(module, policy=policy, options={"max_batch_size": 150})
    assert plan.batch_size == 150


def test_an_error_where_samples_repeat_names_this(search, device):
    """It may fail for this reason alone: the training of this size does not."""
    slow = reading(equal_sizes_seconds=0.0)
    with pytest.raises(ValueError, match="gradients are not finite") as raised:
        search(Pairs(device), policy=slow, options={"max_batch_size": 150})
    note, _ = raised.value.__notes__
    assert note == (
        "The batch had some samples more than once, because the search has only 64 distinct ones"
        " for it. If the module needs distinct samples, pass max_batch_size=64, or set the size by"
        " hand."
    )
    plan = search(Pairs(device), policy=slow, options={"max_batch_size": 64})
    assert plan.batch_size == 64


class Fails(Pairs):
    def training_step(self, batch, batch_idx):
        raise KeyError("the user's own mistake")


def test_an_error_without_repeated_samples_has_no_such_note(search, device):
    with pytest.raises(KeyError, match="own mistake") as raised:
        search(Fails(device))
    assert not any("distinct" in note for note in raised.value.__notes__)
