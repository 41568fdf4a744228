"""Memory where loader workers put their batches."""

import math
from types import SimpleNamespace

from lightning_batchmem.batches import shared_memory
from lightning_batchmem.batches.shared_memory import free_shared_bytes


def test_shared_memory_without_a_limit_has_no_bound(monkeypatch):
    assert free_shared_bytes() > 0
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda _: SimpleNamespace(total=0))
    assert free_shared_bytes() == math.inf
    monkeypatch.undo()
    # Not Linux.
    monkeypatch.setattr(shared_memory, "_WORKERS_SHARE", "/nowhere")
    assert free_shared_bytes() == math.inf
