from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler

from lightning_batchmem.measure import worker_memory as loader_workers
from lightning_batchmem.measure.worker_memory import WorkerMemory, measure_workers

MIB = 2**20
SAMPLE_BYTES = MIB // 4


class Images(Dataset):
    """Samples of 256 KiB; notes reads in this process, and owns a generator."""

    def __init__(self, length: int = 100, own_bytes: int = 0) -> None:
        self.length = length
        self.reads = 0
        self.generator = torch.Generator()
        self.own_bytes = own_bytes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        if self.own_bytes:
            self.cache = torch.ones(self.own_bytes // 4)
        torch.rand(1, generator=self.generator)
        return torch.full((SAMPLE_BYTES // 4,), float(index))


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    # the one process that spawned workers leave behind in every program
    assert not [child for child in left if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heaps need not settle."""
    monkeypatch.setattr(loader_workers, "_SETTLING_STORAGES", 0)


def test_the_line_is_never_below_a_point_and_never_falls() -> None:
    for points in ({2: 100, 8: 400}, {2: 100, 4: 90, 8: 300}, {2: 100, 4: 250, 8: 260}, {2: 500, 8: 100}):
        memory = WorkerMemory(points, least_bytes_per_sample=3.5)
        search_limits = [memory.bytes_at(size) for size in range(1, 50)]
        assert all(memory.bytes_at(size) >= held for size, held in points.items())
        assert all(larger - smaller >= 3 for smaller, larger in pairwise(search_limits[1:]))
    assert WorkerMemory({2: 100, 8: 400}, 3.5).bytes_at(14) == 700
    assert WorkerMemory({4: 100}, 3.5).bytes_at(8) == 200


def test_loaders_without_workers_hold_nothing() -> None:
    assert measure_workers([], [2, 8]) is None
    assert measure_workers([DataLoader(Images(), batch_size=4)], [2, 8]) is None


@pytest.mark.parametrize("sizes", [[], [0, 2]])
def test_sizes_are_checked(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="batch_sizes must be one or more sizes of at least 1, got"):
        measure_workers([], sizes)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("workers", "ahead"), [(1, 2), (2, 3)])
def test_batches_in_flight_and_in_the_making_are_counted(workers: int, ahead: int) -> None:
    memory = measure_workers([DataLoader(Images(), num_workers=workers, prefetch_factor=ahead)], [2, 8])
    assert memory is not None
    assert list(memory.points) == [2, 8]
    in_flight = workers * ahead + 1
    # 256 KiB a sample, and less than a page of pickle
    assert memory.least_bytes_per_sample == pytest.approx((in_flight + workers) * SAMPLE_BYTES, rel=0.01)
    for size, held_bytes in memory.points.items():
        assert held_bytes > in_flight * size * SAMPLE_BYTES
        assert held_bytes < in_flight * size * SAMPLE_BYTES + workers * (60 * MIB + 3 * size * SAMPLE_BYTES)
    assert memory.bytes_at(64) - memory.points[8] >= 56 * (in_flight + workers) * SAMPLE_BYTES * 0.99


@pytest.mark.usefixtures("at_once")
def test_what_a_worker_keeps_or_passes_through_counts_once_for_each() -> None:
    def held(own_bytes: int) -> int:
        memory = measure_workers([DataLoader(Images(own_bytes=own_bytes), num_workers=2)], [2])
        assert memory is not None
        return memory.points[2]

    # two of them for a moment: the next is there before the last one goes
    assert 2 * 64 * MIB * 0.95 < held(64 * MIB) - held(0) < 2 * 2 * 64 * MIB * 1.05


@pytest.mark.usefixtures("at_once")
def test_loaders_add_up() -> None:
    one, other = DataLoader(Images(), num_workers=1), DataLoader(Images(), num_workers=2)
    alone, both = measure_workers([one], [2, 4]), measure_workers([one, DataLoader(Images()), other], [2, 4])
    assert alone is not None
    assert both is not None
    assert both.least_bytes_per_sample == pytest.approx((3 + 1 + 5 + 2) / (3 + 1) * alone.least_bytes_per_sample)
    assert both.points[2] > alone.points[2]


@pytest.mark.usefixtures("at_once")
def test_pinned_batches_may_be_rounded_up_to_twice_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Images(), num_workers=1, pin_memory=True)
    pageable = measure_workers([loader], [2])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)  # there may be no device to ask
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: None)
    pinned = measure_workers([loader], [2])
    assert pageable is not None
    assert pinned is not None
    assert pinned.least_bytes_per_sample == pytest.approx((6 + 1) / (3 + 1) * pageable.least_bytes_per_sample, rel=0.01)


class Drawing(SubsetRandomSampler):
    """Draws from the generator of the process, or its own, and counts how often it was asked."""

    def __init__(self, indices: list[int], generator: torch.Generator | None = None) -> None:
        super().__init__(indices, generator)
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        random.random()
        np.random.rand()
        return super().__iter__()


def test_no_trace_is_left() -> None:
    own = torch.Generator()
    for sampler in (Drawing(list(range(50))), Drawing(list(range(50)), own)):
        dataset = Images()
        loader = DataLoader(dataset, 2, sampler=sampler, num_workers=2, persistent_workers=True, generator=own)
        used = iter(loader)  # persistent workers of the loader's own, one batch consumed
        next(used)
        asked, workers = sampler.asked, {child.pid for child in multiprocessing.active_children()}
        states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        generators = [own.get_state(), dataset.generator.get_state()]
        assert measure_workers([loader], [2]) is not None
        assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        assert all(
            torch.equal(a, b) for a, b in zip(generators, [own.get_state(), dataset.generator.get_state()], strict=True)
        )
        assert (dataset.reads, sampler.asked) == (0, asked)
        assert {child.pid for child in multiprocessing.active_children()} == workers
        assert loader._iterator is used
        assert len(list(used)) == 24
        used._shutdown_workers()


class Stream(IterableDataset):
    def __init__(self, numbers: Iterator[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((SAMPLE_BYTES // 4,), float(number)) for number in self.numbers)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.zeros(1000)


def test_streams() -> None:
    stream = Stream(iter(range(100)))
    memory = measure_workers([DataLoader(stream, batch_size=2, num_workers=2)], [2, 8])
    assert memory is not None
    assert memory.least_bytes_per_sample == pytest.approx(7 * SAMPLE_BYTES, rel=0.01)
    assert next(stream.numbers) == 0
    assert measure_workers([DataLoader(Endless(), batch_size=2, num_workers=2)], [2, 8]) is not None
    assert measure_workers([DataLoader(Stream(iter(())), batch_size=2, num_workers=1)], [2]) is not None


@pytest.mark.usefixtures("at_once")
def test_loaders_that_make_batches_in_another_way() -> None:
    in_flight_and_making = 3 + 1
    batches = DataLoader(Images(), batch_sampler=BatchSampler(range(7), 3, drop_last=False), num_workers=1)
    memory = measure_workers([batches], [8])
    assert memory is not None
    assert memory.least_bytes_per_sample == pytest.approx(in_flight_and_making * SAMPLE_BYTES, rel=0.01)
    # what the data set gives is the batch
    unbatched = measure_workers([DataLoader(Images(), batch_size=None, num_workers=1, collate_fn=torch.clone)], [8])
    assert unbatched is not None
    assert unbatched.least_bytes_per_sample == pytest.approx(in_flight_and_making * SAMPLE_BYTES / 8, rel=0.01)
    few = measure_workers([DataLoader(Images(length=3), num_workers=1, shuffle=True)], [8])
    assert few is not None
    assert few.least_bytes_per_sample == pytest.approx(memory.least_bytes_per_sample, rel=0.01)


class Settling(Images):
    """Keeps 4 MiB of each of the first 20 reads."""

    kept: list[Tensor]

    def __getitem__(self, index: int) -> Tensor:
        self.kept = [*getattr(self, "kept", []), torch.ones(MIB)][:20]
        return torch.zeros(10)


def test_heaps_are_given_time_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Settling(), num_workers=1, prefetch_factor=2)

    def held() -> int:
        memory = measure_workers([loader], [1])
        assert memory is not None
        return memory.points[1]

    assert held() > 80 * MIB
    monkeypatch.setattr(loader_workers, "_SETTLING_STORAGES", 0)
    assert held() < 60 * MIB
    # ended after one round of two samples, of the 65 there should be: as if it went on
    monkeypatch.setattr(loader_workers, "_SETTLING_STORAGES", 128)
    ticks = iter(range(0, 10**6, 9))
    monkeypatch.setattr(loader_workers.time, "monotonic", lambda: next(ticks))
    assert held() > 65 * 2 * 4 * MIB


class Broken(Images):
    def __getitem__(self, index: int) -> Tensor:
        raise KeyError("the user's own mistake")


class Dying(Images):
    def __getitem__(self, index: int) -> Tensor:
        os._exit(3)


class Waiting(Images):
    """Waits for ever, or until it is told to end."""

    def __getitem__(self, index: int) -> Tensor:
        threading.Event().wait()
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (DataLoader(Broken(), num_workers=2), "memory_limit: KeyError: .the user's own mistake"),
        (DataLoader(Dying(), num_workers=2), "memory_limit: RuntimeError: DataLoader worker"),
        (
            DataLoader(Waiting(), num_workers=1, timeout=0.5),
            "memory_limit: RuntimeError: DataLoader timed out after 0.5",
        ),
        (DataLoader(Images(), num_workers=1, collate_fn=lambda x: x, multiprocessing_context="spawn"), "pickle"),
    ],
    ids=["error", "exit", "hang", "not picklable"],
)
def test_what_cannot_be_measured_is_said_once(loader: DataLoader[Any], said: str) -> None:
    with pytest.warns(UserWarning, match=said) as warned:
        assert measure_workers([loader], [2, 8]) is None
    assert sum("could not be measured" in str(one.message) for one in warned) == 1
    assert not [
        one for one in warned if issubclass(one.category, UserWarning) and "not counted" not in str(one.message)
    ]


def test_unreadable_workers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_maps", denied)
    with pytest.warns(UserWarning, match="is not counted.*AccessDenied"):
        assert measure_workers([DataLoader(Images(), num_workers=2)], [2, 8]) is None


def test_an_interrupt_ends_the_workers_and_goes_on() -> None:
    waiting = threading.get_ident()

    def interrupt_it() -> None:
        while not multiprocessing.active_children():  # amid a fork an interrupt is lost
            time.sleep(0.05)
        time.sleep(1.0)
        # to that thread: the kernel may give it to any, and only that one's wait has to end
        signal.pthread_kill(waiting, signal.SIGINT)

    thread = threading.Thread(target=interrupt_it)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as interrupt:
        measure_workers([DataLoader(Waiting(), num_workers=1)], [2, 8])
    thread.join()
    assert not multiprocessing.active_children()
    assert interrupt.traceback  # which still has the iterator


# torch's own end of an iterator that is not finished
@pytest.mark.filterwarnings("ignore:Exception ignored in.*_MultiProcessingDataLoaderIter.__del__")
def test_an_interrupt_while_workers_start_ends_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = multiprocessing.process.BaseProcess.start, []

    def interrupted(process: Any) -> None:
        if started:
            raise KeyboardInterrupt
        start(process)
        started.append(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        measure_workers([DataLoader(Images(), num_workers=2)], [2, 8])
    assert not started[0].is_alive()
    del interrupt  # which had the iterator: torch ends it, and stumbles, while this test ignores it
    gc.collect()


def test_an_unguarded_script_that_spawns_is_told(tmp_path: Any) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "from lightning_batchmem.measure.worker_memory import measure_workers\n"
        "data = TensorDataset(torch.zeros(10, 1))\n"
        "print(measure_workers([DataLoader(data, num_workers=1, multiprocessing_context='spawn')], [2]))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "None"
    assert "could not be measured, and is not counted" in done.stderr
