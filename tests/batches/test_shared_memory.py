"""Memory and open files that a worker shares with this process."""

import ctypes
import math
import multiprocessing
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_batchmem.batches import shared_memory
from lightning_batchmem.batches.isolated import read_isolated
from lightning_batchmem.batches.shared_memory import RestoredMemory, free_shared_bytes
from tests.helpers.samples import batches


class Counting(Dataset):
    """Counts its reads in a buffer of numbers."""

    def __init__(self, counts, holder=None):
        self.parts = {"counts": [counts]}
        self.holder = holder

    def __len__(self):
        return 40

    def __getitem__(self, index):
        counts = self.parts["counts"][0]
        counts[0] += 1
        return torch.tensor(float(counts[0]))


def test_shared_memory_without_a_limit_has_no_bound(monkeypatch):
    assert free_shared_bytes() > 0
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda _: SimpleNamespace(total=0))
    assert free_shared_bytes() == math.inf
    monkeypatch.undo()
    # Not Linux.
    monkeypatch.setattr(shared_memory, "_WORKERS_SHARE", "/nowhere")
    assert free_shared_bytes() == math.inf


@pytest.fixture
def block():
    shared = SharedMemory(create=True, size=64)
    yield shared
    shared.close()
    shared.unlink()


def mapped(tmp_path, mode):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(64))
    return np.memmap(path, dtype=np.int64, mode=mode)


MADE = {
    "tensor": lambda block, path: torch.zeros(8).share_memory_(),
    "view of a tensor": lambda block, path: torch.zeros(4, 8).share_memory_()[2, ::2],
    "array over a tensor": lambda block, path: torch.zeros(8).share_memory_().numpy(),
    "array of processes": lambda block, path: multiprocessing.Array("l", 8),
    "array without a lock": lambda block, path: multiprocessing.RawArray(ctypes.c_double, 8),
    "memory map": lambda block, path: mapped(path, "r+"),
    "view of a memory map": lambda block, path: mapped(path, "r+")[3:],
    "tensor of a memory map": lambda block, path: torch.from_numpy(np.asarray(mapped(path, "r+"))),
    "array in a block": lambda block, path: np.frombuffer(block.buf, dtype=np.int32),
    "block": lambda block, path: block.buf,
}


@pytest.mark.parametrize("reads_in_worker", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_the_reading_of_samples_leaves_no_trace_in_shared_memory(
    name, reads_in_worker, block, tmp_path, monkeypatch
):
    if not reads_in_worker:
        monkeypatch.setattr("multiprocessing.get_start_method", lambda **_: "spawn")
    counts = MADE[name](block, tmp_path)
    counts[0] = 3
    made = batches(Counting(counts), num_workers=0)
    assert made.batch(2)[0].tolist() == [4, 5]
    assert counts[0] == 3
    # Views of the block would keep it open.
    del counts, made


@pytest.mark.parametrize("reads_in_worker", [True, False])
def test_the_reading_of_whole_batches_leaves_no_trace_in_shared_memory(
    reads_in_worker, monkeypatch
):
    if not reads_in_worker:
        monkeypatch.setattr("multiprocessing.get_start_method", lambda **_: "spawn")
    counts = torch.zeros(8).share_memory_()
    loader = DataLoader(Counting(counts), batch_size=4)
    assert read_isolated(loader, first_batch, timeout_seconds=60).tolist() == [1, 2, 3, 4]
    assert counts[0] == 0


def first_batch(loader):
    return next(iter(loader))


def test_a_value_of_processes_is_restored():
    value = multiprocessing.Value("i", 5)
    with RestoredMemory({"value": value}, "data set"):
        value.value = 8
    assert value.value == 5


def test_memory_of_this_process_alone_is_not_recorded(tmp_path):
    private = [torch.zeros(3), np.zeros(3), mapped(tmp_path, "c"), mapped(tmp_path, "r"), b"text"]
    assert not RestoredMemory(private, "data set")._ranges


def test_much_shared_memory_is_a_warning(monkeypatch):
    monkeypatch.setattr(shared_memory, "_LARGEST_BYTES", 100)
    with pytest.warns(UserWarning, match="The data set has 104 bytes in memory that processes"):
        memory = RestoredMemory(torch.zeros(13, dtype=torch.int64).share_memory_(), "data set")
    assert not memory._ranges


class Lines(Dataset):
    """Reads the lines of a file that is open already."""

    def __init__(self, path):
        self.file = path.open()

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(float(self.file.readline()))


def test_a_file_that_is_open_stays_where_it_is(tmp_path):
    path = tmp_path / "lines"
    path.write_text("\n".join(map(str, range(100_000))))
    dataset = Lines(path)
    assert batches(dataset).batch(2)[0].tolist() == [0, 1]
    assert [dataset[0].item() for _ in range(3)] == [0, 1, 2]
    dataset.file.close()
