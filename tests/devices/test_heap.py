from __future__ import annotations

import sys

import pytest
import torch

from lightning_batchmem.devices import heap

MIB = 1 << 20

pytestmark = pytest.mark.skipif(heap.in_use_bytes() is None, reason="mallinfo2 is glibc's, since 2.33")


def blocks(count: int) -> list[torch.Tensor]:
    """16 KiB each: below glibc's mmap threshold, so from its heap."""
    return [torch.ones(16 * 1024, dtype=torch.uint8) for _ in range(count)]


def test_in_use_rises_and_falls_with_blocks_of_the_heap() -> None:
    before = heap.in_use_bytes()
    held = blocks(4096)
    with_blocks = heap.in_use_bytes()
    held.clear()
    after = heap.in_use_bytes()
    assert before is not None
    assert with_blocks is not None
    assert after is not None
    assert with_blocks - before == pytest.approx(64 * MIB, rel=0.1)
    assert after - before < MIB


def test_in_use_counts_what_is_mapped_on_its_own() -> None:
    before = heap.in_use_bytes()
    large = torch.ones(64 * MIB, dtype=torch.uint8)
    after = heap.in_use_bytes()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(large.nbytes, rel=0.01)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_nothing_is_known_or_done(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    heap._in_libc.cache_clear()
    try:
        heap.trim()
        assert heap.in_use_bytes() is None
    finally:
        heap._in_libc.cache_clear()
