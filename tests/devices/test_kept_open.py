from __future__ import annotations

import copy
import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lightning_batchmem.devices.kept_open import KeptOpen


def test_it_reads_what_the_file_says_now(tmp_path: Path) -> None:
    path = tmp_path / "limit"
    path.write_text("max\n")
    file = KeptOpen(path)
    path.write_text("12345\n")
    assert file.read() == file.read() == b"12345\n"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 and later, torch has threads
def test_a_forked_child_reads_of_itself() -> None:
    file = KeptOpen("/proc/self/stat")
    assert int(file.read().split()[0]) == os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, file.read().split()[0])
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as pipe:
        assert int(pipe.read()) == pid
    assert int(file.read().split()[0]) == os.getpid()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda file: pickle.loads(pickle.dumps(file))])
def test_a_copy_opens_its_own(tmp_path: Path, duplicate: Callable[[KeptOpen], KeptOpen]) -> None:
    path = tmp_path / "limit"
    path.write_text("1")
    file = KeptOpen(path)
    twin = duplicate(file)
    assert twin.descriptor != file.descriptor
    del file
    assert twin.read() == b"1"


def test_it_is_closed_when_dropped(tmp_path: Path) -> None:
    path = tmp_path / "limit"
    path.touch()
    before = psutil.Process().num_fds()
    files = [KeptOpen(path) for _ in range(5)]
    assert psutil.Process().num_fds() == before + 5
    files.clear()
    assert psutil.Process().num_fds() == before


def test_what_is_not_there_is_none_and_raises_without_asking(tmp_path: Path) -> None:
    assert KeptOpen.or_none(tmp_path / "missing") is None
    with pytest.raises(FileNotFoundError):
        KeptOpen(tmp_path / "missing")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_no_missing_file(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(path: str, flags: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        KeptOpen.or_none("/proc/self/status")
