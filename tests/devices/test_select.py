from functools import partial

import pytest
import torch

from lightning_batchmem.devices import device_memory_for, device_name, utilization_for
from lightning_batchmem.devices.accelerator import AcceleratorMemory
from lightning_batchmem.devices.host import HostMemory

CUDA = torch.device("cuda", 1)
CPU = torch.device("cpu")
OTHERS = [torch.device(name) for name in ("mps", "xpu", "hpu", "xla", "meta")]


@pytest.fixture
def backend(monkeypatch):
    """Sets the allocator of CUDA, which a torch without CUDA lacks."""

    def set_backend(name):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: name)

    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    set_backend("native")
    return set_backend


def test_the_host_has_a_reader_if_its_peak_can_be_reset(monkeypatch, tmp_path):
    assert isinstance(device_memory_for(CPU), HostMemory) is HostMemory().can_reset_peak
    without_files = partial(HostMemory, files=tmp_path)
    monkeypatch.setattr("lightning_batchmem.devices.HostMemory", without_files)
    assert device_memory_for(CPU) is None


def test_readers_of_each_device(monkeypatch, backend):
    assert isinstance(device_memory_for(CUDA), AcceleratorMemory)
    for device in OTHERS:
        assert device_memory_for(device) is utilization_for(device) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    names = [device_name(device) for device in (CUDA, CPU, *OTHERS[:2])]
    assert names == ["GPU 1", "host", "mps", "xpu"]


def test_an_allocator_that_counts_nothing_has_no_reader(monkeypatch, backend):
    backend("cudaMallocAsync")
    assert isinstance(device_memory_for(CUDA), AcceleratorMemory)
    backend("pluggable")
    assert device_memory_for(CUDA) is None
    backend("native")
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert device_memory_for(CUDA) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="another test may have started CUDA")
def test_creating_and_reading_the_readers_starts_no_cuda_context(backend):
    device_memory = device_memory_for(CUDA)
    device_memory.reset_peak()
    assert device_memory.peak() == (0, 0, 0)
    assert device_memory.counters() == {}
    assert device_memory.non_torch_bytes() is None
    assert not torch.cuda.is_initialized()
