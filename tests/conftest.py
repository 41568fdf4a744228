from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import lightning_batchmem.batch_finder
import lightning_batchmem.memory_profiler
from lightning_batchmem import BatchFinder
from lightning_batchmem.devices.base import MemoryStats
from tests.lawful import quiet_trainer


def pytest_collection_finish() -> None:
    """Leave the imported libraries out of garbage collections: a search makes four, of half a second each."""
    gc.freeze()


class FakeDevice:
    """A ``DeviceMemory`` whose use is set by the test, in bytes.

    A ``training_step`` calls ``use(fixed + per_sample * batch_size)`` and ``free()``. Several such pairs in one step
    make a peak that is the maximum of several lines. Use above the budget raises torch's out-of-memory error and
    changes nothing.

    Args:
        budget_bytes: the most that can be in use; may be changed at any time.
        base_bytes: in use from the start and after ``free()``.
    """

    def __init__(self, budget_bytes: int, base_bytes: int = 0) -> None:
        self.name = "cuda"
        self.enforces_limits = False
        self.granularity_bytes = 0
        self.budget = budget_bytes
        self.reserved_ratio: float | None = None  # if set, reserved bytes are this multiple of allocated bytes
        self.num_ooms = 0
        self.num_alloc_retries = 0
        self.num_releases = 0
        self._base_bytes = self._current_bytes = self._peak_bytes = base_bytes

    def use(self, size_bytes: int) -> None:
        """Use ``size_bytes`` more; raises ``torch.cuda.OutOfMemoryError`` above the budget."""
        wanted_bytes = self._current_bytes + size_bytes
        if wanted_bytes > self.budget:
            self.num_ooms += 1
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. {wanted_bytes} of {self.budget} bytes (fake).")
        self._current_bytes = wanted_bytes
        self._peak_bytes = max(self._peak_bytes, wanted_bytes)

    def free(self) -> None:
        """Free all but ``base_bytes``."""
        self._current_bytes = self._base_bytes

    def reset_peak(self) -> None:
        self._peak_bytes = self._current_bytes

    def peak(self) -> MemoryStats:
        return self._reading(self._peak_bytes)

    def current(self) -> MemoryStats:
        return self._reading(self._current_bytes)

    def private_bytes(self) -> int:
        return self._current_bytes

    def budget_bytes(self) -> int:
        return self.budget

    def non_torch_bytes(self) -> None:
        pass

    @contextmanager
    def limit_enforced(self, limit_bytes: int) -> Iterator[bool]:
        previous = self.budget
        if self.enforces_limits:
            self.budget = min(previous, limit_bytes)
        try:
            yield self.enforces_limits
        finally:
            self.budget = previous

    def release_cached(self) -> None:
        self.num_releases += 1

    def synchronize(self) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return {"num_ooms": self.num_ooms, "num_alloc_retries": self.num_alloc_retries}

    def _reading(self, size_bytes: int) -> MemoryStats:
        return MemoryStats(size_bytes, None if self.reserved_ratio is None else int(size_bytes * self.reserved_ratio))


@pytest.fixture
def fake_device() -> type[FakeDevice]:
    """The class, for tests that do not import it: ``fake_device(budget_bytes=..., base_bytes=...)``."""
    return FakeDevice


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch, fake_device: Any) -> Callable[..., Trainer]:
    """Train for a few steps on the fake device."""

    def run(
        module: LightningModule, finder: BatchFinder, device_memory: Any, *callbacks: Callback, **arguments: Any
    ) -> Trainer:
        monkeypatch.setattr(lightning_batchmem.batch_finder, "device_memory_for", lambda device: device_memory)
        keywords = {
            key: arguments.pop(key)
            for key in ("train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path")
            if key in arguments
        }
        trainer = quiet_trainer(finder, *callbacks, **{"max_steps": 3, **arguments})
        trainer.fit(module, **keywords)
        return trainer

    return run


@pytest.fixture
def device(fake_device: Any) -> Any:
    """The fake device of a search: a budget of 500 MiB."""
    return fake_device(budget_bytes=500 * 2**20)


@pytest.fixture
def search(fit: Any, device: Any) -> Callable[..., Any]:
    """Search in ``fit``, or in another stage without training; returns the plan."""

    def run(module: Any, *callbacks: Callback, stage: str = "fit", data: Any = None, **arguments: Any) -> Any:
        finder = BatchFinder(**{"multiple_of": 1, "min_steps_per_epoch": None, **arguments.pop("options", {})})
        steps = {"max_steps": 1} if stage == "fit" else {"max_epochs": 0}
        trainer = fit(module, finder, device, *callbacks, **{"num_sanity_val_steps": 0, **steps, **arguments})
        if stage != "fit":
            getattr(trainer, stage)(module, dataloaders=data)
        return finder.plan

    return run


@pytest.fixture
def device_memory(fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake device of every profiler in the test: 1 MiB in use, a budget of 1 GiB."""
    device_memory = fake_device(budget_bytes=2**30, base_bytes=2**20)
    monkeypatch.setattr(lightning_batchmem.memory_profiler, "device_memory_for", lambda device, quick: device_memory)
    return device_memory
