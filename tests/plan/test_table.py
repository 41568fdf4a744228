import sys

import pytest

from lightning_batchmem.plan.printing import table_text


class Broken:
    """A standard output that cannot be written, or that nobody reads any more."""

    encoding = "utf-8"

    def __init__(self, error):
        self.error = error

    def write(self, text):
        raise self.error

    def flush(self):
        raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError()])
def test_a_table_does_not_need_standard_output(monkeypatch, error):
    monkeypatch.setattr(sys, "stdout", Broken(error))
    text = table_text(("part", "memory"), [("a|b", "1.0 MiB")])
    monkeypatch.undo()
    assert text.splitlines() == [
        r"| part |  memory |",
        r"|------|---------|",
        r"| a\|b | 1.0 MiB |",
    ]
