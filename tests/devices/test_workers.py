from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from lightning_batchmem.devices.workers import own_bytes, weigh

MIB = 2**20


def test_a_storage_weighs_whole_and_once() -> None:
    rows = torch.zeros(MIB // 4)
    count_bytes, storages = weigh({"all": rows, "first": rows[:2], "again": [rows]})
    assert MIB <= count_bytes < MIB + 2000
    assert storages == 1


def test_small_storages_take_a_page_each() -> None:
    count_bytes, storages = weigh([torch.zeros(1), torch.zeros(1)])
    assert 2 * mmap.PAGESIZE <= count_bytes < 2 * mmap.PAGESIZE + 1000
    assert storages == 2


def test_a_sparse_tensor_weighs_what_it_is_made_of() -> None:
    count_bytes, storages = weigh(torch.ones(MIB // 4).to_sparse())
    assert 3 * MIB <= count_bytes < 3 * MIB + 10_000  # values of 32 bits, indices of 64
    assert storages == 2


def test_what_is_no_tensor_weighs_as_objects_or_pickled() -> None:
    assert MIB <= weigh((np.zeros(MIB, np.uint8), "name"))[0] < MIB + 2000
    assert MIB <= weigh(np.zeros(2 * MIB, np.uint8)[:MIB])[0] < MIB + 2000  # a view is pickled by itself
    numbers = list(range(1000, 11_000))
    assert 36 * 10_000 <= weigh(numbers)[0] < 38 * 10_000  # an object of 28 bytes and a pointer of 8
    assert weigh(numbers)[0] > 10 * len(pickle.dumps(numbers))


def _holder(pipe: Connection, path: Path) -> None:
    mapped = np.memmap(path, np.uint8, "r")
    pipe.send(int(mapped.sum()))
    pipe.recv()
    held = [b"1" * (32 * MIB)]
    pipe.send("holds")
    pipe.recv()
    held.append(b"1" * (128 * MIB))
    held.clear()
    pipe.send("let go")
    pipe.recv()
    mapped[:1].sum()


def test_a_process_own_memory_is_that_at_its_peak_without_what_it_shares(tmp_path: Path) -> None:
    shared = bytearray(b"1") * (128 * MIB)  # a forked child has it too, for nothing
    with (tmp_path / "data").open("wb") as file:
        file.write(b"1" * (128 * MIB))
        file.flush()
        os.fsync(file.fileno())
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_holder, args=(there, tmp_path / "data"), daemon=True)
    process.start()
    slack = 40 * MIB  # pages of the interpreter that parent or child write to

    def own(times: int = 1, batch_bytes: int = 0) -> int:
        return own_bytes([process.pid] * times, batch_bytes)

    try:
        assert here.recv() == ord("1") * 128 * MIB
        assert own() < slack  # a file's pages can be given up
        here.send("go on")
        assert here.recv() == "holds"
        assert 32 * MIB < own() < 32 * MIB + slack
        assert 2 * 32 * MIB < own(2) < 2 * (32 * MIB + slack)
        assert 32 * MIB < own(batch_bytes=64 * MIB) < 32 * MIB + slack  # at rest it holds no batch
        here.send("go on")
        assert here.recv() == "let go"
        assert 160 * MIB < own() < 160 * MIB + slack
        assert 96 * MIB < own(batch_bytes=64 * MIB) < 96 * MIB + slack
        here.send("go on")
    finally:
        process.join(10)
        process.kill()
    assert len(shared) == 128 * MIB


def test_a_process_that_is_gone_is_an_error() -> None:
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    with pytest.raises(psutil.NoSuchProcess):
        own_bytes([process.pid], 0)
