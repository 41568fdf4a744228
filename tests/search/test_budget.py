from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem._lightning.data_source import stage_loaders
from lightning_batchmem.batches.loaders import LoaderInfo
from lightning_batchmem.batches.probe_batches import ProbeBatches
from lightning_batchmem.plan.options import UNBOUNDED_MAX_BATCH_SIZE, SearchOptions
from lightning_batchmem.plan.records import SearchLimits, Trial
from lightning_batchmem.search import budget as limits
from lightning_batchmem.search.budget import WorkerMemory

KIB = 1024


def stage(*loaders):
    """Loaders of samples of 1 KiB."""
    dataset = TensorDataset(torch.zeros(1, KIB // 4).expand(100_000, -1))
    made = [DataLoader(dataset, **{"batch_size": 2, **one}) for one in loaders]
    sized = tuple(LoaderInfo(one, one.batch_size or 0, 2) for one in made)
    return ProbeBatches(stage_loaders(CombinedLoader(made), sized, "train_dataloader"))


def test_the_batches_ahead_are_counted_and_one_that_is_being_fetched():
    ahead = stage({"num_workers": 2, "prefetch_factor": 3}, {"num_workers": 1}, {})
    memory = WorkerMemory([ahead, stage({"num_workers": 1, "batch_size": 4})])
    assert memory.bytes_at(8) == (7 * 8 + 3 * 8 + 3 * 16) * KIB


def test_pinned_batches_count_twice(monkeypatch):
    probe = stage({"num_workers": 1, "pin_memory": True})
    assert WorkerMemory([probe]).bytes_at(8) == 3 * 8 * KIB
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert WorkerMemory([probe]).bytes_at(8) == 2 * 3 * 8 * KIB


def test_free_host_memory_limits_the_size(monkeypatch, fake_device):
    monkeypatch.setattr(limits, "HostMemory", lambda: fake_device(1000 * KIB, base_bytes=400 * KIB))
    memory = WorkerMemory([stage({"num_workers": 1})])
    assert memory.largest_in_host_memory() == 200
    assert memory.largest_in_host_memory(processes=2) == 100
    assert memory.largest_in_host_memory(processes=500) == 1
    assert WorkerMemory([stage({})]).largest_in_host_memory() == UNBOUNDED_MAX_BATCH_SIZE


def test_all_ranks_use_the_least_limits_and_the_longest_sample(monkeypatch, fake_device):
    monkeypatch.setattr(limits, "steps_are_collective", lambda trainer: False)
    monkeypatch.setattr(limits, "own_budget_bytes", lambda device, trainer: 1000 * KIB)
    # The other rank found a sample of 9 KiB and runs no validation.
    other = (700 * KIB, (50, "dataset"), [([9 * KIB], ("longer",))])
    ranks = SimpleNamespace(size=2, exchange=lambda value: [value, other])
    device = fake_device(budget_bytes=1000 * KIB)
    device.as_host()
    memory = WorkerMemory([stage({"num_workers": 1}), stage({"num_workers": 1})])
    found = limits.search_limits(
        None, device, ranks, SearchOptions(), memory, bounds=[(100, "dataset")]
    )
    assert (found.limit_bytes, found.max_batch_size, found.max_reason) == (700 * KIB, 50, "dataset")
    assert [one.longest_bytes for one in memory.stages] == [[9 * KIB], [KIB]]
    assert memory.stages[0].notes == ("longer",)
    assert memory.bytes_at(8) == 3 * 8 * (9 + 1) * KIB


def test_the_expected_time_is_that_of_the_sizes_to_come():
    bounds = SearchLimits(1000, 1, 50, "dataset")
    trials = [
        Trial(size, "ok", {"forward": 100 + 10 * size}, step_seconds=size / 10) for size in (2, 8)
    ]
    assert limits.expected_seconds(trials[:1], bounds) == 0
    # A rehearsal of 50 samples is 14 steps of 5 s, and 2 s for the restart.
    assert limits.expected_seconds(trials, bounds) == pytest.approx(14 * 5 + 2)
