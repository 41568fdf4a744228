from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem._lightning.data_source import stage_loaders
from lightning_batchmem.batches.loaders import LoaderInfo
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.plan.policy import ReadingPolicy
from tests.helpers.samples import Numbers, batches, changed, info, pad

KIB = 1024
MIB = 2**20

# Tests of samples of several sizes.

RAGGED = Numbers(200, lengths={37: 16, 38: 12})


def test_batches_that_are_padded_have_the_largest_samples():
    probe = batches(RAGGED, collate_fn=pad)
    batch, _ = probe.batch(3)
    assert batch.shape == (3, 16)
    assert batch[:, 0].tolist()[:2] == [37, 38]
    assert len(set(batch[:, 0].tolist())) == 3
    assert probe.distinct_samples is None
    shapes = [probe.other_lengths(3, index)[0].shape for index in range(200)]
    assert set(shapes) == {(3, 4), (3, 12), (3, 16)}


@pytest.mark.parametrize(
    ("worst_case", "arguments"), [("longest", {}), (None, {"sampler": range(99, 0, -1)})]
)
def test_the_longest_sample_is_repeated_where_no_others_are_known_to_be_as_large(
    worst_case, arguments
):
    policy = ReadingPolicy(max_sample_sizes=90)
    probe = batches(RAGGED, worst_case, policy=policy, collate_fn=pad, **arguments)
    batch, _ = probe.batch(3)
    assert len(set(batch[:, 0].tolist())) == 1
    assert probe.distinct_samples == 1
    assert batch.shape[1] >= 12
    assert probe.batch(1)[0].shape[0] == 1
    assert probe.distinct_samples is None


def test_the_largest_of_many_samples_are_as_large_as_random_batches():
    policy = ReadingPolicy(max_sample_sizes=90)
    dataset = Numbers(1000, lengths={index: 1 + index % 50 for index in range(1000)})
    batch, _ = batches(dataset, policy=policy, collate_fn=pad, shuffle=True).batch(40)
    assert len(set(batch[:, 0].tolist())) == 40
    assert batches(dataset, policy=policy, collate_fn=pad).batch(40)[0].shape == (40, 50)


# Lengths of audio and of text, which hardly go together. The largest sample has index 7.
AUDIO = {7: 30, 8: 29, 9: 28}
TEXT = {40: 12, 41: 11}


def both_lengths(index):
    return AUDIO.get(index, 4), TEXT.get(index, 3)


def padded_pair(samples):
    audio, text = zip(*samples, strict=True)
    return pad(audio), pad(text)


def in_a_dictionary(samples):
    """Arrays, and texts that become numbers here."""
    audio = [torch.from_numpy(sample["in"]["audio"]) for sample in samples]
    text = [torch.ones(len(sample["text"].split())) for sample in samples]
    return {"audio": pad(audio), "text": pad(text)}


def in_lists(samples):
    return [padded_pair([tuple(map(torch.tensor, sample)) for sample in samples])]


TWO_PARTS = {
    "tensors": (
        lambda audio, text: (torch.zeros(audio), torch.zeros(text, dtype=torch.uint8)),
        padded_pair,
        tuple,
    ),
    "array and text in a dictionary": (
        lambda audio, text: {"in": {"audio": np.zeros(audio)}, "text": "x " * text},
        in_a_dictionary,
        lambda batch: (batch["audio"], batch["text"]),
    ),
    "lists of integers": (
        lambda audio, text: ([0] * audio, [0] * text),
        in_lists,
        lambda batch: batch[0],
    ),
    "a list that the step pads": (
        lambda audio, text: (torch.zeros(audio), torch.zeros(text, dtype=torch.uint8)),
        list,
        padded_pair,
    ),
}


@pytest.mark.parametrize("worst_case", [None, "longest"])
@pytest.mark.parametrize("name", TWO_PARTS)
def test_a_batch_has_the_longest_sample_of_each_part(name, worst_case):
    sample, collate, parts_of = TWO_PARTS[name]
    probe = batches(
        changed(lambda index: sample(*both_lengths(index))), worst_case, collate_fn=collate
    )
    for size in (2, 3, 60):
        audio, text = parts_of(probe.batch(size)[0])
        assert (tuple(audio.shape), tuple(text.shape)) == ((size, 30), (size, 12))
    audio, text = parts_of(probe.batch(1)[0])
    # The largest sample by its bytes.
    assert (audio.shape[1], text.shape[1]) == (30, 3)
    if worst_case is None:
        words = "batches of the largest samples, with the longest of each tensor;"
        assert words in probe.notes[0].text


def test_without_room_the_longest_sample_of_each_part_is_kept():
    sample, collate, _ = TWO_PARTS["tensors"]
    dataset = changed(lambda index: sample(*both_lengths(index)))
    probe = batches(dataset, room_bytes=0, collate_fn=collate)
    audio, text = probe.batch(9)[0]
    assert (audio.shape, text.shape) == ((9, 30), (9, 12))
    # The first sample that was read is there too.
    assert len(probe._of_loaders[0].samples) <= 3


def test_workers_hold_batches_that_are_padded_in_each_part():
    sample, collate, _ = TWO_PARTS["tensors"]
    dataset = changed(lambda index: sample(*both_lengths(index)))
    probe = batches(dataset, collate_fn=collate, num_workers=1)
    assert probe.longest_bytes == [30 * 4 + 12]
    assert probe.shared_bytes(20) == 3 * 20 * (30 * 4 + 12)


def padded_images(images):
    height = max(len(image) for image in images)
    width = max(image.shape[-1] for image in images)
    return torch.zeros(len(images), height, width)


@pytest.mark.parametrize("collate", [padded_images, list])
def test_images_of_equal_bytes_may_be_tall_or_wide(collate):
    dataset = changed(lambda index: torch.zeros((4, 9) if index % 9 else (9, 4)))
    probe = batches(dataset, collate_fn=collate)
    assert probe.is_ragged
    images = probe.batch(2)[0]
    assert padded_images(images).shape == (2, 9, 9)


def test_samples_that_are_joined_need_one_shape():
    probe = batches(changed(lambda index: torch.zeros((4, 9) if index % 9 else (9, 4))))
    assert len({image.shape for image in probe.batch(3)[0]}) == 1


def test_batches_are_as_long_as_the_longest_sample_of_all():
    probe = batches(RAGGED, collate_fn=pad, num_workers=1)
    # One worker has made two batches, and one is used.
    assert probe.shared_bytes(50) == 3 * 50 * 16 * 8
    assert probe.longest_bytes == [16 * 8]


def test_batches_that_are_concatenated_are_the_largest_of_random_ones():
    # The samples have 13.5 elements on average.
    dataset = Numbers(200, lengths={index: 4 + index % 20 for index in range(200)})
    probe = batches(dataset, collate_fn=torch.cat, num_workers=1)
    assert probe.batch(1)[0].numel() == 23
    elements = probe.batch(50)[0].numel()
    # If the longest sample were repeated, each would have 23 elements.
    assert 50 * 15 < elements < 50 * 18
    assert probe.shared_bytes(50) == pytest.approx(3 * elements * 8, rel=0.02)
    # A batch of 200 has all samples.
    assert probe.batch(200)[0].numel() == pytest.approx(200 * 13.5, rel=0.02)
    others = [probe.other_lengths(50, index)[0].numel() for index in range(5)]
    assert len(set(others)) > 1
    assert max(others) <= elements
    assert torch.equal(probe.batch(50)[0], batches(dataset, collate_fn=torch.cat).batch(50)[0])


def of_one_length(samples):
    assert len(samples) > 1, "at least two"
    return torch.stack(samples)


@pytest.mark.parametrize(
    ("collate", "lengths"),
    [
        (list, (16, 12)),
        # Such a collate function needs samples of one length.
        (of_one_length, (16, 16)),
        (lambda samples: ["text" * len(sample) for sample in samples], (64, 48)),
    ],
)
def test_batches_that_the_model_combines_have_the_largest_samples(collate, lengths):
    batch, _ = batches(RAGGED, collate_fn=collate).batch(2)
    assert tuple(map(len, batch)) == lengths


def test_typical_samples_are_spread_over_the_data_set():
    probe = batches(RAGGED, "typical", collate_fn=pad)
    # They are drawn at random.
    assert probe.batch(3)[0].tolist() == [[98] * 4, [194] * 4, [107] * 4]
    assert torch.equal(probe.other_lengths(3, 1)[0], probe.batch(3)[0])
    assert not probe.notes


@pytest.mark.parametrize(
    ("collate", "used"),
    [(pad, "of the largest samples only"), (torch.cat, "as large as the largest of 1,000 random")],
)
def test_the_note_names_the_sizes_and_the_way_out(collate, used):
    (note,) = map(str, batches(RAGGED, collate_fn=collate).notes)
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
    again, _ = probe.batch(40)
    both = {sample.x.data_ptr() for sample in batch + again}
    assert len(both) == (40 if is_shared else 80)
    assert probe.sample_bytes >= 512 * 400


def several(mode):
    def loader(size, tag):
        return DataLoader(changed(lambda index: torch.full((1,), tag), length=60), batch_size=size)

    loaders = {"a": loader(2, 1), "b": [loader(3, 2), loader(4, 3)]}
    combined = CombinedLoader(loaders, mode)
    fixed = loaders["b"][0]
    infos = [info(loader, follows=loader is not fixed) for loader in combined.flattened]
    return stage_loaders(combined, infos, "train_dataloader")


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_a_batch_has_the_collection_of_the_loaders(mode):
    loaders = several(mode)
    probe = ProbeBatches(loaders)
    assert probe.loaders_in_turn == 1
    batch, loader_index = probe.batch(5, 1)
    assert loader_index == 0
    assert batch["a"].flatten().tolist() == [1] * 5
    assert [part.flatten().tolist() for part in batch["b"]] == [[2] * 3, [3] * 10]
    assert str(probe.batch(2)[0]) == str(next(iter(loaders.combined))[0])


def test_in_a_sequence_the_loaders_follow_each_other():
    probe = ProbeBatches(several("sequential"))
    assert probe.loaders_in_turn == 3
    for make in (probe.batch, probe.other_lengths):
        pairs = [make(5, index) for index in range(4)]
        assert [loader_index for _, loader_index in pairs] == [0, 1, 2, 0]
        numbers = [batch.flatten().tolist() for batch, _ in pairs]
        assert numbers == [[1] * 5, [2] * 3, [3] * 10, [1] * 5]


def test_each_loader_has_its_own_longest_sample_and_share():
    loaders = [DataLoader(Numbers(60, 4, {7: length}), 2, collate_fn=pad) for length in (20, 12)]
    combined = CombinedLoader(loaders, "min_size")
    stage = stage_loaders(combined, list(map(info, loaders)), "train_dataloader")
    probe = ProbeBatches(stage, room_bytes=10**9)
    assert [tuple(batch.shape) for batch in probe.batch(3)[0]] == [(3, 20), (3, 12)]
    assert probe.longest_bytes == [20 * 8, 12 * 8]
    assert len(probe.notes) == 2
    without_room = ProbeBatches(stage, room_bytes=0)
    assert [batch.shape[0] for batch in without_room.batch(3)[0]] == [3, 3]


@pytest.mark.parametrize("collate", [pad, torch.cat])
def test_without_room_the_first_sample_may_be_the_only_one(collate):
    dataset = Numbers(60, lengths={0: 16})
    probe = batches(dataset, room_bytes=0, collate_fn=collate)
    assert probe.sample_bytes < 300
    assert probe.batch(1)[0].numel() == 16


def test_typical_batches_without_room_have_the_first_sample_only():
    dataset = Numbers(32, lengths={5: 16})
    probe = batches(dataset, "typical", room_bytes=0, collate_fn=pad)
    assert probe.batch(3)[0].tolist() == [[24] * 4] * 3


# Tests of the memory of samples and of workers.


def test_large_samples_hold_at_most_their_share_of_the_room():
    dataset = Numbers(length=8, elements=MIB // 8)
    for room_mib, share, count in ((17, 0.25, 4), (9, 0.5, 4), (1, 0.25, 1), (0, 0.25, 1)):
        policy = ReadingPolicy(samples_share=share)
        probe = batches(dataset, room_bytes=room_mib * MIB, policy=policy)
        assert probe.sample_bytes == pytest.approx(count * MIB, rel=1e-3)
        assert len({sample[0].item() for sample in probe.batch(50)[0]}) == count


def with_workers(*loaders):
    """Batches of loaders of samples of 1 KiB, which are made with these arguments."""
    dataset = TensorDataset(torch.zeros(1, KIB // 4).expand(10_000, -1))
    made = [DataLoader(dataset, **{"batch_size": 2, **arguments}) for arguments in loaders]
    infos = [LoaderInfo(loader, loader.batch_size, 2) for loader in made]
    return ProbeBatches(stage_loaders(CombinedLoader(made), infos, "train_dataloader"))


def test_workers_hold_the_batches_ahead_and_one_that_is_being_fetched():
    probe = with_workers(
        {"num_workers": 2, "prefetch_factor": 3}, {"num_workers": 1, "batch_size": 4}, {}
    )
    assert probe.worker_bytes(8) == (7 * 8 + 3 * 16) * KIB


def test_pinned_batches_count_twice(monkeypatch):
    probe = with_workers({"num_workers": 1, "pin_memory": True})
    assert probe.worker_bytes(8) == 3 * 8 * KIB
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert probe.worker_bytes(8) == 2 * 3 * 8 * KIB
    # The copies are in memory of this process.
    assert probe.shared_bytes(8) == 3 * 8 * KIB


@pytest.mark.parametrize(("mode", "items"), [("max_size_cycle", 5 + 3 + 10), ("sequential", 6)])
def test_the_samples_of_all_loaders_count_as_in_the_profiler(mode, items):
    assert ProbeBatches(several(mode)).items(5) == items


def test_workers_make_no_more_batches_than_an_epoch_has():
    probe = with_workers({"num_workers": 2, "prefetch_factor": 4})
    # 10,000 samples are three batches, and not nine.
    assert probe.shared_bytes(4_000) == 3 * 4_000 * KIB


def test_workers_hold_batches_of_the_longest_sample_of_all_ranks():
    probe = with_workers({"num_workers": 1})
    probe.agree([(probe.longest_bytes, ()), ([9 * KIB], ("longer",))])
    assert probe.worker_bytes(8) == 3 * 8 * 9 * KIB
    assert probe.notes == ("longer",)
