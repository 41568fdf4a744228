"""Data sets whose ``__getitems__`` returns a batch."""

import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_batchmem.batches.collate import FetchedCollate, FetchedSample
from tests.helpers.samples import batches

X = torch.arange(40.0)


class Rows:
    """A batch that only its data set can make."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return self


class Fetches(Dataset):
    def __init__(self, make):
        self.make = make
        self.reads = 0

    def __len__(self):
        return len(X)

    def __getitems__(self, indices):
        self.reads += 1
        return self.make(X[indices])


MADE = {
    "dictionary": (lambda x: {"x": x}, lambda batch: batch["x"]),
    "tuple": (lambda x: (x, x), lambda batch: batch[0]),
    "list of tensors": (lambda x: [x], lambda batch: batch[0]),
    "list of two tensors": (lambda x: [x, x], lambda batch: batch[1]),
    "list of three tensors": (lambda x: [x, x, x], lambda batch: batch[2]),
    "tensor": (lambda x: x, lambda batch: batch),
    "object": (Rows, lambda batch: batch.x),
}


@pytest.mark.parametrize("reads_in_worker", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_the_data_set_joins_its_samples(name, reads_in_worker, monkeypatch):
    if not reads_in_worker:
        monkeypatch.setattr("multiprocessing.get_start_method", lambda **_: "spawn")
    make, read = MADE[name]
    dataset = Fetches(make)
    made = batches(dataset, collate_fn=lambda batch: batch)
    for size in (1, 2, 7):
        batch, _ = made.batch(size)
        assert type(batch) is type(make(X))
        assert len(set(read(batch).tolist())) == size
        assert read(made.other_lengths(size, 1)[0]).shape == (size,)
    assert dataset.reads == 0
    assert not made.notes


def test_samples_that_differ_are_padded_by_the_data_set():
    def padded(x):
        return {"x": torch.zeros(len(x), 1 + int(x.max()))}

    made = batches(Fetches(padded), collate_fn=lambda batch: batch)
    assert made.batch(3)[0]["x"].shape == (3, 40)
    assert made.longest_bytes == [40 * 4]


def test_a_list_of_samples_is_collated_here():
    dataset = Fetches(lambda x: list(x))
    made = batches(dataset)
    assert len(set(made.batch(3)[0].tolist())) == 3
    assert all(isinstance(sample, torch.Tensor) for sample in made._of_loaders[0].samples)
    assert dataset.reads == 0


def test_an_error_of_the_data_set_is_its_own():
    def fails(x):
        if len(x) > 3:
            raise KeyError("the user's own mistake")
        return {"x": x}

    made = batches(Fetches(fails), collate_fn=lambda batch: batch)
    with pytest.raises(KeyError, match="the user's own mistake"):
        made.batch(4)


class Times(Dataset):
    """Batches with the time at which they were read."""

    def __len__(self):
        return len(X)

    def __getitems__(self, indices):
        return {"time": torch.full((len(indices),), time.monotonic(), dtype=torch.float64)}


def test_steps_of_one_size_have_copies_of_one_batch():
    made = batches(Times(), collate_fn=lambda batch: batch)
    first = made.batch(3)[0]["time"]
    read_at = first.clone()
    first.zero_()
    assert torch.equal(made.batch(3)[0]["time"], read_at)
    assert made.batch(4)[0]["time"][0] > read_at[0]
    assert made.batch(3)[0]["time"][0] > read_at[0]


def test_indices_that_cannot_be_pickled():
    class Index(int):
        pass

    collate = FetchedCollate(DataLoader(Times()), lambda batch: batch)
    samples = [FetchedSample(Index(index), None) for index in range(3)]
    # Nothing tells whether the indices are those of the batch before.
    first = collate(samples)["time"][0]
    assert collate(samples)["time"][0] > first


def test_a_data_set_that_cannot_be_copied_does_not_change_where_no_worker_reads(monkeypatch):
    monkeypatch.setattr("multiprocessing.get_start_method", lambda **_: "spawn")
    dataset = Fetches(lambda x: {"x": x})
    dataset.lock = threading.Lock()
    made = batches(dataset, collate_fn=lambda batch: batch)
    assert len(set(made.batch(3)[0]["x"].tolist())) == 3
    assert dataset.reads == 0
