from __future__ import annotations

import gc
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_batchmem.measure import samples as samples_module
from lightning_batchmem.measure.samples import LoaderSamples


class Counting(Dataset):
    """Counts its reads in this process, and notes the process that reads."""

    def __init__(self, length: int = 100) -> None:
        self.length = length
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        return {"index": torch.tensor(index), "pid": torch.tensor(os.getpid())}


class Owner:
    """Collates with a method of its own, and is too large to be copied, let us say."""

    def __deepcopy__(self, memo: object) -> Owner:
        raise AssertionError("copied")

    def collate(self, samples: list[Any]) -> int:
        return len(samples)


def test_the_owner_of_a_collate_method_is_not_copied() -> None:
    assert LoaderSamples(DataLoader(Counting(), batch_size=4, collate_fn=Owner().collate)).batch(5) == 5


class Stream(IterableDataset):
    """An iterator that can be used up."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([number]) for number in self.numbers)


def test_a_batch_of_any_size_comes_from_the_loaders_own_collate() -> None:
    loader = DataLoader(Counting(), batch_size=4, collate_fn=lambda samples: [s["index"].item() for s in samples])
    samples = LoaderSamples(loader)
    assert len(samples.batch(3)) == 3
    large = samples.batch(100)
    assert len(large) == 100
    assert min(large) == 0
    assert max(large) > 90  # spread over the whole set, not its first samples


def test_samples_are_drawn_in_another_process_and_leave_no_trace() -> None:
    dataset = Counting()
    random = torch.get_rng_state()
    batch = LoaderSamples(DataLoader(dataset, batch_size=4, generator=(own := torch.Generator()))).batch(2)
    assert dataset.reads == 0
    assert (batch["pid"] != os.getpid()).all()
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(own.get_state(), torch.Generator().get_state())
    assert not batch["index"].is_shared()


def test_a_stream_is_not_consumed() -> None:
    stream = Stream(iter(range(1000)))
    assert LoaderSamples(DataLoader(stream, batch_size=4)).batch(5).shape == (5, 1)
    assert next(stream.numbers) == 0


class OnlyHere(Dataset):
    """Refuses to be read in a worker."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.reads = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        if os.getpid() != self.pid:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        self.reads += 1
        return torch.tensor(index)


def test_what_a_worker_cannot_read_is_read_from_a_copy() -> None:
    dataset = OnlyHere()
    assert LoaderSamples(DataLoader(dataset, batch_size=2)).batch(4).tolist() == [0, 1, 2, 0]
    assert dataset.reads == 0


class Broken(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        raise KeyError("the user's own mistake")


def test_a_users_error_stays_the_users_error() -> None:
    with pytest.raises(KeyError, match="the user's own mistake"):
        LoaderSamples(DataLoader(Broken(), batch_size=2))


def test_an_empty_data_set_is_said() -> None:
    with pytest.raises(ValueError, match="at least one sample, got none"):
        LoaderSamples(DataLoader(Stream(iter(())), batch_size=2))


def test_no_file_descriptor_is_kept() -> None:
    loader = DataLoader(Counting(), batch_size=4)

    def descriptors_after(times: int) -> int:
        kept = [LoaderSamples(loader) for _ in range(times)]
        gc.collect()
        assert len(kept) == times
        return len(os.listdir("/proc/self/fd"))

    descriptors_after(1)  # the first one opens what stays open (the resource tracker, say)
    assert descriptors_after(1) == descriptors_after(5)


# The largest sample


class Ragged(Dataset):
    """Samples of four numbers; ``lengths`` of some are others."""

    def __init__(self, length: int = 100, lengths: dict[int, int] | None = None) -> None:
        self.length = length
        self.lengths = lengths or {}
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        return torch.full((self.lengths.get(index, 4),), index)


def together(samples: list[Tensor]) -> list[Tensor]:
    return samples


def test_the_longest_sample_makes_the_whole_batch() -> None:
    dataset = Ragged(1000, {37: 16, 38: 15})
    drawn = LoaderSamples(DataLoader(dataset, batch_size=4, collate_fn=together), worst_case="longest")
    assert [sample.tolist() for sample in drawn.samples] == [[37] * 16]
    assert [len(sample) for sample in drawn.batch(3)] == [16, 16, 16]
    assert dataset.reads == 0
    assert not drawn.samples[0].is_shared()


def test_a_callable_measures_samples_before_they_are_collated() -> None:
    loader = DataLoader(Ragged(), batch_size=4, shuffle=True, collate_fn=together)
    assert LoaderSamples(loader, worst_case=lambda sample: -int(sample[0])).samples[0].tolist() == [0] * 4


def test_a_data_set_that_no_worker_can_read_is_scanned_in_a_copy() -> None:
    dataset = OnlyHere()
    assert LoaderSamples(DataLoader(dataset, batch_size=2), worst_case=float).batch(2).tolist() == [2, 2]
    assert dataset.reads == 0


def test_a_stream_is_not_consumed_by_a_scan() -> None:
    stream = Stream(iter(range(1000)))
    assert LoaderSamples(DataLoader(stream, batch_size=4), worst_case=float).samples == [torch.tensor([999])]
    assert next(stream.numbers) == 0


class OpensLate(Dataset):
    """Opens its file when it is first read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None

    def __len__(self) -> int:
        return self.path.stat().st_size

    def __getitem__(self, index: int) -> int:
        self.file = self.file or self.path.open("rb")
        self.file.seek(index)
        return int(self.file.read(1)[0])


@pytest.mark.parametrize("worst_case", [None, "longest", lambda number: number])
def test_a_file_that_is_opened_late_stays_closed(tmp_path: Path, worst_case: Any) -> None:
    (tmp_path / "data").write_bytes(bytes(range(100)))
    dataset = OpensLate(tmp_path / "data")
    assert LoaderSamples(DataLoader(dataset, batch_size=4), worst_case=worst_case).batch(8).shape == (8,)
    assert dataset.file is None


class WantsItsDataSet:
    """A ``worker_init_fn`` that uses the data set of its worker."""

    def __call__(self, worker: int) -> None:
        torch.utils.data.get_worker_info().dataset.lengths[7] = 9  # type: ignore[union-attr]


@pytest.mark.parametrize("worst_case", ["longest", len])
def test_a_scan_initializes_its_worker_as_the_loader_does(worst_case: Any) -> None:
    loader = DataLoader(Ragged(), batch_size=4, num_workers=1, worker_init_fn=WantsItsDataSet())
    assert LoaderSamples(loader, worst_case=worst_case).samples[0].tolist() == [7] * 9


def fails_on_a_long_one(sample: Tensor) -> int:
    if len(sample) > 10:
        raise KeyError("the user's own measure")
    return len(sample)


def test_an_error_of_the_users_measure_comes_out_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Ragged(lengths={60: 16}), batch_size=4, collate_fn=together)
    with caplog.at_level(logging.INFO), pytest.raises(KeyError, match="the user's own measure") as caught:
        LoaderSamples(loader, worst_case=fails_on_a_long_one)
    assert caught.traceback[-1].name == "fails_on_a_long_one"
    assert "could not be drawn in a worker" not in caplog.text


def test_a_measure_that_fails_in_the_worker_only_is_an_error_with_the_traceback_of_there() -> None:
    here = os.getpid()

    def measure(sample: Tensor) -> int:
        if os.getpid() != here:
            raise OSError("no such thing in a worker")
        return len(sample)

    with pytest.raises(RuntimeError, match=r"(?s)not outside of it.*in measure.*OSError: no such thing in a worker"):
        LoaderSamples(DataLoader(Ragged(), batch_size=4), worst_case=measure)


@pytest.mark.parametrize("returned", [None, "long", float("nan"), torch.zeros(2)])
def test_a_measure_must_return_a_number(returned: Any) -> None:
    with pytest.raises(ValueError, match="worst_case must return a number for a sample, got"):
        LoaderSamples(DataLoader(Ragged(), batch_size=4), worst_case=lambda sample: returned)


class Opaque:
    """Holds what nobody can count."""


class Opaques(Ragged):
    def __getitem__(self, index: int) -> Opaque:  # type: ignore[override]
        return Opaque()


def test_longest_says_when_it_finds_nothing_to_count() -> None:
    with pytest.raises(ValueError, match=r'worst_case must be a callable .* got "longest" for a Opaque'):
        LoaderSamples(DataLoader(Opaques(), batch_size=4, collate_fn=together), worst_case="longest")


@pytest.mark.parametrize("worst_case", ["longest", len])
def test_a_scan_of_an_empty_data_set_is_said(worst_case: Any) -> None:
    with pytest.raises(ValueError, match="at least one sample, got none"):
        LoaderSamples(DataLoader(Stream(iter(())), batch_size=2), worst_case=worst_case)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """What a scan of a data set says."""
    said: list[str] = []
    monkeypatch.setattr(samples_module, "rank_zero_info", said.append)

    def scan(dataset: Any) -> str:
        LoaderSamples(DataLoader(dataset, batch_size=4), worst_case="longest")
        return " ".join(said)

    return scan


def test_a_large_set_is_scanned_in_part_and_all_over(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "_SCANNED_SAMPLES", 50)
    assert report(Ragged()) == "worst_case: of 100 samples 50 were looked at"
    assert samples_module._indices(DataLoader(Ragged(), batch_size=4), 50) == list(range(0, 100, 2))


def test_all_of_a_small_set_is_scanned_without_a_word(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "_SCANNED_SAMPLES", 101)
    assert report(Ragged()) == ""
    assert report(Ragged(101)) == ""
    assert report(Stream(iter(range(100)))) == ""


def test_of_a_long_stream_the_first_samples_are_scanned(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "_SCANNED_SAMPLES", 64)
    assert report(Stream(itertools.count())) == "worst_case: of a stream 64 were looked at"


def test_a_scan_ends_in_time_and_has_been_everywhere_by_then(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "_SCAN_SECONDS", 0.0)
    said = "worst_case: of 1,000 samples 32 were looked at in 0 s, which is all the time for it"
    assert report(Ragged(1000)) == said
    order = samples_module._indices(DataLoader(Ragged(1000), batch_size=4), 1000)
    assert sorted(order) == list(range(1000))
    assert max(order[:10]) == 900


def test_a_scan_follows_a_sampler_of_the_users_own() -> None:
    loader = DataLoader(Ragged(lengths={5: 16, 6: 20}), batch_size=4, sampler=[3, 4, 5])
    assert LoaderSamples(loader, worst_case="longest").samples[0].tolist() == [5] * 16


def test_only_the_largest_sample_comes_back_from_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Any] = []
    scan = samples_module._scan

    def listening(reader: DataLoader[Any]) -> Any:
        class Listening:
            def __iter__(self) -> Iterator[Any]:
                for seen in reader:
                    received.append(seen.larger)
                    yield seen

        return scan(Listening())  # type: ignore[arg-type]

    monkeypatch.setattr(samples_module, "_scan", listening)
    LoaderSamples(DataLoader(Ragged(100, {98: 16}), batch_size=4), worst_case="longest")
    assert [len(larger) for larger in received] == [1, 0, 0, 1]


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    where: range


class Odd(Dataset):
    """Frozen samples with a range in them, views of one large tensor."""

    def __init__(self) -> None:
        self.all = torch.zeros(1000, 100)

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Frozen:
        return Frozen(self.all[index], range(index))


@pytest.mark.parametrize("worst_case", [None, lambda sample: float(len(sample.where))])
def test_samples_hold_no_more_than_themselves(worst_case: Any) -> None:
    drawn = LoaderSamples(DataLoader(Odd(), batch_size=2, collate_fn=list), worst_case)
    assert {sample.x.untyped_storage().nbytes() for sample in drawn.samples} == {400}


@pytest.mark.parametrize(("workers", "shared"), [(0, False), (1, True)])
def test_a_batch_is_made_of_new_samples(workers: int, shared: bool) -> None:
    """Without workers each sample takes memory of its own, as in a fetch; with them only the containers are new."""
    drawn = LoaderSamples(DataLoader(Odd(), batch_size=2, collate_fn=list, num_workers=workers))
    batch = drawn.batch(40)
    assert len({id(sample) for sample in batch}) == 40
    assert len({sample.x.data_ptr() for sample in batch}) == (32 if shared else 40)
    assert (batch[0].x is drawn.samples[0].x) == shared
