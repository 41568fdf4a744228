from functools import partial

import pytest
import torch

from lightning_batchmem.devices import device_memory_for, device_name, utilization_for
from lightning_batchmem.devices.accelerator import AcceleratorMemory
from lightning_batchmem.devices.host import HostMemory

CUDA = torch.device("cuda", 1)
CPU = torch.device("cpu")
MPS = torch.device("mps")


def test_the_host_has_a_reader_if_its_peak_can_be_reset(monkeypatch, tmp_path):
    assert isinstance(device_memory_for(CPU), HostMemory) is HostMemory().can_reset_peak
    without_files = partial(HostMemory, files=tmp_path)
    monkeypatch.setattr("lightning_batchmem.devices.HostMemory", without_files)
    assert device_memory_for(CPU) is None


def test_readers_of_each_device(monkeypatch):
    assert isinstance(device_memory_for(CUDA), AcceleratorMemory)
    assert device_memory_for(MPS) is utilization_for(MPS) is None
    for name in ("meta", "xpu"):
        with pytest.raises(ValueError, match=f"must be a cuda, cpu or mps device, got {name}"):
            device_memory_for(torch.device(name))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert [device_name(device) for device in (CUDA, CPU, MPS)] == ["GPU 1", "host", "mps"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="another test may have started CUDA")
def test_creating_and_reading_the_readers_starts_no_cuda_context():
    device_memory = device_memory_for(CUDA)
    device_memory.reset_peak()
    assert device_memory.peak() == (0, 0, 0)
    assert device_memory.counters() == {}
    assert device_memory.non_torch_bytes() is None
    assert not torch.cuda.is_initialized()
