"""Data sets with ``__getitems__``, which fetches the samples of a batch at once."""

import pytest
import torch
from torch.utils.data import Dataset, Subset

from tests.helpers.samples import batches

X = torch.arange(40.0)


class Fetches(Dataset):
    def __init__(self, make):
        self.make = make
        self.reads = 0

    def __len__(self):
        return len(X)

    def __getitems__(self, indices):
        self.reads += 1
        return self.make(X[indices])


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("reads_in_worker", [True, False])
def test_a_list_of_samples_is_collated_here(reads_in_worker, is_part, monkeypatch):
    if not reads_in_worker:
        monkeypatch.setattr("multiprocessing.get_start_method", lambda **_: "spawn")
    dataset = Fetches(list)
    made = batches(Subset(dataset, range(20)) if is_part else dataset)
    assert len(set(made.batch(3)[0].tolist())) == 3
    assert dataset.reads == 0


@pytest.mark.parametrize(
    "make", [lambda x: {"x": x}, lambda x: (x, x), lambda x: [x, x], torch.neg]
)
def test_a_batch_that_the_data_set_has_joined_is_refused(make):
    message = "__getitems__ of the data set must return a list of samples, got"
    with pytest.raises(ValueError, match=message):
        batches(Fetches(make), collate_fn=lambda batch: batch)
