import gc
import multiprocessing
from contextlib import contextmanager

import pytest
import torch

import lightning_batchmem.batch_finder
from lightning_batchmem import BatchFinder, MemoryProfiler
from lightning_batchmem.devices.base import MemoryStats
from tests.helpers.lawful import quiet_trainer


def pytest_collection_finish():
    """Leave the imported libraries out of garbage collections: a search makes several."""
    gc.freeze()
    # For tiny networks, several threads are slower than one.
    torch.set_num_threads(1)


class FakeDevice:
    """A ``DeviceMemory`` whose use is set by the test, in bytes.

    A ``training_step`` calls ``use(fixed + per_sample * batch_size)`` and ``free()``. Several such
    pairs in one step make a peak that is the maximum of several lines. Use above the budget raises
    torch's out-of-memory error and changes nothing.

    Args:
        budget_bytes: the most that can be in use; may be changed at any time.
        base_bytes: in use from the start and after ``free()``.
    """

    def __init__(self, budget_bytes, base_bytes=0):
        self.name = "cuda"
        self.overrun_kills = False
        self.counts_live_bytes = True
        self.held_is_resident_set = False
        self.shared_by_ranks = False
        self.holds_loader_workers = False
        self.enforces_limits = False
        self.granularity_bytes = 0
        self.budget = budget_bytes
        # If set, reserved bytes are this multiple of allocated bytes.
        self.reserved_ratio = None
        self.num_ooms = 0
        self.num_alloc_retries = 0
        self.num_releases = 0
        self._base_bytes = self._current_bytes = self._peak_bytes = base_bytes

    def as_host(self):
        """Behave as the memory of the host."""
        self.name = "host"
        self.overrun_kills = True
        self.counts_live_bytes = False
        self.held_is_resident_set = True
        self.shared_by_ranks = True
        self.holds_loader_workers = True
        self.enforces_limits = False

    def evictable_bytes(self):
        return 0

    def use(self, size_bytes):
        """Use ``size_bytes`` more; raises ``torch.cuda.OutOfMemoryError`` above the budget."""
        wanted_bytes = self._current_bytes + size_bytes
        if wanted_bytes > self.budget:
            self.num_ooms += 1
            raise torch.cuda.OutOfMemoryError(
                f"CUDA out of memory. {wanted_bytes} of {self.budget} bytes (fake)."
            )
        self._current_bytes = wanted_bytes
        self._peak_bytes = max(self._peak_bytes, wanted_bytes)

    def free(self):
        """Free all but ``base_bytes``."""
        self._current_bytes = self._base_bytes

    def reset_peak(self):
        self._peak_bytes = self._current_bytes

    def peak(self):
        return self._reading(self._peak_bytes)

    def current(self):
        return self._reading(self._current_bytes)

    def private_bytes(self):
        return self._current_bytes

    def budget_bytes(self):
        return self.budget

    def non_torch_bytes(self):
        pass

    @contextmanager
    def limit_enforced(self, limit_bytes):
        previous = self.budget
        if self.enforces_limits:
            self.budget = min(previous, limit_bytes)
        try:
            yield self.enforces_limits
        finally:
            self.budget = previous

    def release_cached(self):
        self.num_releases += 1

    def synchronize(self):
        pass

    def counters(self):
        return {"num_ooms": self.num_ooms, "num_alloc_retries": self.num_alloc_retries}

    def _reading(self, size_bytes):
        reserved_bytes = None
        if self.reserved_ratio is not None:
            reserved_bytes = int(size_bytes * self.reserved_ratio)
        return MemoryStats(size_bytes, reserved_bytes)


@pytest.fixture
def fake_device():
    """The class, for tests that do not import it.

    A test calls ``fake_device(budget_bytes=..., base_bytes=...)``.
    """
    return FakeDevice


@pytest.fixture
def reads_here(monkeypatch):
    """Let a search read samples in this process where the loaders have no workers.

    The start of a worker takes long.
    """
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda **_: "spawn")


@pytest.fixture
def fit(monkeypatch, reads_here):
    """Train for a few steps on the fake device."""

    def run(module, finder, device_memory, *callbacks, **arguments):
        monkeypatch.setattr(
            lightning_batchmem.batch_finder, "device_memory_for", lambda device: device_memory
        )
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
def device(fake_device):
    """The fake device of a search: a budget of 500 MiB."""
    return fake_device(budget_bytes=500 * 2**20)


@pytest.fixture
def search(fit, device):
    """Search in ``fit``, or in another stage without training; returns the plan."""

    def run(module, *callbacks, stage="fit", data=None, **arguments):
        finder = BatchFinder(
            **{"multiple_of": 1, "min_steps_per_epoch": None, **arguments.pop("options", {})}
        )
        steps = {"max_steps": 1} if stage == "fit" else {"max_epochs": 0}
        trainer = fit(
            module, finder, device, *callbacks, **{"num_sanity_val_steps": 0, **steps, **arguments}
        )
        if stage != "fit":
            getattr(trainer, stage)(module, dataloaders=data)
        return finder.plan

    return run


@pytest.fixture
def device_memory(fake_device, monkeypatch):
    """The fake device of every profiler in the test: 1 MiB in use, a budget of 1 GiB."""
    device_memory = fake_device(budget_bytes=2**30, base_bytes=2**20)
    monkeypatch.setattr(MemoryProfiler, "device_memory", lambda profiler, device: device_memory)
    return device_memory
