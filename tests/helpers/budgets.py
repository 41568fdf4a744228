"""Loaders that form their own batches within a budget, as projects write them."""

import random
from functools import partial

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.helpers.samples import pad


class Tokens(Dataset):
    """Texts of these lengths; each has its index as its tokens."""

    def __init__(self, lengths):
        self.lengths = list(lengths)
        self.reads = 0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.reads += 1
        return torch.full((self.lengths[index],), index)


class WithinBudget:
    """A batch sampler: neighbours of similar length, as many as the padded budget allows.

    It shuffles its batches with the generators of the process and with one of its own.
    """

    # Lightning 2.5 reads this attribute of the batch sampler of a validation.
    sampler = None

    def __init__(self, lengths, max_tokens, *, has_length=True, shuffles=True):
        self.lengths = list(lengths)
        self.max_tokens = max_tokens
        self.has_length = has_length
        self.shuffles = shuffles
        self.generator = torch.Generator().manual_seed(3)
        self.epochs = 0

    def batches(self):
        batches = []
        batch = []
        for index in sorted(range(len(self.lengths)), key=self.lengths.__getitem__):
            if batch and self.lengths[index] * (len(batch) + 1) > self.max_tokens:
                batches.append(batch)
                batch = []
            batch.append(index)
        return [*batches, batch]

    def __iter__(self):
        self.epochs += 1
        batches = self.batches()
        if self.shuffles:
            random.shuffle(batches)
            order = torch.randperm(len(batches), generator=self.generator).tolist()
            batches = [batches[position] for position in order]
        return iter(batches)

    def __len__(self):
        if not self.has_length:
            raise TypeError("the number of batches is not known")
        return len(self.batches())


class OfRank(WithinBudget):
    """The batches of one of several ranks, which all have equally many."""

    def __init__(self, lengths, max_tokens, rank, ranks):
        super().__init__(lengths, max_tokens)
        self.rank = rank
        self.ranks = ranks

    def batches(self):
        batches = super().batches()
        return batches[self.rank : len(batches) // self.ranks * self.ranks : self.ranks]


class StreamOfBatches(IterableDataset):
    """A data set that makes whole batches within its budget."""

    def __init__(self, lengths, max_tokens):
        self.lengths = lengths
        self.max_tokens = max_tokens

    def __iter__(self):
        texts = Tokens(self.lengths)
        for batch in WithinBudget(self.lengths, self.max_tokens, shuffles=False):
            yield pad([texts[index] for index in batch])


def within_budget(lengths, max_tokens, **arguments):
    """A loader with such a batch sampler."""
    sampler = WithinBudget(lengths, max_tokens, **arguments)
    return DataLoader(Tokens(lengths), batch_sampler=sampler, collate_fn=pad)


def stream_of_batches(lengths, max_tokens):
    """A loader whose data set makes whole batches."""
    return DataLoader(StreamOfBatches(lengths, max_tokens), batch_size=None)


MAKERS = {
    "batch sampler": within_budget,
    "batch sampler without a length": partial(within_budget, has_length=False),
    "stream of batches": stream_of_batches,
}
