import io
import os
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from lightning_batchmem.plan.printing import print_or_warn, why_not_printed

TEXT = "size: größe \ud83d"


def stream_of(descriptor, **options):
    return open(descriptor, "w", encoding="utf-8", **options)


def test_a_text_is_printed_as_it_is(capfd):
    print("before", end=" ")  # noqa: T201
    assert why_not_printed("a [bold] text of more than 80 characters " * 3) == ""
    out = capfd.readouterr().out
    assert out.startswith("before a [bold] text of more than 80 characters a [bold] text")
    assert out.count("\n") == 1


def test_what_the_encoding_lacks_is_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert why_not_printed(TEXT) == ""
    assert stream.buffer.getvalue() == rb"size: gr\xf6\xdfe \ud83d" + b"\n"


def test_an_encoding_that_python_does_not_know_is_a_reason(monkeypatch):
    stream = SimpleNamespace(write=[].append, flush=lambda: None, encoding="of-the-project")
    monkeypatch.setattr(sys, "stdout", stream)
    assert why_not_printed(TEXT) == "unknown encoding: of-the-project"
    with pytest.warns(UserWarning, match="Standard output cannot be written: unknown encoding"):
        print_or_warn(TEXT)


def test_a_pipe_that_nobody_reads(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    # The stream tries again when it is closed.
    with suppress(BrokenPipeError), stream_of(writer) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert why_not_printed(TEXT) == ""
        print_or_warn(TEXT)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this file")
def test_a_full_disk(monkeypatch):
    with suppress(OSError), stream_of("/dev/full") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert why_not_printed(TEXT) == "No space left on device"
        with pytest.warns(UserWarning, match="Standard output cannot be written: No space left"):
            print_or_warn(lambda console: console.print("a", "b"))


class Tee:
    """Writes to the terminal and to a log, as scripts have it."""

    def __init__(self):
        self.terminal = sys.stdout
        self.log = []

    def write(self, text):
        self.log.append(text)
        self.terminal.write(text)

    def __getattr__(self, name):
        return getattr(self.terminal, name)


def test_a_stream_that_passes_texts_on_gets_them(monkeypatch):
    _, writer = os.pipe()
    with stream_of(writer) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        tee = Tee()
        monkeypatch.setattr(sys, "stdout", tee)
        assert why_not_printed("a") == ""
        assert "".join(tee.log) == "a\n"
        # W&B replaces the method of the stream.
        monkeypatch.setattr(sys, "stdout", stream)
        written = []
        stream.write = written.append
        assert why_not_printed("b") == ""
        assert "".join(written) == "b\n"


class Odd:
    """What a program may put in place of standard output."""

    def write(self, text):
        raise LookupError("of the project")


@pytest.mark.parametrize("kind", ["closed", "odd", "none"])
def test_streams_that_cannot_be_used(monkeypatch, kind):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", {"closed": closed, "odd": Odd(), "none": None}[kind])
    reasons = {"closed": "I/O operation on closed file", "none": ""}
    assert why_not_printed(TEXT) == reasons.get(kind, "of the project")


def test_a_stream_that_can_only_be_written(monkeypatch):
    parts = []
    stream = SimpleNamespace(write=parts.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stdout", stream)
    assert why_not_printed("a") == ""
    assert "".join(parts) == "a\n"
