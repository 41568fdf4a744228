"""Copies of objects that own something, and objects with a finalizer."""

import functools
import shutil
import tempfile
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, default_collate

from lightning_batchmem.batches.collate import copied_collate
from lightning_batchmem.batches.copies import Copies, has_finalizer
from lightning_batchmem.batches.counted_batches import check_batch_sampler
from lightning_batchmem.batches.isolated import read_isolated
from tests.helpers.samples import batches


class Reads:
    """Counts the reads of a file in its folder."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "table").write_text("3")
        self.reads = [0]
        self.generator = torch.Generator()

    def read(self):
        self.reads[0] += 1
        torch.rand(1, generator=self.generator)
        return int((self.folder / "table").read_text())

    def assert_unchanged(self):
        assert self.reads == [0]
        assert torch.equal(self.generator.get_state(), torch.Generator().get_state())
        assert (self.folder / "table").exists()


class Owner(Reads):
    """Removes its folder when it is dropped."""

    def __del__(self):
        shutil.rmtree(self.folder)


class Finalized(Reads):
    """Does so with a finalizer, which a copy registers too."""

    def __init__(self, folder=None):
        super().__init__()
        self.folder = folder or self.folder
        weakref.finalize(self, shutil.rmtree, self.folder)

    def __reduce__(self):
        return Finalized, (self.folder,)


class Holds:
    """Has a part that owns something, and counts itself."""

    def __init__(self, owner):
        self.owner = owner
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        self.owner.read()
        return default_collate(samples)

    collate = __call__


class Order(Owner, Sampler):
    def __len__(self):
        return 40

    def __iter__(self):
        self.read()
        return iter(range(40))


class Rows(Owner, Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(index * self.read())


@pytest.fixture
def reads_here(monkeypatch):
    monkeypatch.setattr("multiprocessing.get_start_method", lambda **_: "spawn")


@pytest.mark.parametrize("kind", [Owner, Finalized])
@pytest.mark.parametrize("method", ["__call__", "collate"])
@pytest.mark.parametrize("bound", [False, True])
def test_a_part_that_owns_something_is_not_copied(kind, method, bound, recwarn):
    holds = Holds(kind())
    given = holds.collate if method == "collate" else holds
    copied = copied_collate(functools.partial(given) if bound else given, {})
    copied([torch.zeros(1)])
    copied([torch.zeros(1)])
    del copied
    assert holds.calls == 0
    # The snapshot of the project restores it.
    assert holds.owner.reads == [2]
    assert (holds.owner.folder / "table").exists()
    assert not recwarn


def test_a_sampler_that_owns_something():
    sampler = Order()
    # Its data set owns something too.
    rows = Rows()
    assert len(set(batches(rows, sampler=sampler).batch(32)[0].tolist())) == 32
    sampler.assert_unchanged()
    check_batch_sampler(DataLoader(rows, batch_sampler=Batches(sampler)))
    sampler.assert_unchanged()
    rows.assert_unchanged()


class Batches(BatchSampler):
    def __init__(self, sampler):
        super().__init__(sampler, 4, drop_last=False)


@pytest.mark.usefixtures("reads_here")
def test_a_data_set_that_owns_something_is_read_in_this_process():
    rows = Rows()
    batches(rows)
    rows.assert_unchanged()
    loader = DataLoader(rows := Rows(), batch_size=4)
    assert read_isolated(loader, len, timeout_seconds=60) == 10
    assert read_isolated(loader, next_of, timeout_seconds=60).tolist() == [0, 3, 6, 9]
    rows.assert_unchanged()


def next_of(loader):
    return next(iter(loader))


def test_a_part_that_cannot_be_copied_is_one_warning():
    owner = Owner()
    owner.lock = threading.Lock()
    owner.numbers = (number for number in range(3))
    copies = Copies()
    with pytest.warns(UserWarning, match="The 'numbers' of Owner cannot be copied") as caught:
        assert copies.copy(owner) is owner
    assert len(caught) == 1
    with copies:
        owner.read()
        owner.new = 1
        del owner.lock
    assert not hasattr(owner, "new")
    owner.lock.acquire()
    owner.assert_unchanged()


def test_a_list_that_contains_itself_and_a_lock(recwarn):
    items = [threading.Lock(), functools]
    items.append(items)
    copies = Copies()
    copied, same = copies.copy_parts([items, items], "list")
    assert copied is same is copied[2] is not items
    assert copied[:2] == items[:2]
    assert not recwarn


class Slots:
    __slots__ = ("count",)

    def __del__(self):
        pass


class Table(dict):
    def __del__(self):
        pass


@pytest.mark.parametrize("make", [Slots, Table])
def test_an_object_without_a_dictionary_of_attributes_is_a_warning(make):
    value = make()
    with pytest.warns(UserWarning, match=f"The {make.__name__}, which has a finalizer, cannot be"):
        assert Copies().copy([value])[0] is value


def test_objects_that_cannot_be_copied_have_no_finalizer_of_the_user(tmp_path):
    folder = tempfile.TemporaryDirectory(dir=tmp_path)
    assert has_finalizer(folder)
    folder.cleanup()
    with (tmp_path / "file").open("w") as file:
        assert not has_finalizer(file)
    assert not has_finalizer(number for number in range(3))
    assert not has_finalizer(torch.zeros(1))
