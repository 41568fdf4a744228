"""Bytes of tensors, saved and written back in place."""

import ctypes
import mmap
import tempfile

import psutil
import pytest
import torch

from lightning_batchmem.state.saved_storages import SavedStorages, has_room_for


def test_storages_are_restored_in_place():
    # Bytes are copied, whatever their type is.
    tensor = torch.randn(7, 5).to(torch.bfloat16)
    before = tensor.clone()
    address = tensor.data_ptr()
    kept = SavedStorages(iter([tensor]))
    tensor.zero_()
    kept.write_back()
    assert torch.equal(tensor, before)
    assert tensor.data_ptr() == address


def test_views_and_shared_storages_are_kept_once():
    base = torch.arange(12.0)
    kept = SavedStorages(iter([base[3:7], base.view(3, 4).t(), base]))
    assert len(kept._in_file) == 1
    base.fill_(-1)
    kept.write_back()
    assert torch.equal(base, torch.arange(12.0))


def test_storages_of_several_chunks(monkeypatch):
    monkeypatch.setattr("lightning_batchmem.state.saved_storages._CHUNK_BYTES", 7)
    lengths = (0, 1, 7, 23)
    tensors = [torch.arange(length) for length in lengths]
    kept = SavedStorages(tensors)
    for tensor in tensors:
        tensor.add_(1)
    kept.write_back()
    assert [tensor.tolist() for tensor in tensors] == [list(range(length)) for length in lengths]


def test_a_full_directory_is_named(monkeypatch):
    def open_full(**_):
        return open("/dev/full", "wb", buffering=0)

    monkeypatch.setattr(tempfile, "TemporaryFile", open_full)
    message = rf"optimizer state \(400 bytes\) to {tempfile.gettempdir()}.* Set TMPDIR to"
    with pytest.raises(OSError, match=message):
        SavedStorages([torch.zeros(100)])


def test_the_copy_is_neither_a_visible_file_nor_resident_memory(tmp_path, monkeypatch):
    from lightning_batchmem.devices.host import HostMemory

    device_memory = HostMemory()
    tensor = torch.ones(64 * 2**20, dtype=torch.uint8)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    resident = device_memory.current().allocated_bytes
    kept = SavedStorages(iter([tensor]))
    assert device_memory.current().allocated_bytes - resident < 8 * 2**20
    assert not list(tmp_path.iterdir())
    kept.write_back()
    assert pages_in_cache(kept._file.fileno()) == 0


def test_copies_of_a_device_are_in_memory_where_those_of_all_ranks_have_room(monkeypatch):
    host = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    assert has_room_for(500)
    assert not has_room_for(501)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert has_room_for(125)
    assert not has_room_for(126)


def pages_in_cache(descriptor):
    with mmap.mmap(descriptor, 0) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        resident = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        address = ctypes.c_void_p(ctypes.addressof(first))
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), resident) == 0
        del first
    return sum(page & 1 for page in resident)


def test_small_storages_of_the_device_are_saved_where_the_process_ends_after_its_search(
    monkeypatch,
):
    monkeypatch.setattr(SavedStorages, "largest_bytes", 40)
    on_host = torch.arange(10.0)
    # This device has no memory, so only what is saved can be seen.
    small, large = (torch.empty(count, device="meta") for count in (10, 11))
    monkeypatch.setattr("lightning_batchmem.state.saved_storages.has_room_for", lambda _: False)
    monkeypatch.setattr(SavedStorages, "_chunks_in_file", lambda self: iter(()))
    kept = SavedStorages([on_host, small, large])
    assert [flat.numel() for flat in kept._flats] == [40]
    assert not kept._flats[0].is_cpu
