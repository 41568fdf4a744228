"""Data sets whose ``__getitems__`` returns a batch."""

import threading

import pytest
import torch
from torch.utils.data import Dataset, Subset

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
    "list of two tensors": (lambda x: [x, x], lambda batch: batch[1]),
    "list of three tensors": (lambda x: [x, x, x], lambda batch: batch[2]),
    "tensor": (lambda x: x, lambda batch: batch),
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


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("reads_in_worker", [True, False])
def test_a_list_of_samples_is_collated_here(reads_in_worker, is_part, monkeypatch):
    if not reads_in_worker:
        monkeypatch.setattr("multiprocessing.get_start_method", lambda **_: "spawn")
    dataset = Fetches(list)
    made = batches(Subset(dataset, range(20)) if is_part else dataset)
    assert len(set(made.batch(3)[0].tolist())) == 3
    assert dataset.reads == 0


def test_a_batch_of_another_kind_is_refused():
    made = batches(Fetches(Rows), collate_fn=lambda batch: batch)
    message = "must consist of tensors and arrays, got Rows. Let the collate function join"
    with pytest.raises(ValueError, match=message):
        made.batch(4)


def test_a_data_set_that_cannot_be_copied_does_not_change_where_no_worker_reads(monkeypatch):
    monkeypatch.setattr("multiprocessing.get_start_method", lambda **_: "spawn")
    dataset = Fetches(lambda x: {"x": x})
    dataset.lock = threading.Lock()
    made = batches(dataset, collate_fn=lambda batch: batch)
    assert len(set(made.batch(3)[0]["x"].tolist())) == 3
    assert dataset.reads == 0
