"""Samplers and data sets that are read in this process, and are as before afterwards."""

import shutil
import tempfile
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from lightning_batchmem.batches.batch_sampler import restored_sampler
from lightning_batchmem.batches.loader_size import check_batch_sampler
from lightning_batchmem.batches.reader import read_isolated
from tests.helpers.samples import batches


class Reads:
    """Counts the reads of a file in its folder."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "table").write_text("3")
        self.reads = [0]
        self.lock = threading.Lock()
        self.generator = torch.Generator()

    def read(self):
        with self.lock:
            self.reads[0] += 1
        torch.rand(1, generator=self.generator)
        return int((self.folder / "table").read_text())

    def assert_unchanged(self):
        assert self.reads == [0]
        assert torch.equal(self.generator.get_state(), torch.Generator().get_state())
        assert (self.folder / "table").exists()


class Order(Reads, Sampler):
    """Removes its folder when it is dropped, which a copy would do too."""

    def __del__(self):
        shutil.rmtree(self.folder)

    def __len__(self):
        return 40

    def __iter__(self):
        self.read()
        return iter(range(40))


class Rows(Reads, Dataset):
    """Does so with a finalizer."""

    def __init__(self):
        super().__init__()
        weakref.finalize(self, shutil.rmtree, self.folder)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(index * self.read())


class Batches(BatchSampler):
    def __init__(self, sampler):
        super().__init__(sampler, 4, drop_last=False)


def test_a_sampler_that_owns_something():
    sampler = Order()
    # Its data set owns something too.
    rows = Rows()
    assert len(set(batches(rows, sampler=sampler).batch(32)[0].tolist())) == 32
    sampler.assert_unchanged()
    check_batch_sampler(DataLoader(rows, batch_sampler=Batches(sampler)))
    sampler.assert_unchanged()
    rows.assert_unchanged()


def test_a_data_set_that_owns_something_is_read_in_this_process(reads_here):
    rows = Rows()
    batches(rows)
    rows.assert_unchanged()
    loader = DataLoader(rows, batch_size=4)
    assert read_isolated(loader, len, timeout_seconds=60) == 10
    assert read_isolated(loader, next_of, timeout_seconds=60).tolist() == [0, 3, 6, 9]
    rows.assert_unchanged()


def next_of(loader):
    return next(iter(loader))


class Broken(Order):
    def __iter__(self):
        self.read()
        raise LookupError("no order")


def test_a_sampler_is_restored_after_an_error():
    sampler = Broken()
    with (
        pytest.raises(LookupError, match="no order"),
        restored_sampler(sampler, Rows()) as order,
    ):
        list(order)
    sampler.assert_unchanged()


def test_what_cannot_be_restored_in_a_data_set_is_a_warning(reads_here):
    rows = Rows()
    rows.numbers = (number for number in range(3))
    rows.ready = threading.Condition()
    with pytest.warns(
        UserWarning, match=r"BatchFinder cannot restore these .* data set \(it holds"
    ):
        batches(rows)


def test_data_that_cannot_change_are_no_warning(reads_here, recwarn):
    rows = Rows()
    rows.words = {str(number): [number] for number in range(20_000)}
    rows.table = torch.zeros(2**24 + 1)
    batches(rows)
    assert not [one for one in recwarn if "restore" in str(one.message)]
