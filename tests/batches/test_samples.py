import gc
import itertools
import logging
import os
import re
import resource
import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, Subset, TensorDataset

from lightning_batchmem.batches import samples
from lightning_batchmem.batches.byte_counts import without_views
from lightning_batchmem.batches.loader_size import set_loader_batch_size
from lightning_batchmem.batches.samples import SampleMeasure, read_samples
from lightning_batchmem.devices.tensors import tensors_in
from lightning_batchmem.plan.policy import ReadingPolicy
from tests.helpers.own_loaders import OfClasses
from tests.helpers.samples import Numbers, Stream, batches, changed, pad


def read(dataset, worst_case=None, *, most=32, **policy):
    loader = DataLoader(dataset, batch_size=2, collate_fn=pad)
    measure = SampleMeasure(
        pad, worst_case, ReadingPolicy(**policy), most, worst_case is None, float("inf")
    )
    return read_samples(loader, measure)


def count_read(dataset, worst_case=None, **policy):
    _, sizes = read(dataset, worst_case, **policy)
    return len(sizes.measured)


# Tests of reading samples.


def test_samples_are_read_in_another_process_and_leave_no_trace():
    dataset = changed(lambda index: torch.tensor(os.getpid()))
    generator = torch.Generator()
    random = torch.get_rng_state()
    batch, _ = batches(dataset, generator=generator).batch(2)
    assert dataset.reads == 0
    assert (batch != os.getpid()).all()
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(generator.get_state(), torch.Generator().get_state())
    assert not batch.is_shared()


class OwnTensors(TensorDataset):
    """It may have code of the user."""


class OwnTensor(Tensor):
    """It may have code of the user."""


TENSORS = (torch.arange(600.0).reshape(100, 6),)


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "needs_process"),
    [
        (TensorDataset(*TENSORS), None, False),
        (TensorDataset(*TENSORS), torch.utils.data.default_convert, True),
        (OwnTensors(*TENSORS), None, True),
        (TensorDataset(TENSORS[0].as_subclass(OwnTensor)), None, True),
    ],
)
def test_tensors_that_are_only_indexed_are_read_without_another_process(
    dataset, collate_fn, needs_process, monkeypatch
):
    forks = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(True) or fork())
    probes = batches(dataset, collate_fn=collate_fn)
    assert bool(forks) is needs_process
    monkeypatch.setattr(samples, "default_collate", None)
    of_worker = batches(dataset, collate_fn=collate_fn)
    assert str(probes.batch(8)) == str(of_worker.batch(8))


def test_a_stream_is_not_consumed():
    stream = Stream(iter(range(100)))
    assert batches(stream).batch(5)[0].shape == (5, 1)
    assert next(stream.numbers) == 0


def test_a_data_set_that_no_worker_can_read_is_read_here_and_restored():
    here = os.getpid()

    def sample(index):
        if os.getpid() != here:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        return torch.tensor(index)

    dataset = changed(sample, length=3)
    assert batches(dataset).batch(3)[0].tolist() == [1, 2, 0]
    assert dataset.reads == 0


class OnDevice(Dataset):
    """Numbers whose rows lie on a device, which has no memory here."""

    def __init__(self, rows, numbers):
        self.rows = rows
        self.numbers = numbers
        self.reads = 0

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        READ_BY.append((os.getpid(), self.rows))
        self.reads += 1
        return self.numbers[index]


READ_BY = []


@pytest.mark.parametrize("container", [lambda rows: rows, lambda rows: {"x": rows}])
@pytest.mark.parametrize("outer", [lambda data: data, lambda data: Subset(data, [0, 1, 2])])
def test_a_data_set_on_a_device_is_read_here_with_its_own_tensors(container, outer, caplog):
    caplog.set_level(logging.INFO)
    READ_BY.clear()
    rows = torch.empty(4, 2, device="meta")
    data = OnDevice(container(rows), torch.arange(3.0))
    assert sorted(batches(outer(data)).batch(3)[0].tolist()) == [0, 1, 2]
    assert {pid for pid, _ in READ_BY} == {os.getpid()}
    assert all(tensors_in(read)[0] is rows for _, read in READ_BY)
    assert data.reads == 0
    assert "since a worker could not read it" not in caplog.text


def test_a_data_set_may_refer_to_itself():
    dataset = Numbers(3)
    dataset.parts = [dataset]
    assert batches(dataset).batch(3)[0].shape == (3, 4)


def test_an_error_of_the_data_set_is_raised_as_it_is(caplog):
    def failing(value):
        raise KeyError("the user's own mistake")

    with caplog.at_level(logging.INFO):
        with pytest.raises(KeyError, match=r"^.the user's own mistake.$") as caught:
            batches(changed(failing))
        assert caught.traceback[-1].name == "failing"


def from_files(index):
    if index >= 60:
        raise FileNotFoundError(f"no file {index}")
    return torch.zeros(4)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_sample_that_cannot_be_read_is_left_out_with_a_note(monkeypatch, method):
    # Without a fork the samples are read in this process.
    monkeypatch.setattr("multiprocessing.get_start_method", lambda **_: method)
    made = batches(changed(from_files))
    assert made.batch(80)[0].shape == (80, 4)
    (note,) = map(str, made.notes)
    assert note.startswith(
        "The search left out 40 of 100 samples that could not be read (FileNotFoundError: no file"
    )


def test_reading_ends_where_no_sample_can_be_read(monkeypatch):
    monkeypatch.setattr("multiprocessing.get_start_method", lambda **_: "spawn")
    read_indices = []

    def failing(index):
        read_indices.append(index)
        raise FileNotFoundError(f"no file {index}")

    with pytest.raises(FileNotFoundError, match="no file"):
        batches(changed(failing), policy=ReadingPolicy(equal_sizes=7))
    assert len(read_indices) == 7


def test_samples_that_are_not_reached_are_not_read():
    loader = DataLoader(changed(from_files), batch_size=2)
    measure = SampleMeasure(pad, None, ReadingPolicy(), 100, True, float("inf"), reached=60)
    samples, sizes = read_samples(loader, measure)
    assert (len(samples), sizes.left_out, sizes.is_complete) == (60, "", True)


def test_an_empty_data_set_is_an_error():
    with pytest.raises(ValueError, match="the data set must have at least one sample, got none"):
        batches(Stream(iter(())))


def test_a_sample_that_ends_its_worker_is_not_read_again():
    dataset = changed(lambda index: os._exit(3) if index == 3 else torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"worker .* exited unexpectedly"):
        batches(dataset)
    assert dataset.reads == 0


def test_slow_samples_are_used_as_far_as_they_were_read():
    dataset = changed(lambda index: (time.sleep(0.05), torch.zeros(1))[1])
    quick = ReadingPolicy(scan_seconds=0.1)
    samples, sizes = read(dataset, scan_seconds=0.1)
    assert 1 <= len(samples) <= 3
    assert len(sizes.measured) == len(samples)
    assert not sizes.is_complete
    assert dataset.reads == 0
    (note,) = map(str, batches(dataset, policy=quick).notes)
    # On a busy machine, reading one sample takes seconds.
    assert re.fullmatch(r"Only [123] samples were read; larger ones may exist\.", note)
    assert not batches(dataset, "typical", policy=quick).notes


def test_a_worker_that_hangs_ends_the_reading(monkeypatch):
    # The DataLoader waits this long for a worker before it terminates it.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    dataset = changed(lambda index: (time.sleep(100 if index == 5 else 0), torch.zeros(1))[1])
    samples, sizes = read(dataset, sample_seconds=1.0)
    # Samples 49, 97 and 53 were read before sample 5.
    assert len(samples) == 3
    assert not sizes.is_complete
    assert dataset.reads == 0


def test_workers_are_initialized_as_those_of_the_loader():
    loader = {"num_workers": 1, "worker_init_fn": lengthen, "collate_fn": pad}
    assert batches(Numbers(), "longest", **loader).batch(1)[0].tolist() == [[7] * 9]


def fails(worker):
    raise OverflowError("Python integer out of bounds")


def test_no_worker_is_initialized_for_a_loader_without_workers(caplog):
    caplog.set_level(logging.INFO)
    assert batches(Numbers(), worker_init_fn=fails).batch(1)[0].tolist()[0][0] in range(100)
    assert not caplog.messages


def test_an_error_in_a_worker_is_one_line(caplog):
    caplog.set_level(logging.INFO)
    batches(Numbers(), num_workers=1, worker_init_fn=fails).batch(1)
    assert caplog.messages == [
        "BatchFinder reads Numbers in this process, since a worker could not read it:"
        " OverflowError: Python integer out of bounds"
    ]


def lengthen(worker):
    torch.utils.data.get_worker_info().dataset.lengths[7] = 9


def test_no_file_descriptor_is_kept():
    def descriptors_after(times):
        probes = [batches(Numbers(40)) for _ in range(times)]
        gc.collect()
        assert len(probes) == times
        return len(os.listdir("/proc/self/fd"))

    # The first call opens files that stay open, such as that of the resource tracker.
    descriptors_after(1)
    first = descriptors_after(1)
    # Fewer descriptors stay open than one for each sample.
    assert descriptors_after(4) < first + 40


def test_few_file_descriptors_are_enough(caplog):
    dataset = changed(lambda index: tuple(torch.zeros(index + 1) for _ in range(30)))
    loader = DataLoader(dataset, batch_size=2)
    measure = SampleMeasure(list, None, ReadingPolicy(sample_seconds=5.0), 32, True, float("inf"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    with ExitStack() as undo:
        descriptor = 0
        # Every number up to the highest one is in use, so that only those above it are free.
        while descriptor < highest:
            descriptor = os.open(os.devnull, os.O_RDONLY)
            undo.callback(os.close, descriptor)
        undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor + 30, hard))
        with caplog.at_level(logging.INFO):
            samples, sizes = read_samples(loader, measure)
    # Without the first sample, the reader would wait for its time-out.
    assert "in this process" not in caplog.text
    assert (len(sizes.measured), sizes.is_complete) == (100, True)
    assert len(samples) == 100


# Tests of samples that are missing, and of samplers.


@pytest.mark.parametrize("worst_case", [None, "typical", "longest"])
@pytest.mark.parametrize("workers", [0, 1])
def test_missing_samples_make_no_batch_alone(worst_case, workers, monkeypatch):
    if not workers:
        monkeypatch.setattr("multiprocessing.get_start_method", lambda **_: "spawn")
    dataset = changed(lambda index: torch.full((4,), index) if index % 2 else None)

    def collate(samples):
        return torch.stack([sample for sample in samples if sample is not None])

    made = batches(dataset, worst_case, collate_fn=collate)
    assert made.batch(8)[0].shape == (8, 4)
    # The others have one size.
    assert made.notes == ()
    # Where all samples are missing, the collate function makes its batch of nothing.
    nothing = changed(lambda index: None)
    made = batches(nothing, worst_case, collate_fn=lambda samples: torch.zeros(len(samples), 4))
    assert made.batch(8)[0].shape == (8, 4)


def test_the_time_of_a_scan_counts_missing_samples(monkeypatch):
    monkeypatch.setattr("multiprocessing.get_start_method", lambda **_: "spawn")
    read_indices = []

    def missing(index):
        read_indices.append(index)
        time.sleep(0.01)

    made = batches(
        changed(missing),
        collate_fn=lambda samples: torch.zeros(len(samples), 4),
        policy=ReadingPolicy(scan_seconds=0.05),
    )
    assert made.batch(8)[0].shape == (8, 4)
    assert len(read_indices) < 50


class Holding(Sampler):
    """Indices from the end, with an attribute that cannot be copied."""

    def __init__(self, length, value):
        self.length = length
        self.value = value

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(reversed(range(self.length)))


class HoldingBatches(BatchSampler):
    """Batches of these indices."""

    def __init__(self, length, value):
        super().__init__(Holding(length, value), batch_size=2, drop_last=False)


@pytest.fixture
def uncopied():
    generator = (index for index in range(3))
    yield generator
    # The search has not read from it.
    assert next(generator) == 0


def test_a_sampler_that_cannot_be_copied_is_left_alone(uncopied):
    loader = DataLoader(Numbers(100), batch_size=2, sampler=Holding(100, uncopied))
    measure = SampleMeasure(loader.collate_fn, None, ReadingPolicy(), 32, True, float("inf"))
    samples, sizes = read_samples(loader, measure)
    assert (len(samples), len(sizes.measured)) == (32, 100)


def test_a_batch_sampler_that_cannot_be_copied_gets_its_size(uncopied):
    loader = DataLoader(Numbers(100), batch_sampler=HoldingBatches(100, uncopied))
    set_loader_batch_size(loader, 5)
    assert [len(batch) for batch in loader] == [5] * 20
    measure = SampleMeasure(loader.collate_fn, None, ReadingPolicy(), 32, True, float("inf"))
    samples, sizes = read_samples(loader, measure)
    assert (len(samples), len(sizes.measured)) == (32, 100)


def test_a_batch_sampler_that_does_not_follow_is_no_fault_of_a_worker(caplog):
    loader = DataLoader(Numbers(100), batch_sampler=OfClasses(2, 3))
    set_loader_batch_size(loader, 5)
    measure = SampleMeasure(loader.collate_fn, None, ReadingPolicy(), 32, True, float("inf"))
    with caplog.at_level("INFO"), pytest.raises(ValueError, match="its batches do not depend on"):
        read_samples(loader, measure)
    assert "in this process" not in caplog.text


def test_batches_of_indices_may_be_arrays():
    batches = [np.arange(3), np.arange(3, 7)]
    loader = DataLoader(Numbers(100), batch_sampler=batches)
    measure = SampleMeasure(loader.collate_fn, None, ReadingPolicy(), 32, True, float("inf"))
    _, sizes = read_samples(loader, measure)
    assert len(sizes.measured) == 7


# Tests of the number of samples.


def test_the_reading_ends_when_all_sizes_are_equal():
    # On a busy machine, reading them takes longer than the policy calls quick.
    assert count_read(Numbers(2000), equal_sizes_seconds=60.0) == 512
    # With this setting, all samples count as slow.
    assert count_read(Numbers(2000), equal_sizes_seconds=0.0) == 64
    assert count_read(Numbers(2000), "typical") == 32
    assert count_read(Numbers(100), "longest") == 100


def test_the_reading_of_samples_that_differ_ends_at_its_limit():
    dataset = Numbers(2000, lengths={0: 5})
    assert count_read(dataset, max_sample_sizes=100) == 100
    assert count_read(Stream(itertools.count()), float, max_sample_sizes=100) == 100


def test_as_many_samples_are_kept_as_a_batch_may_have():
    dataset = Numbers(200)
    samples, sizes = read(dataset, most=4)
    assert [int(sample[0]) for sample in samples] == [98, 194, 107, 10]
    assert sizes.bytes_each == [32] * 4
    assert (len(sizes.measured), sizes.is_ragged, sizes.is_complete) == (200, False, True)
    assert len(read(dataset, most=1000)[0]) == 200
    samples, sizes = read(dataset, "typical", most=4)
    assert (len(samples), sizes.is_complete) == (4, False)


def test_from_the_first_sample_of_another_size_all_samples_are_kept():
    """The sample of index 30 is the 27th, and that of index 37 the 53rd of 200."""
    dataset = Numbers(200, lengths={30: 9, 37: 16, 38: 12})
    samples, sizes = read(dataset, most=4)
    assert [int(sample[0]) for sample in samples[:4]] == [98, 194, 107, 10]
    assert {30, 37, 38} <= {int(sample[0]) for sample in samples}
    assert sizes.bytes_each.count(32) > 100
    assert len(samples) == len(sizes.bytes_each) < 200
    # "typical" does not need the largest ones.
    assert len(read(dataset, "typical", most=4)[0]) == 4


def test_without_room_the_largest_sample_is_kept():
    dataset = Numbers(200, lengths={30: 9, 37: 16, 38: 12})
    loader = DataLoader(dataset, batch_size=2, collate_fn=pad)
    samples, sizes = read_samples(loader, SampleMeasure(pad, None, ReadingPolicy(), 200, True, 0))
    assert [int(sample[0]) for sample in samples] == [98, 37]
    assert sizes.bytes_each == [32, 128]


@pytest.mark.slow
def test_no_period_of_the_data_hides_its_longest_samples():
    """Of 20,000 samples, every 64th one at an odd place is longer; 10,000 are read."""
    dataset = Numbers(20_000, lengths=dict.fromkeys(range(33, 20000, 64), 16))
    _, sizes = read(dataset)
    assert len(sizes.measured) == ReadingPolicy.max_sample_sizes
    assert max(sizes.measured) == 16 * 8


def test_a_sample_that_does_not_fit_is_explained():
    message = "Memory ran out while BatchFinder read a single sample of Numbers"
    with pytest.raises(RuntimeError, match=message):
        read(changed(lambda index: torch.empty(10**15)))


@pytest.mark.slow
def test_a_spawned_worker_reads_samples(caplog):
    """What is sent to it must be pickled, else a copy of the data set is read."""
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    with caplog.at_level(logging.INFO):
        probe = batches(TensorDataset(torch.arange(40)), len, **spawned)
    # All samples are equally long, and these are the first ones that are drawn.
    assert probe.batch(2)[0][0].tolist() == [24, 26]
    assert "in this process" not in caplog.text


@dataclass(frozen=True)
class Row:
    x: Tensor
    where: range


def test_workers_send_samples_without_the_storage_around_them():
    row = Row(torch.zeros(1000, 100)[3], range(3))
    assert without_views(row).x.untyped_storage().nbytes() == 400


def test_samples_that_are_the_longest_in_no_way_are_not_kept():
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randint(1, 100, (300, 4), generator=generator)
    data = [[torch.zeros(int(length)) for length in shape] for shape in shapes]
    loader = DataLoader(data, collate_fn=list, shuffle=True)
    # There is no room for samples that are spread over the data set, besides the first.
    samples, sizes = read_samples(loader, SampleMeasure(list, None, ReadingPolicy(), 32, True, 0))
    assert [max(column) for column in zip(*sizes.parts, strict=True)][1:] == [99] * 4
    assert len(samples) <= 1 + 5
