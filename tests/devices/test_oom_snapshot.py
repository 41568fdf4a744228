import pickle

import pytest
import torch

from lightning_batchmem.devices.oom_snapshot import OomSnapshot


class History:
    """Records the calls of the patched torch."""

    def __init__(self):
        self.is_on = False
        self.calls = []
        self.dump_error = None
        self.record_error = None

    def record(self, enabled="all", **options):
        self.calls.append((enabled, options))
        self.is_on = enabled is not None

    def is_enabled(self):
        if self.record_error is not None:
            raise self.record_error
        return self.is_on

    def dump(self, filename):
        with open(filename, "wb") as file:
            if self.dump_error is not None:
                file.write(b"half of it")
                raise self.dump_error
            pickle.dump({"segments": [], "device_traces": [[]]}, file)


@pytest.fixture
def history(monkeypatch):
    history = History()
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", history.is_enabled, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", history.record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", history.dump)
    return history


CUDA = torch.device("cuda", 0)


def started(directory):
    snapshot = OomSnapshot.start(directory, CUDA)
    assert snapshot is not None
    return snapshot


def test_a_bounded_history_is_recorded_and_stopped(history, tmp_path):
    snapshot = started(tmp_path)
    (enabled, options), *others = history.calls
    assert enabled == "all"
    assert options == {"context": "alloc", "stacks": "python", "max_entries": 100_000}
    assert not others
    snapshot.stop()
    snapshot.stop()
    assert history.calls[1:] == [(None, {})]
    assert not history.is_on


def test_a_foreign_history_continues_and_is_written(history, tmp_path):
    history.is_on = True
    snapshot = started(tmp_path)
    snapshot.write(0)
    snapshot.stop()
    assert history.calls == []
    assert history.is_on
    assert (tmp_path / "oom_snapshot_rank0.pickle").exists()


def test_the_sentence_names_the_file_and_no_older_one_is_overwritten(history, tmp_path):
    directory = tmp_path / "made" / "when written"
    snapshot = started(directory)
    assert not directory.exists()
    sentences = [snapshot.write(rank) for rank in (3, 3, 3, 0)]
    names = [f"oom_snapshot_rank{name}.pickle" for name in ("3", "3_2", "3_3", "0")]
    for sentence, name in zip(sentences, names, strict=True):
        assert f" {directory / name};" in sentence
        assert pickle.loads((directory / name).read_bytes())["device_traces"] == [[]]
    (directory / names[0]).write_text("older")
    snapshot.write(3)
    assert (directory / names[0]).read_text() == "older"


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        MemoryError("host"),
        RuntimeError("not meaningful\nmore"),
    ],
)
def test_a_failure_is_a_sentence_and_leaves_no_half_file(history, tmp_path, error):
    history.dump_error = error
    sentence = started(tmp_path).write(0)
    assert str(error).splitlines()[0] in sentence
    assert str(tmp_path) in sentence
    assert "\n" not in sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("device", "is_local", "error", "reason"),
    [
        ("cpu", True, None, "it needs a CUDA device"),
        ("cuda", False, None, "log_dir is not local"),
        (
            "cuda",
            True,
            RuntimeError("cudaMallocAsync has no recordHistory.\nException raised from"),
            "cudaMallocAsync",
        ),
    ],
)
def test_no_snapshot_is_a_warning(history, tmp_path, device, is_local, error, reason):
    history.record_error = error
    with pytest.warns(UserWarning, match=f"No memory snapshot will be written: {reason}"):
        assert OomSnapshot.start(tmp_path if is_local else None, torch.device(device)) is None
    assert history.calls == []
