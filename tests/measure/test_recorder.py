"""What is said of a run that breaks off, on a device that a test can fill; with a real Trainer."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

import lightning_batchmem.memory_profiler
from lightning_batchmem.memory_profiler import MemoryProfiler
from tests.profiled import MIB, Net, Validated, data, trainer_for


def notes_of(error):
    return " ".join(getattr(error.value, "__notes__", ()))


@pytest.mark.parametrize(("at_step", "state"), [(0, 0), (3, 48)])
def test_where_memory_ran_out_and_what_it_was_made_of(tmp_path, device_memory, at_step, state):
    def work(step, where):
        if where == "backward":
            device_memory.use(50 * MIB)
            if step == at_step:
                device_memory.use(2000 * MIB)
            device_memory.free()

    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        trainer_for(tmp_path, MemoryProfiler()).fit(Net(work), data())
    note = notes_of(error)
    assert f"memory ran out in train step {at_step} with a batch of 4 samples." in note
    assert "held up to 51.0 MiB of 1,024.0 MiB" in note
    assert "51.0 MiB activations and temporaries" in note or "50.0 MiB activations and temporaries" in note
    assert "optimizer state" in note


def test_an_evaluation_that_runs_out(tmp_path, device_memory):
    def work(step, where):
        if where == "validation":
            device_memory.use(2000 * MIB)

    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        trainer_for(tmp_path, MemoryProfiler(), num_sanity_val_steps=0).fit(Validated(work), data(), data(samples=8))
    assert "memory ran out in validate step 0 with a batch of 4 samples" in notes_of(error)


def test_memory_that_runs_out_between_two_steps(tmp_path, device_memory):
    class Takes(Callback):
        def on_train_epoch_end(self, *_):
            device_memory.use(2000 * MIB)

    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        trainer_for(tmp_path, MemoryProfiler(), Takes()).fit(Net(), data())
    assert "memory ran out between two steps" in notes_of(error)


def test_another_error_gets_no_note(tmp_path, device_memory):
    def work(step, where):
        raise KeyError("the user's own error")

    with pytest.raises(KeyError) as error:
        trainer_for(tmp_path, MemoryProfiler()).fit(Net(work), data())
    assert notes_of(error) == ""


def test_a_device_that_answers_no_more_does_not_hide_the_users_error(tmp_path, device_memory, monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: device-side assert triggered")

    def work(step, where):
        if step == 2:
            monkeypatch.setattr(device_memory, "counters", broken)
            raise KeyError("the user's own error")

    with pytest.raises(KeyError) as error:
        trainer_for(tmp_path, MemoryProfiler(), log_every_n_steps=50).fit(Net(work), data())
    assert "could not finish its report: RuntimeError: CUDA error: device-side assert" in notes_of(error)


class FakeSnapshot:
    """Stands where OomSnapshot does."""

    made: list[FakeSnapshot] = []  # noqa: RUF012 - one for each test, below

    @classmethod
    def start(cls, directory, device_memory):
        snapshot = cls()
        snapshot.directory, snapshot.written, snapshot.stopped = directory, [], 0
        cls.made.append(snapshot)
        return snapshot

    def write(self, rank):
        self.written.append(rank)
        return "the snapshot is written"

    def stop(self):
        self.stopped += 1


@pytest.mark.parametrize("runs_out", [True, False])
def test_a_snapshot_is_written_when_memory_runs_out_and_only_then(tmp_path, device_memory, monkeypatch, runs_out):
    monkeypatch.setattr(lightning_batchmem.memory_profiler, "OomSnapshot", FakeSnapshot)
    monkeypatch.setattr(FakeSnapshot, "made", [])

    def work(step, where):
        if step == 2 and runs_out:
            device_memory.use(2000 * MIB)

    trainer = trainer_for(tmp_path, MemoryProfiler(snapshot="on_oom"))
    if runs_out:
        with pytest.raises(torch.cuda.OutOfMemoryError) as error:
            trainer.fit(Net(work), data())
        assert "MemoryProfiler: the snapshot is written" in notes_of(error)
    else:
        trainer.fit(Net(work), data())
    (snapshot,) = FakeSnapshot.made
    assert snapshot.directory == tmp_path
    assert (snapshot.written, snapshot.stopped) == ([0] if runs_out else [], 1)


def test_a_snapshot_on_the_host_is_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"No memory snapshot .* host"):
        trainer_for(tmp_path, MemoryProfiler(snapshot="on_oom"), max_steps=2).fit(Net(), data())


@pytest.mark.parametrize("arguments", [{"snapshot": "always"}, {"items_fn": 3}])
def test_arguments_that_cannot_be(arguments):
    with pytest.raises(ValueError, match=f"^{next(iter(arguments))} must be"):
        MemoryProfiler(**arguments)


def test_manual_optimization_marks_every_forward_and_automatic_the_first(tmp_path, device_memory):
    """After the only optimizer's step nothing of a step follows, which saves the device a question."""
    asked = []

    class Count(Callback):
        def on_train_batch_start(self, *_):
            asked.append(0)

    peak = device_memory.peak

    def counted():
        asked[-1] += 1
        return peak()

    device_memory.peak = counted
    trainer_for(tmp_path, Count(), MemoryProfiler()).fit(Net(), data())
    assert asked == [3] * 6
