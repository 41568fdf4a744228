import os

import pytest

from lightning_batchmem.plan import json_fields
from lightning_batchmem.plan.json_fields import read_small


def test_a_file_that_waits_for_its_next_line_is_not_waited_for(tmp_path, monkeypatch):
    """As /proc/kmsg, which is a regular file."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    monkeypatch.setattr(json_fields, "check_regular", lambda path: None)
    writer = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(ValueError, match="it has no content yet"):
            read_small(path)
    finally:
        os.close(writer)
