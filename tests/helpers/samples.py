"""Data sets of small tensors, and batches for a search made of them."""

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_batchmem._lightning.data_source import stage_loaders
from lightning_batchmem.batches.loaders import LoaderInfo
from lightning_batchmem.batches.probe_batches import ProbeBatches


class Numbers(Dataset):
    """Tensors of ``elements`` numbers, or of other ``lengths``, that contain their index.

    ``reads`` counts the samples that are read in this process.
    """

    def __init__(self, length=100, elements=4, lengths=None, sample=None):
        self.length = length
        self.elements = elements
        self.lengths = lengths or {}
        self.sample = sample
        self.reads = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads += 1
        if self.sample:
            return self.sample(index)
        return torch.full((self.lengths.get(index, self.elements),), index)


def changed(sample, length=100):
    """A data set whose samples come from a function of the index."""
    return Numbers(length, sample=sample)


class Stream(IterableDataset):
    """An iterator that can be used up."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return (torch.tensor([number]) for number in self.numbers)


def pad(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def info(loader, follows=True):
    return LoaderInfo(loader, loader.batch_size, 2 if follows else None)


def batches(dataset, worst_case=None, *, policy=None, room_bytes=None, **arguments):
    """Batches of a search, from a loader of ``dataset`` with these ``arguments``."""
    loader = DataLoader(dataset, batch_size=2, **arguments)
    stage = stage_loaders(CombinedLoader(loader), (info(loader),), "train_dataloader")
    return ProbeBatches(stage, worst_case, policy=policy, room_bytes=room_bytes)
