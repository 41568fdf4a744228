import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_batchmem.devices.base import MemoryStats
from lightning_batchmem.devices.peaks import (
    LiveStorages,
    PhasePeaks,
    RequestedBytes,
    StepPeaks,
)
from tests.helpers.wrapped_optimizers import Lookahead

MLP = nn.Sequential(nn.Linear(16, 2), nn.ReLU(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
CONVNET = nn.Sequential(
    nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 1)
)


def peak_bytes(module, shape, size):
    """The peak of the forward pass in the second of two equal training steps."""
    optimizer = torch.optim.Adam(module.parameters())
    counter = LiveStorages()
    counter.track([*module.parameters(), *module.buffers()])
    with counter:
        for _ in range(2):
            counter.reset_peak()
            loss = module(torch.zeros(size, *shape)).mean()
            peak_bytes = counter.peak().allocated_bytes
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    return peak_bytes


@pytest.mark.parametrize(("module", "shape"), [(MLP, (16,)), (CONVNET, (2, 8, 8))])
def test_live_bytes_are_exactly_linear(module, shape):
    peaks = {size: peak_bytes(module, shape, size) for size in (4, 16, 100, 256)}
    slope = (peaks[16] - peaks[4]) // 12
    assert slope > 0
    assert {size: peaks[4] + slope * (size - 4) for size in peaks} == peaks


def test_storages_count_once_and_until_they_are_freed():
    counter = LiveStorages(other_bytes=1000)
    old = torch.zeros(10)
    with counter:
        new = torch.zeros(100)
        view = new[:50]
        assert counter.current() == MemoryStats(1400)
        # A storage that was there before counts from its first use.
        old.add_(1)
        assert counter.current() == MemoryStats(1440)
        del new
        # The view keeps the storage alive.
        assert counter.current() == MemoryStats(1440)
        del view
        assert (counter.current(), counter.peak()) == (MemoryStats(1040), MemoryStats(1440))
        counter.reset_peak()
    assert counter.peak() == MemoryStats(1040)


def test_another_dispatch_mode_makes_counting_impossible():
    assert LiveStorages.is_possible()
    with TorchDispatchMode():
        assert not LiveStorages.is_possible()


def test_requested_bytes_replace_allocated_bytes_where_the_device_counts_them(fake_device):
    device = fake_device(available_bytes=1000, base_bytes=100)
    assert RequestedBytes(device).current() == MemoryStats(100)
    device.current = lambda: MemoryStats(512, 2048, 100)
    assert RequestedBytes(device).current() == MemoryStats(100, 2048, 100)


# Tests of phases.


@pytest.fixture
def device_memory(fake_device):
    return fake_device(available_bytes=10_000, base_bytes=100)


def use_and_free(device_memory, size_bytes):
    device_memory.use(size_bytes)
    device_memory.free()


def test_what_happens_between_two_steps_belongs_to_none(device_memory):
    phase_peaks = PhasePeaks(device_memory)
    phase_peaks.start("forward")
    first = phase_peaks.stop()
    use_and_free(device_memory, 5000)
    # This backward pass belongs to no training step.
    phase_peaks.enter("backward")
    use_and_free(device_memory, 5000)
    phase_peaks.enter("optimizer_step")
    assert first == StepPeaks({"forward": 100}, None)
    phase_peaks.start("forward")
    use_and_free(device_memory, 10)
    assert phase_peaks.stop() == StepPeaks({"forward": 110}, None)


def test_a_phase_that_is_entered_twice_keeps_its_higher_peak(device_memory):
    phase_peaks = PhasePeaks(device_memory)
    phase_peaks.start("forward")
    use_and_free(device_memory, 500)
    phase_peaks.enter("backward")
    use_and_free(device_memory, 900)
    phase_peaks.enter("forward")
    use_and_free(device_memory, 20)
    assert phase_peaks.stop() == StepPeaks({"forward": 600, "backward": 1000}, None)


def test_another_counter_is_used_from_the_next_step_on(device_memory, fake_device):
    phase_peaks = PhasePeaks(fake_device(available_bytes=10_000, base_bytes=7))
    phase_peaks.start("forward")
    assert phase_peaks.stop() == StepPeaks({"forward": 7}, None)
    phase_peaks.read_from(device_memory)
    phase_peaks.start("forward")
    phase_peaks.enter("backward")
    use_and_free(device_memory, 500)
    peaks = phase_peaks.stop()
    assert (peaks, peaks.peak_bytes) == (StepPeaks({"forward": 100, "backward": 600}, None), 600)


@pytest.fixture
def optimizers():
    return [torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1) for _ in range(2)]


def test_optimizers_that_stepped_are_known_until_the_next_step_begins(device_memory, optimizers):
    first, second = optimizers
    phase_peaks = PhasePeaks(device_memory)
    phase_peaks.watch(optimizers)
    phase_peaks.start("forward")
    phase_peaks.enter("optimizer_step")
    first.step()
    use_and_free(device_memory, 500)
    # What follows an optimizer step is a forward pass.
    assert phase_peaks.stop() == StepPeaks({"forward": 600, "optimizer_step": 100}, None)
    assert phase_peaks.stepped == {id(first)}
    phase_peaks.start("forward")
    assert phase_peaks.stepped == set()
    second.step()
    assert phase_peaks.stepped == {id(second)}


def test_only_the_optimizers_watched_last_are_noted_until_unwatch(device_memory, optimizers):
    first, second = optimizers
    phase_peaks = PhasePeaks(device_memory)
    phase_peaks.watch([first])
    phase_peaks.watch([second])
    phase_peaks.start("forward")
    first.step()
    assert phase_peaks.stepped == set()
    second.step()
    assert phase_peaks.stepped == {id(second)}
    phase_peaks.unwatch()
    phase_peaks.start("forward")
    second.step()
    assert phase_peaks.stepped == set()


class Unhooked:
    """Steps, and torch calls no hooks."""

    def step(self):
        pass


def test_an_optimizer_without_hooks_is_taken_to_step_in_every_step(device_memory, optimizers):
    unhooked = Unhooked()
    phase_peaks = PhasePeaks(device_memory)
    phase_peaks.watch([unhooked, optimizers[0]])
    phase_peaks.start("forward")
    assert phase_peaks.stepped == {id(unhooked)}
    optimizers[0].step()
    assert phase_peaks.stepped == {id(unhooked), id(optimizers[0])}
    phase_peaks.watch(optimizers)
    phase_peaks.start("forward")
    assert phase_peaks.stepped == set()


def test_a_step_of_an_optimizer_inside_is_one_of_its_wrapper(device_memory, optimizers):
    wrapper = Lookahead(optimizers[0])
    phase_peaks = PhasePeaks(device_memory)
    phase_peaks.watch([wrapper])
    phase_peaks.start("forward")
    phase_peaks.enter("optimizer_step")
    wrapper.step()
    use_and_free(device_memory, 500)
    assert phase_peaks.stepped == {id(wrapper)}
    assert phase_peaks.stop() == StepPeaks({"forward": 600, "optimizer_step": 100}, None)
