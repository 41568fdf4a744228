from __future__ import annotations

import gc
import itertools
import logging
import os
import time
from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_batchmem._lightning.data_source import stage_loaders
from lightning_batchmem.batches import samples as sample_sizes
from lightning_batchmem.batches.loaders import LoaderInfo
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.batches.samples import MAX_SIZES

MIB = 2**20


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


def batches(dataset, worst_case=None, *, room_bytes=None, **arguments):
    loader = DataLoader(dataset, batch_size=2, **arguments)
    stage = stage_loaders(CombinedLoader(loader), (info(loader),))
    return ProbeBatches(stage, worst_case, room_bytes=room_bytes)


def read_sizes(dataset, worst_case=None, **arguments):
    loader = DataLoader(dataset, batch_size=2, **arguments)
    return sample_sizes.draw_samples(loader, loader.collate_fn, worst_case, float("inf"))


# Tests of reading samples.


def test_samples_are_read_in_another_process_and_leave_no_trace():
    dataset = changed(lambda index: torch.tensor(os.getpid()))
    own = torch.Generator()
    random = torch.get_rng_state()
    batch, _ = batches(dataset, generator=own).batch(2)
    assert dataset.reads == 0
    assert (batch != os.getpid()).all()
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(own.get_state(), torch.Generator().get_state())
    assert not batch.is_shared()


def test_a_stream_is_not_consumed():
    stream = Stream(iter(range(100)))
    assert batches(stream).batch(5)[0].shape == (5, 1)
    assert batches(stream, float).batch(2)[0].tolist() == [[99], [99]]
    assert next(stream.numbers) == 0


def test_a_data_set_that_no_worker_can_read_is_copied():
    here = os.getpid()

    def sample(index):
        if os.getpid() != here:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        return torch.tensor(index)

    dataset = changed(sample, length=3)
    assert batches(dataset).batch(3)[0].tolist() == [0, 1, 2]
    assert dataset.reads == 0


def test_an_error_of_the_data_set_or_of_the_callable_is_raised_as_it_is(caplog):
    def failing(value):
        raise KeyError("the user's own mistake")

    with caplog.at_level(logging.INFO):
        for dataset, worst_case in ((changed(failing), None), (Numbers(), failing)):
            with pytest.raises(KeyError, match=r"^.the user's own mistake.$") as caught:
                batches(dataset, worst_case)
            assert caught.traceback[-1].name == "failing"


@pytest.mark.parametrize("returned", [None, "long", float("nan"), torch.zeros(2)])
def test_a_callable_must_return_a_number(returned):
    with pytest.raises(ValueError, match=r"^worst_case must return a number, got"):
        batches(Numbers(), lambda sample: returned)


def test_an_empty_data_set_is_an_error():
    with pytest.raises(ValueError, match="the data set must have at least one sample, got none"):
        batches(Stream(iter(())))


def test_a_sample_that_ends_its_worker_is_not_read_again():
    dataset = changed(lambda index: os._exit(3) if index == 3 else torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"worker .* exited unexpectedly"):
        batches(dataset)
    assert dataset.reads == 0


def test_slow_samples_are_kept_as_far_as_they_were_read(monkeypatch):
    monkeypatch.setattr(sample_sizes, "_SCAN_SECONDS", 0.1)
    dataset = changed(lambda index: (time.sleep(0.05), torch.zeros(1))[1])
    drawn = read_sizes(dataset)
    assert 1 <= len(drawn.samples) <= 3
    assert drawn.notes == (
        f"Only {len(drawn.samples)} samples were read in 0 s; larger ones may exist.",
    )
    assert dataset.reads == 0
    assert batches(dataset).notes
    assert not batches(dataset, "typical").notes


def test_a_worker_that_hangs_ends_the_reading(monkeypatch):
    monkeypatch.setattr(sample_sizes, "_SAMPLE_SECONDS", 1.0)
    # The DataLoader waits this long for a worker before it terminates it.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    dataset = changed(lambda index: (time.sleep(100 if index == 9 else 0), torch.zeros(1))[1])
    drawn = read_sizes(dataset)
    # Samples 0, 3 and 6 were read before sample 9.
    assert len(drawn.samples) == 3
    assert drawn.notes
    assert dataset.reads == 0


def test_workers_are_initialized_as_those_of_the_loader():
    loader = {"num_workers": 1, "worker_init_fn": lengthen, "collate_fn": pad}
    assert batches(Numbers(), "longest", **loader).batch(1)[0].tolist() == [[7] * 9]


def lengthen(worker):
    torch.utils.data.get_worker_info().dataset.lengths[7] = 9


def test_no_file_descriptor_is_kept():
    def descriptors_after(times):
        kept = [batches(Numbers(40)) for _ in range(times)]
        gc.collect()
        assert len(kept) == times
        return len(os.listdir("/proc/self/fd"))

    # The first call opens files that stay open, such as that of the resource tracker.
    descriptors_after(1)
    first = descriptors_after(1)
    # Fewer descriptors stay open than one for each sample.
    assert descriptors_after(4) < first + 40


# Tests of the number of samples.


def test_large_samples_hold_at_most_a_quarter_of_the_room():
    dataset = Numbers(length=8, elements=MIB // 8)
    for room_mib, count in ((17, 4), (1, 1), (0, 1)):
        probe = batches(dataset, room_bytes=room_mib * MIB)
        assert probe.held_bytes == pytest.approx(count * MIB, rel=1e-3)
        assert len({sample[0].item() for sample in probe.batch(50)[0]}) == count


def test_the_scan_ends_when_all_sizes_are_equal(monkeypatch):
    assert len(read_sizes(Numbers(2000)).sizes) == 512
    # With this setting, all samples count as slow.
    monkeypatch.setattr(sample_sizes, "_EQUAL_SECONDS", 0.0)
    assert len(read_sizes(Numbers(2000)).sizes) == 64
    assert len(read_sizes(Numbers(2000), "typical").sizes) == 32
    assert len(read_sizes(Numbers(100), "longest").sizes) == 100


def test_the_scan_of_samples_that_differ_ends_at_its_limit(monkeypatch):
    assert MAX_SIZES == 10_000
    monkeypatch.setattr(sample_sizes, "MAX_SIZES", 100)
    dataset = Numbers(2000, lengths={0: 5})
    assert len(read_sizes(dataset, collate_fn=pad).sizes) == 100
    assert len(read_sizes(Stream(itertools.count()), float).sizes) == 100


# Tests of samples of several sizes.

RAGGED = Numbers(200, lengths={37: 16, 38: 12})


def test_batches_that_are_padded_are_made_of_the_longest_sample():
    for worst_case in (None, "longest", len):
        probe = batches(RAGGED, worst_case, collate_fn=pad)
        assert probe.batch(3)[0].tolist() == [[37] * 16] * 3
        assert probe.batch_bytes(50)[0][1] == 50 * 16 * 8
        varied = [probe.batch(3, index, varied=True)[0].shape for index in range(33)]
        assert {(3, 4), (3, 16)} <= set(varied)
    assert batches(RAGGED, collate_fn=pad).longest_bytes == [16 * 8]
    first = batches(RAGGED, lambda sample: -int(sample[0]), collate_fn=pad)
    assert first.batch(1)[0].tolist() == [[0] * 4]


def test_batches_that_are_concatenated_are_the_largest_of_random_ones():
    # The samples have 13.5 elements on average.
    dataset = Numbers(200, lengths={index: 4 + index % 20 for index in range(200)})
    probe = batches(dataset, collate_fn=torch.cat)
    assert probe.batch(1)[0].numel() == 23
    elements = probe.batch(50)[0].numel()
    # If the longest sample were repeated, each would have 23 elements.
    assert 50 * 15 < elements < 50 * 18
    assert probe.batch_bytes(50)[0][1] == pytest.approx(elements * 8, rel=0.02)
    # A batch of 200 has all samples.
    assert probe.batch(200)[0].numel() == pytest.approx(200 * 13.5, rel=0.02)
    varied = [probe.batch(50, index, varied=True)[0].numel() for index in range(5)]
    assert len(set(varied)) > 1
    assert max(varied) <= elements
    assert torch.equal(probe.batch(50)[0], batches(dataset, collate_fn=torch.cat).batch(50)[0])


def of_one_length(samples):
    assert len(samples) > 1, "at least two"
    return torch.stack(samples)


@pytest.mark.parametrize(
    "collate", [list, of_one_length, lambda samples: ["text" * len(one) for one in samples]]
)
def test_batches_that_the_model_combines_are_made_of_the_longest_sample(collate):
    batch, _ = batches(RAGGED, collate_fn=collate).batch(2)
    assert len(batch[0]) == len(batch[1]) == (64 if isinstance(batch[0], str) else 16)


def test_typical_samples_are_those_drawn():
    probe = batches(RAGGED, "typical", collate_fn=pad)
    assert probe.batch(3)[0].tolist() == [[0] * 4, [6] * 4, [12] * 4]
    assert torch.equal(probe.batch(3, 1, varied=True)[0], probe.batch(3)[0])
    assert not probe.notes


@pytest.mark.parametrize(
    ("collate", "used"),
    [(pad, "of the largest sample only"), (torch.cat, "as large as the largest of 1,000 random")],
)
def test_the_note_names_the_sizes_and_the_way_out(collate, used):
    (note,) = batches(RAGGED, collate_fn=collate).notes
    assert "of 200 the largest has 128 bytes in a batch and the median 32" in note
    assert used in note
    assert 'worst_case="typical"' in note


# Tests of batches.


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    where: range


ROWS = torch.zeros(1000, 100)


@pytest.mark.parametrize(("workers", "is_shared"), [(0, False), (1, True)])
def test_a_batch_is_made_of_new_samples_without_the_storage_around_them(workers, is_shared):
    """Without workers each sample takes memory, as in a fetch.

    With workers, only the containers are new.
    """
    dataset = changed(lambda index: Frozen(ROWS[index], range(index)), length=1000)
    probe = batches(dataset, collate_fn=list, num_workers=workers)
    batch, _ = probe.batch(40)
    assert {sample.x.untyped_storage().nbytes() for sample in batch} == {400}
    assert len({id(sample) for sample in batch}) == 40
    assert len({sample.x.data_ptr() for sample in batch}) == (32 if is_shared else 40)
    assert probe.held_bytes >= 32 * 400
    # Workers send samples through shared memory.
    sent = sample_sizes._without_views(Frozen(ROWS[3], range(3)))
    assert sent.x.untyped_storage().nbytes() == 400


def several(mode):
    def loader(size, tag):
        return DataLoader(changed(lambda index: torch.full((1,), tag), length=60), batch_size=size)

    loaders = {"a": loader(2, 1), "b": [loader(3, 2), loader(4, 3)]}
    combined = CombinedLoader(loaders, mode)
    fixed = loaders["b"][0]
    sized = tuple(info(one, follows=one is not fixed) for one in combined.flattened)
    return stage_loaders(combined, sized)


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_a_batch_has_the_collection_of_the_loaders(mode):
    loaders = several(mode)
    probe = ProbeBatches(loaders)
    assert probe.loaders_in_turn == 1
    batch, loader_index = probe.batch(5, 1)
    assert loader_index == 0
    assert batch["a"].flatten().tolist() == [1] * 5
    assert [one.flatten().tolist() for one in batch["b"]] == [[2] * 3, [3] * 10]
    assert str(probe.batch(2)[0]) == str(next(iter(loaders.combined))[0])
    assert [batch_bytes for _, batch_bytes in probe.batch_bytes(5)] == [5 * 8, 3 * 8, 10 * 8]


def test_in_a_sequence_the_loaders_follow_each_other():
    probe = ProbeBatches(several("sequential"))
    assert probe.loaders_in_turn == 3
    for varied in (False, True):
        made = [probe.batch(5, index, varied=varied) for index in range(4)]
        assert [loader_index for _, loader_index in made] == [0, 1, 2, 0]
        numbers = [batch.flatten().tolist() for batch, _ in made]
        assert numbers == [[1] * 5, [2] * 3, [3] * 10, [1] * 5]


def test_each_loader_has_its_own_longest_sample_and_share():
    loaders = [DataLoader(Numbers(60, 4, {7: length}), 2, collate_fn=pad) for length in (20, 12)]
    stage = stage_loaders(CombinedLoader(loaders, "min_size"), tuple(map(info, loaders)))
    probe = ProbeBatches(stage, room_bytes=10**9)
    assert [tuple(one.shape) for one in probe.batch(3)[0]] == [(3, 20), (3, 12)]
    assert probe.longest_bytes == [20 * 8, 12 * 8]
    assert len(probe.notes) == 2
    assert [one.shape[0] for one in ProbeBatches(stage, room_bytes=0).batch(3)[0]] == [3, 3]


def test_a_sample_that_does_not_fit_is_explained():
    message = "Memory ran out while BatchFinder read a single sample of Numbers"
    with pytest.raises(RuntimeError, match=message):
        read_sizes(changed(lambda index: torch.empty(10**15)))
