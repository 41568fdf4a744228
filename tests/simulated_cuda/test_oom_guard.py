"""A training on the simulated device whose 200th batch does not fit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_batchmem import OomGuard
from lightning_batchmem._lightning.guard import guarded_closure
from tests.helpers.lawful import quiet_trainer
from tests.helpers.simulated_cuda.device import SimulatedCuda
from tests.helpers.simulated_cuda.search import simulated_module
from tests.helpers.simulated_cuda.trace import trace_of

GB = 10**9
SIZE = 200_000
SIZES = [SIZE] * 199 + [3 * SIZE] + [SIZE] * 20 + [3 * SIZE + 1] + [SIZE] * 9


def train(device: SimulatedCuda, guard: OomGuard | None) -> Any:
    batches = [torch.zeros(1).expand(size) for size in SIZES]
    # A DataLoader accepts any sequence, but its annotation requires a Dataset.
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    guards = [] if guard is None else [guard]
    trainer = quiet_trainer(*guards, max_epochs=1, limit_val_batches=0)
    trainer.fit(simulated_module(device), loader)
    return trainer


@pytest.mark.filterwarnings("ignore:OomGuard. memory ran out in training batch 199")
@pytest.mark.filterwarnings("ignore:OomGuard. 2 training batches ran in parts")
def test_a_training_whose_200th_batch_does_not_fit_runs_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = trace_of("MLP 8x4096 Adam")
    device = SimulatedCuda(trace, 80 * GB)
    with pytest.raises(torch.OutOfMemoryError):
        train(device, None)
    assert device.num_ooms == 1
    device = SimulatedCuda(trace, 80 * GB)
    released = []

    def release_cached() -> None:
        released.append(device.num_ooms)
        device.release_cached()

    memory = SimpleNamespace(release_cached=release_cached)
    monkeypatch.setattr(guarded_closure, "device_memory_for", lambda _: memory)
    guard = OomGuard()
    trainer = train(device, guard)
    assert trainer.global_step == len(SIZES)
    # The second batch that does not fit runs in parts at once.
    assert (guard.oom_splits, device.num_ooms) == (2, 1)
    # The cache is released once, after the error.
    assert released == [1]
    ended_bytes = device.requested
    device.train_step(SIZE)
    assert device.requested == ended_bytes
