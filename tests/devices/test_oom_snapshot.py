"""Snapshots of a history that is made by hand; tests/gpu writes one of CUDA."""

import pytest
import torch

from lightning_batchmem.devices.oom_snapshot import start_snapshot

CUDA = torch.device("cuda", 0)


class History:
    """The functions of torch that are patched, and their calls."""

    def __init__(self):
        self.is_on = False
        self.calls = []
        self.record_error = None
        self.dump_error = None

    def is_enabled(self):
        return self.is_on

    def record(self, enabled="all", **options):
        if self.record_error is not None:
            raise self.record_error
        self.calls.append((enabled, options))

    def dump(self, filename):
        with open(filename, "w") as file:
            file.write("a part")
            if self.dump_error is not None:
                raise self.dump_error
            file.write(" and the rest")


@pytest.fixture
def history(monkeypatch):
    history = History()
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", history.is_enabled, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", history.record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", history.dump)
    return history


def test_a_bounded_history_is_recorded_and_stopped_once(history, tmp_path):
    snapshot = start_snapshot("on_oom", tmp_path, CUDA)
    options = {"context": "alloc", "stacks": "python", "max_entries": 100_000}
    assert history.calls == [("all", options)]
    snapshot.stop()
    snapshot.stop()
    assert history.calls[1:] == [(None, {})]


def test_the_history_of_one_step_is_recorded_in_this_step_only(history, tmp_path):
    snapshot = start_snapshot(3, tmp_path, CUDA)
    texts = []
    for number in range(6):
        snapshot.begin_step(number)
        assert bool(history.calls) == (number >= 3)
        texts.append(snapshot.end_step(1))
        # It has ended after its step.
        assert len(history.calls) == (2 if number >= 3 else 0)
    path = tmp_path / "step_3_snapshot_rank1.pickle"
    assert [bool(text) for text in texts] == [number == 3 for number in range(6)]
    assert f" {path};" in texts[3]
    assert list(tmp_path.iterdir()) == [path]
    snapshot.stop()
    assert snapshot.write(1) == ""
    assert len(history.calls) == 2


def test_memory_that_runs_out_in_the_step_is_written_too(history, tmp_path):
    snapshot = start_snapshot(0, tmp_path, CUDA)
    snapshot.begin_step(0)
    assert "step_0_snapshot_rank0.pickle" in snapshot.write(0)
    snapshot.stop()
    assert history.calls[1:] == [(None, {})]


def test_a_history_of_somebody_else_continues_and_is_written(history, tmp_path):
    history.is_on = True
    snapshot = start_snapshot("on_oom", tmp_path, CUDA)
    snapshot.write(0)
    snapshot.stop()
    assert history.calls == []
    assert (tmp_path / "oom_snapshot_rank0.pickle").exists()


def test_the_sentence_names_the_file_and_no_older_one_is_overwritten(history, tmp_path):
    directory = tmp_path / "made" / "when written"
    snapshot = start_snapshot("on_oom", directory, CUDA)
    assert not directory.exists()
    for rank, name in ((3, "3"), (3, "3_2"), (3, "3_3"), (0, "0")):
        path = directory / f"oom_snapshot_rank{name}.pickle"
        assert f" {path};" in snapshot.write(rank)
        assert path.read_text() == "a part and the rest"
        path.write_text("older")
    assert {path.read_text() for path in directory.iterdir()} == {"older"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("not meaningful\nmore"), "not meaningful"),
    ],
)
def test_a_failure_is_a_sentence_and_leaves_no_half_file(history, tmp_path, error, reason):
    history.dump_error = error
    sentence = start_snapshot("on_oom", tmp_path, CUDA).write(0)
    assert str(tmp_path) in sentence
    assert sentence.endswith(reason)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("device", "is_local", "reason"),
    [
        ("cpu", True, "it needs a CUDA device"),
        ("cuda", False, "it needs a log_dir that is local, and a run without fast_dev_run"),
        ("cuda", True, "cudaMallocAsync has no history"),
    ],
)
def test_no_snapshot_is_a_warning(history, tmp_path, device, is_local, reason):
    history.record_error = RuntimeError("cudaMallocAsync has no history\nException raised from")
    with pytest.warns(UserWarning, match=f"No memory snapshot will be written: {reason}\\.$"):
        made = start_snapshot("on_oom", tmp_path if is_local else None, torch.device(device))
    assert made is None
