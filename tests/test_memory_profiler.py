"""MemoryProfiler in real Trainers, mostly on a device whose use the test sets."""

from __future__ import annotations

import csv
import math
import os
import tracemalloc

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lightning_batchmem.batch_finder
import lightning_batchmem.measure.recorder
import lightning_batchmem.measure.step_record
import lightning_batchmem.memory_profiler
import lightning_batchmem.report.figures
import lightning_batchmem.report.reporter
import lightning_batchmem.report.step_csv
from lightning_batchmem import BatchFinder, Line, MemoryModel, Plan, Trial
from lightning_batchmem.measure.breakdown import MemoryBreakdown
from lightning_batchmem.measure.phases import StepPeaks
from lightning_batchmem.measure.step_record import DeviceReading, StepRecord
from lightning_batchmem.memory_profiler import MemoryProfiler
from lightning_batchmem.report.reporter import StepReporter
from lightning_batchmem.report.tables import Summary
from tests.lawful import Lawful, law
from tests.profiled import METRICS, MIB, Net, Recorder, Validated, csv_rows, data, rows, spike, trainer_for

EVALUATED = {"peak_allocated_mib", "limit_mib", "samples_per_s", "step_ms", "data_wait_pct", "cpu_pct", "batch_size"}


class Evaluated(Net):
    """Uses 5 MiB in a step of an evaluation."""

    def __init__(self, device_memory):
        super().__init__()
        self.use = lambda: (device_memory.use(5 * MIB), device_memory.free())

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.use()
        return torch.zeros(())

    test_step = predict_step = validation_step


class Gan(LightningModule):
    """Manual optimization with two optimizers; the second forward and the first backward need more."""

    def __init__(self, device_memory, fail_at=None):
        super().__init__()
        self.automatic_optimization = False
        self.one, self.two = nn.Linear(4, 1), nn.Linear(4, 1)
        self.device_memory, self.fail_at = device_memory, fail_at

    def training_step(self, batch, batch_idx):
        for layer, optimizer, forward, backward in zip(
            (self.one, self.two), self.optimizers(), (10, 30), (50, 20), strict=True
        ):
            self.device_memory.use(forward * MIB)
            loss = layer(batch[0]).square().mean()
            loss.register_hook(lambda gradient, mib=backward: self.device_memory.use(mib * MIB))
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.device_memory.free()
            if batch_idx == self.fail_at:
                raise KeyError("the user's error")
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.one.parameters(), 0.1), torch.optim.Adam(self.two.parameters(), 0.1)


class Planned(Callback):
    """Has a plan, like a BatchFinder: fixed memory and 2 MiB a sample."""

    def __init__(self, fixed_mib=1.0):
        memory = MemoryModel({"forward": Line(fixed_mib * MIB, 2.0 * MIB, 2, 4)})
        trials = tuple(Trial(size, "ok", {"forward": (1 + 2 * size) * MIB}) for size in (2, 4))
        self.plan = Plan(4, "memory", True, 1024 * MIB, None, 9 * MIB, trials, memory, None)


def failing(at_step, error=None):
    def work(step, where):
        if step == at_step:
            raise error or KeyError("the user's error")

    return work


def recording(tmp_path, recorder):
    """A logger with a directory, and the recorder."""
    return [CSVLogger(tmp_path), recorder]


def read_one(tmp_path, name):
    (path,) = tmp_path.rglob(name)
    return path.read_text()


def hooks_on(optimizers):
    return sum(len(optimizer._optimizer_step_post_hooks) for optimizer in optimizers)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still between calls of ``sleep``."""

    class Clock:
        now = 100.0

        @classmethod
        def sleep(cls, seconds):
            cls.now += seconds

        @classmethod
        def perf_counter(cls):
            return cls.now

    monkeypatch.setattr(lightning_batchmem.measure.step_record, "time", Clock)
    return Clock


# --- rows of the CSV


def test_every_step_is_a_row_with_the_peak_of_each_phase(tmp_path, device_memory):
    def work(step, where):
        device_memory.use({"forward": 10 + step, "backward": 20 + step, "optimizer_step": 5}[where] * MIB)
        device_memory.free()

    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler).fit(Net(work), data())
    found = csv_rows(tmp_path)
    assert [row["step"] for row in found] == ["0", "1", "2", "3", "4", "5"]
    for step, row in enumerate(found):
        assert (row["stage"], row["batch_size"]) == ("train", "4")
        assert row["limit_mib"] == ("" if step else "1024.0")  # read once a second
        assert float(row["forward_peak_mib"]) == 11 + step
        assert float(row["backward_peak_mib"]) == float(row["peak_allocated_mib"]) == 21 + step
        assert float(row["optimizer_step_peak_mib"]) == 6
        assert row["peak_reserved_mib"] == row["gpu_pct"] == row["items_per_s"] == ""
        assert float(row["samples_per_s"]) == pytest.approx(4 / (float(row["step_ms"]) / 1e3), rel=0.01)
        assert 0 < float(row["data_wait_pct"]) < 100
        assert 0 <= float(row["cpu_pct"]) <= 100
    summary = profiler.summary
    assert summary.phase_peak_bytes == {"forward": 16 * MIB, "backward": 26 * MIB, "optimizer_step": 6 * MIB}
    assert (summary.peak_bytes, summary.peak_step) == (26 * MIB, 5)


def test_limit_and_utilization_are_in_the_rows_in_which_they_were_read(tmp_path, device_memory, monkeypatch):
    monkeypatch.setattr(lightning_batchmem.measure.recorder, "LIMIT_INTERVAL_SECONDS", 0.0)
    trainer_for(tmp_path, MemoryProfiler(), log_every_n_steps=3).fit(Net(), data())
    assert [bool(row["limit_mib"]) for row in csv_rows(tmp_path)] == [True, False, True, False, False, True]
    assert [bool(row["cpu_pct"]) for row in csv_rows(tmp_path)] == [False, False, True, False, False, True]


def test_a_short_last_batch_counts_with_its_size(tmp_path, device_memory):
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler).fit(Net(), data(samples=10))
    assert [row["batch_size"] for row in csv_rows(tmp_path)] == ["4", "4", "2"]
    summary = profiler.summary
    assert summary.samples_per_second == pytest.approx(10 / (summary.steps * summary.step_seconds))


@pytest.mark.parametrize(
    ("arguments", "options"), [({"csv": False}, {}), ({}, {"fast_dev_run": 2}), ({}, {"max_steps": 0})]
)
def test_no_files(tmp_path, device_memory, arguments, options):
    """Not if unwanted, not in a fast_dev_run, and not without a step."""
    trainer_for(tmp_path, MemoryProfiler(**arguments), Planned(), **options).fit(Net(), data())
    assert not list(tmp_path.rglob("memory_*"))


def test_a_remote_log_directory_gets_a_warning_and_no_csv(tmp_path, device_memory, monkeypatch):
    monkeypatch.setattr(Trainer, "log_dir", "s3://bucket/run")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"no memory_per_batch\.csv.*s3://bucket/run"):
        trainer_for(tmp_path, MemoryProfiler()).fit(Net(), data())
    assert not list(tmp_path.iterdir())


def test_an_unwritable_directory_is_an_error_in_setup(tmp_path, device_memory):
    (tmp_path / "root").write_text("a file")
    started = []

    class Watch(Callback):
        def on_fit_start(self, *_):
            started.append("fit")

    with pytest.raises(OSError, match=r"cannot write into the log directory.*root"):
        trainer_for(tmp_path / "root", MemoryProfiler(), Watch()).fit(Net(), data())
    assert not started


def test_a_full_disk_ends_the_csv_and_not_the_training(tmp_path, device_memory, monkeypatch):
    monkeypatch.setattr(lightning_batchmem.report.step_csv, "_FLUSH_SECONDS", 0.0)

    class FillDisk(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                os.dup2(full.fileno(), profiler._reporter._csv._file.fileno())

    net, profiler = Net(), MemoryProfiler()
    with open("/dev/full", "w") as full, pytest.warns(UserWarning, match="no more rows.*No space left"):
        trainer_for(tmp_path, profiler, FillDisk()).fit(net, data())
    assert net.steps == profiler.summary.steps == 6
    assert len(csv_rows(tmp_path)) == 2


# --- the loggers


def test_tensorboard_and_csv_logger_get_the_documented_names(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [TensorBoardLogger(tmp_path, name="tb"), CSVLogger(tmp_path, name="csv")]
    trainer = trainer_for(tmp_path, MemoryProfiler(), Planned(4000.0), logger=loggers, log_every_n_steps=2)
    trainer.fit(Net(), data())
    events = EventAccumulator(str(loggers[0].log_dir))
    events.Reload()
    names = METRICS | {"memory/predicted_mib"}
    assert set(events.Tags()["scalars"]) == names | {"loss", "epoch"}
    for name in names:
        assert [event.step for event in events.Scalars(name)] == [1, 3, 5]
        assert all(math.isfinite(event.value) for event in events.Scalars(name))
    figures = {"memory_over_steps", "memory_composition", "memory_vs_batch_size"}
    assert {f"batchmem/{name}" for name in figures} <= set(events.Tags()["images"])
    assert [image.step for image in events.Images("batchmem/memory_over_steps")] == [5]
    with open(f"{loggers[1].log_dir}/metrics.csv") as file:
        logged = list(csv.DictReader(file))
    assert set(logged[0]) == names | {"loss", "epoch", "step"}
    assert [row["step"] for row in logged if row["batch/size"]] == ["1", "3", "5"]
    assert (tmp_path / "tb" / "version_0" / "memory_per_batch.csv").exists()  # log_dir is the first logger's


@pytest.mark.parametrize(
    ("spike_at", "options", "logged"),
    [
        (2, {"log_every_n_steps": 2}, [(1, 1), (3, 301), (5, 1)]),
        (5, {"log_every_n_steps": 4}, [(3, 1), (5, 301)]),  # the end logs what is left
        (1, {"accumulate_grad_batches": 4}, [(0, 301), (1, 1)]),  # after each optimizer step
        (1, {"log_every_n_steps": 0}, []),
    ],
)
def test_no_peak_is_lost_between_two_logs(tmp_path, device_memory, spike_at, options, logged):
    recorder = Recorder()
    net = Net(spike(device_memory, spike_at, "forward", 300))
    trainer_for(tmp_path, MemoryProfiler(), logger=recorder, **options).fit(net, data())
    assert [(step, metrics["memory/peak_allocated_mib"]) for step, metrics in recorder.ours] == logged
    assert recorder.lightnings == [step for step, _ in logged][: len(recorder.lightnings)]


def test_reserved_bytes_and_throughput_of_all_ranks(tmp_path, device_memory, monkeypatch):
    monkeypatch.setattr(Trainer, "world_size", 2)
    device_memory.reserved_ratio = 2.0
    recorder, profiler = Recorder(), MemoryProfiler()
    trainer_for(tmp_path, profiler, logger=recorder).fit(Net(spike(device_memory, 2, "backward", 99)), data())
    assert recorder.ours[2][1]["memory/peak_reserved_mib"] == 200
    assert profiler.summary.peak_reserved_bytes == 200 * MIB
    for _, metrics in recorder.ours:
        assert metrics["throughput/samples_per_s"] == pytest.approx(2 * 4 / (metrics["throughput/step_ms"] / 1e3))


class Breaks(Recorder):
    """Raises whenever the profiler logs."""

    def log_metrics(self, metrics, step=None):
        super().log_metrics(metrics, step)
        if "loss" not in metrics:
            raise ConnectionError("the server is gone")


def test_a_logger_that_raises_does_not_end_training(tmp_path, device_memory):
    broken, other = Breaks(), Recorder()
    with pytest.warns(UserWarning, match="Breaks gets no more metrics of MemoryProfiler: .* the server is gone"):
        trainer_for(tmp_path, MemoryProfiler(), logger=[broken, other]).fit(Net(), data())
    assert (len(broken.ours), len(other.ours)) == (1, 6)


def test_a_figure_that_cannot_be_drawn_does_not_end_training(tmp_path, device_memory, monkeypatch):
    def log_figures(*_):
        raise ImportError("install lightning-batchmem[plot]")

    notes = []
    monkeypatch.setattr(lightning_batchmem.report.figures, "log_figures", log_figures)
    monkeypatch.setattr(lightning_batchmem.report.reporter, "rank_zero_info", notes.append)
    trainer_for(tmp_path, MemoryProfiler(), logger=TensorBoardLogger(tmp_path)).fit(Net(), data())
    assert notes == ["MemoryProfiler logs no figures: install lightning-batchmem[plot]."]


# --- accumulation, manual, odd batches


def test_without_an_optimizer_step_there_is_no_peak_of_one(tmp_path, device_memory):
    class HoldsOn(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            device_memory.free()

    def work(step, where):
        device_memory.use({"forward": 10, "backward": 20, "optimizer_step": 40}[where] * MIB)

    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler, HoldsOn(), accumulate_grad_batches=2).fit(Net(work), data())
    found = csv_rows(tmp_path)
    assert [row["optimizer_step_peak_mib"] for row in found] == ["", "71.0"] * 3
    assert [row["backward_peak_mib"] for row in found] == ["31.0"] * 6
    assert profiler.summary.breakdown.optimizer_state_bytes > 0  # taken after the first optimizer step


def test_manual_optimization_with_two_optimizers(tmp_path, device_memory):
    recorder, profiler = Recorder(), MemoryProfiler()
    trainer_for(tmp_path, profiler, logger=recorder).fit(Gan(device_memory), data())
    assert profiler.summary.phase_peak_bytes == {
        "forward": 31 * MIB,
        "backward": 61 * MIB,
        "optimizer_step": 61 * MIB,  # memory of backward is freed after its end
    }
    assert [step for step, _ in recorder.ours] == [0, 1, 2, 3, 4, 5]
    assert profiler.summary.breakdown.optimizer_state_bytes == 2 * (4 + 1) * 4 + 2 * 4  # of Adam; SGD has none


def test_an_automatic_step_reads_three_peaks(tmp_path, device_memory):
    reads, peak = [], device_memory.peak

    def counted():
        reads.append(1)
        return peak()

    device_memory.peak = counted
    trainer_for(tmp_path, MemoryProfiler()).fit(Net(), data())
    assert len(reads) == 3 * 6


def test_unknown_samples_are_missing_with_one_warning(tmp_path, device_memory):
    class NoTensors(Net):
        def training_step(self, batch, batch_idx):
            return self.layer(torch.ones(1, 4)).sum()

    recorder, profiler = Recorder(), MemoryProfiler()
    trainer = trainer_for(tmp_path, profiler, logger=recording(tmp_path, recorder))
    with pytest.warns(UserWarning, match="cannot count the samples") as issued:
        trainer.fit(NoTensors(), DataLoader(["text"] * 6, batch_size=2))
    assert len([warning for warning in issued if "cannot count" in str(warning.message)]) == 1
    assert set(recorder.ours[0][1]) == METRICS - {"batch/size", "throughput/samples_per_s"}
    assert [(row["batch_size"], row["samples_per_s"]) for row in csv_rows(tmp_path)] == [("", "")] * 3
    assert (profiler.summary.batch_size, profiler.summary.samples_per_second) == (None, None)


def test_steps_that_lightning_skips_are_no_steps(tmp_path, device_memory):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from (torch.ones(4), torch.ones(4), None, torch.ones(4))

    class Sum(Net):
        def training_step(self, batch, batch_idx):
            return self.layer(batch).sum()

    class StopsEarly(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    profiler = MemoryProfiler()
    with pytest.warns(UserWarning, match="yielded None"):
        trainer_for(tmp_path, profiler).fit(Sum(), DataLoader(Stream(), batch_size=None))
    assert profiler.summary.steps == 3
    trainer_for(tmp_path / "2", profiler, max_epochs=2).fit(StopsEarly(), data())
    assert profiler.summary.steps == 4


@pytest.mark.parametrize("as_a", [int, torch.tensor])
def test_items_are_counted_with_the_users_function(tmp_path, device_memory, as_a):
    recorder, profiler = Recorder(), MemoryProfiler(items_fn=lambda batch: as_a(10 * len(batch[0])))
    trainer_for(tmp_path, profiler, logger=recording(tmp_path, recorder)).fit(Net(), data())
    for (_, metrics), row in zip(recorder.ours, csv_rows(tmp_path), strict=True):
        assert metrics["throughput/items_per_s"] == pytest.approx(10 * metrics["throughput/samples_per_s"])
        assert float(row["items_per_s"]) == pytest.approx(10 * float(row["samples_per_s"]), rel=1e-3)
    assert profiler.summary.items_per_second == pytest.approx(10 * profiler.summary.samples_per_second)


# --- time and stages


def test_the_wait_for_data_is_part_of_the_step_and_known_separately(tmp_path, device_memory, clock):
    class SlowToLoad(TensorDataset):
        def __getitem__(self, index):
            clock.sleep(3)
            return super().__getitem__(index)

    loader = DataLoader(SlowToLoad(torch.ones(4, 4), torch.ones(4, 1)), batch_size=1)
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler).fit(Net(lambda *_: clock.sleep(1)), loader)
    assert [(row["step_ms"], row["data_wait_pct"]) for row in csv_rows(tmp_path)] == [("6000.0", "50.0")] * 4
    assert (profiler.summary.step_seconds, profiler.summary.data_wait_share) == (6, 0.5)


@pytest.mark.parametrize("checkpoints", [True, False])
def test_evaluation_checkpoints_and_the_ends_of_epochs_are_left_out(tmp_path, device_memory, clock, checkpoints):
    def work(step, where):
        clock.sleep(30 if where == "validation" else 1)

    class SlowEnds(Callback):
        def on_train_epoch_end(self, *_):
            clock.sleep(30)

        on_validation_end = on_train_epoch_end

    class SlowCheckpoint(ModelCheckpoint):
        def on_validation_end(self, trainer, module):
            super().on_validation_end(trainer, module)
            clock.sleep(30)

    recorder, profiler = Recorder(), MemoryProfiler()
    callbacks = [profiler, SlowEnds()] + [SlowCheckpoint(tmp_path / "checkpoints")] * checkpoints
    options = {"max_epochs": 2, "val_check_interval": 2, "num_sanity_val_steps": 1}
    trainer = trainer_for(tmp_path, *callbacks, logger=recorder, **options)
    trainer.fit(Validated(work), data(), data(samples=4))
    assert [metrics["throughput/step_ms"] for _, metrics in recorder.ours] == [3000] * 12
    # the wait is unknown after an evaluation, and after a checkpoint
    known = [True, True, False, True, False, True]
    assert ["throughput/data_wait_pct" in metrics for _, metrics in recorder.ours] == known * 2


class FakeTimer:
    """A device on which a step takes 2 s, one step behind the process."""

    marks = 0

    def mark(self):
        self.marks += 1
        return self.marks

    def seconds_between(self, earlier, later):
        return 2.0 * (later - earlier) if later < self.marks else None


def test_the_time_of_the_device_arrives_a_step_later(tmp_path, device_memory, monkeypatch):
    monkeypatch.setattr(lightning_batchmem.memory_profiler, "timer_for", lambda device: FakeTimer())
    recorder, profiler = Recorder(), MemoryProfiler()
    trainer_for(tmp_path, profiler, logger=recording(tmp_path, recorder)).fit(Net(), data())
    found = csv_rows(tmp_path)
    assert [row["step"] for row in found] == ["0", "1", "2", "3", "4", "5"]
    assert [row["step_ms"] for row in found[:-1]] == ["2000.0"] * 5
    assert float(found[-1]["step_ms"]) < 1000  # the device never finished it: wall time
    assert [metrics["throughput/step_ms"] for _, metrics in recorder.ours[1:]] == [2000.0] * 5
    assert profiler.summary.step_seconds == 2.0


def test_validation_in_a_training_has_rows_metrics_and_a_summary(tmp_path, device_memory):
    recorder, profiler = Recorder(), MemoryProfiler()
    options = {"logger": recording(tmp_path, recorder), "val_check_interval": 3, "num_sanity_val_steps": 2}
    with pytest.warns(UserWarning, match=r"validate.*above"):
        trainer_for(tmp_path, profiler, **options).fit(Evaluated(device_memory), data(), data(samples=10))
    part = [("validate", str(step)) for step in range(3)]
    assert [(row["stage"], row["step"]) for row in csv_rows(tmp_path)] == [
        *(("train", str(step)) for step in range(3)),
        *part,
        *(("train", str(step)) for step in range(3, 6)),
        *part,
    ]
    row = csv_rows(tmp_path)[5]
    assert (row["batch_size"], row["evaluation_peak_mib"], row["peak_allocated_mib"]) == ("2", "6.0", "6.0")
    assert row["forward_peak_mib"] == ""
    assert [step for step, _ in recorder.others] == [2, 5]
    for _, metrics in recorder.others:
        assert set(metrics) == {f"validate/{name}" for name in EVALUATED}
        assert metrics["validate/peak_allocated_mib"] == 6
    validation = profiler.summary.validation
    assert (validation.stage, validation.steps, validation.peak_bytes) == ("validate", 6, 6 * MIB)
    assert (profiler.summary.steps, profiler.summary.peak_bytes) == (6, MIB)
    assert profiler.run_peak_bytes == 6 * MIB  # like torch.cuda.max_memory_allocated()
    assert len(profiler.summary.alerts) == 1


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_by_itself(tmp_path, device_memory, stage, capsys):
    recorder, profiler = Recorder(), MemoryProfiler()
    trainer = trainer_for(tmp_path, profiler, logger=recording(tmp_path, recorder))
    getattr(trainer, stage)(Evaluated(device_memory), [data(samples=8), data(samples=2)])
    found = [(row["stage"], row["step"], row["batch_size"]) for row in csv_rows(tmp_path)]
    assert found == [(stage, "0", "4"), (stage, "1", "4"), (stage, "2", "2")]  # counted over both loaders
    ((_, metrics),) = recorder.others
    assert set(metrics) == {f"{stage}/{name}" for name in EVALUATED}
    summary = profiler.summary
    assert (summary.stage, summary.steps, summary.peak_bytes) == (stage, 3, 6 * MIB)
    known = 20 + 4 * 5 * 4
    assert summary.breakdown == MemoryBreakdown(20, 0, 0, 4 * 5 * 4, 5 * MIB, MIB - known)
    assert Summary.from_json(read_one(tmp_path, f"memory_summary_{stage}.json")) == summary
    name = {"validate": "validation", "test": "test", "predict": "prediction"}[stage]
    assert f"Memory of a {name} step" in capsys.readouterr().out


def test_a_test_after_a_training_appends_to_its_file_and_keeps_its_summary(tmp_path, device_memory):
    profilers = [MemoryProfiler() for _ in range(2)]
    one, other = (trainer_for(tmp_path, profiler) for profiler in profilers)
    net = Evaluated(device_memory)
    one.fit(net, data())
    trained = profilers[0].summary
    other.fit(Evaluated(device_memory), data(samples=8))
    one.test(net, data(samples=4), verbose=False)
    stages = [[row["stage"] for row in rows(path)] for path in sorted(tmp_path.glob("memory_per_batch*.csv"))]
    assert stages == [["train"] * 6 + ["test"], ["train"] * 2]
    assert Summary.from_json((tmp_path / "memory_summary.json").read_text()) == trained
    assert Summary.from_json((tmp_path / "memory_summary_1.json").read_text()) == profilers[1].summary
    assert profilers[0].summary.stage == "test"


# --- the summary and breakdown


def test_the_breakdown_of_the_steady_state_adds_up_to_the_peak(tmp_path, device_memory, capsys):
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler).fit(Net(spike(device_memory, 4, "backward", 100)), data())
    weights, batch = (4 + 1) * 4, 4 * 4 * 4 + 4 * 4
    state = 2 * weights + 2 * 4
    breakdown = profiler.summary.breakdown
    assert breakdown == MemoryBreakdown(weights, weights, state, batch, 100 * MIB, MIB - 2 * weights - state - batch)
    assert breakdown.peak_bytes == profiler.summary.peak_bytes == 101 * MIB
    shown = capsys.readouterr().out
    assert "activations and temporaries" in shown
    assert "101.0 MiB at step 4 (4 samples)" in shown


@pytest.mark.parametrize(
    ("work", "options", "breakdown_peak", "text"),
    [
        (0, {}, MIB, "before the first step after an optimizer step"),  # libraries start in the first step
        (0, {"max_steps": 1}, None, "No breakdown"),
    ],
)
def test_a_peak_before_the_steady_state(tmp_path, device_memory, capsys, work, options, breakdown_peak, text):
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler, **options).fit(Net(spike(device_memory, work, "forward", 500)), data())
    assert (profiler.summary.peak_bytes, profiler.summary.peak_step) == (501 * MIB, 0)
    breakdown = profiler.summary.breakdown
    assert (breakdown and breakdown.peak_bytes) == breakdown_peak
    assert text in " ".join(capsys.readouterr().out.split())


def test_gradients_that_validation_freed_are_looked_for_again(tmp_path, device_memory):
    class FreesTwice(Validated):
        def on_validation_model_zero_grad(self):
            if self.steps < 3:
                super().on_validation_model_zero_grad()

    profiler = MemoryProfiler()
    for module, gradients_bytes in ((Validated(), 0), (FreesTwice(), 20)):
        trainer = trainer_for(tmp_path, profiler, val_check_interval=1, num_sanity_val_steps=0)
        trainer.fit(module, data(), data(samples=4))
        assert profiler.summary.breakdown.gradients_bytes == gradients_bytes


def test_the_peaks_of_epoch_and_run_can_be_read_at_any_time(tmp_path, device_memory):
    seen = []

    class Reads(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append((profiler.epoch_peak_bytes // MIB, profiler.run_peak_bytes // MIB))

    profiler = MemoryProfiler()
    assert (profiler.epoch_peak_bytes, profiler.run_peak_bytes) == (None, None)
    trainer_for(tmp_path, profiler, Reads(), max_epochs=2).fit(Net(spike(device_memory, 1, "forward", 9)), data())
    assert seen == [(1, 1)] + [(10, 10)] * 5 + [(1, 10)] * 6
    assert (profiler.epoch_peak_bytes, profiler.run_peak_bytes) == (None, 10 * MIB)


def test_without_a_peak_counter_memory_is_left_out(tmp_path, monkeypatch, capsys):
    """As on MPS."""
    monkeypatch.setattr(lightning_batchmem.memory_profiler, "device_memory_for", lambda device, quick: None)
    recorder, profiler = Recorder(), MemoryProfiler(progress_bar=True)
    trainer = trainer_for(tmp_path, profiler, Planned(), logger=recording(tmp_path, recorder), num_sanity_val_steps=0)
    with pytest.warns(UserWarning, match="measures no memory, because cpu has no peak counter"):
        trainer.fit(Validated(), data(), data(samples=4))
    for row in csv_rows(tmp_path):
        assert not [name for name, value in row.items() if name.endswith("_mib") and value]
        assert row["step_ms"]
    assert set(recorder.ours[0][1]) == {name for name in METRICS if not name.startswith("memory/")}
    assert (profiler.summary.peak_bytes, profiler.summary.limit_bytes, profiler.summary.batch_size) == (None, None, 4)
    shown = capsys.readouterr().out
    assert "6 steps of" in shown
    assert "MiB" not in shown


# --- plans and alerts


def test_the_prediction_of_a_plan_is_logged(tmp_path, device_memory):
    recorder, profiler, planned = Recorder(), MemoryProfiler(), Planned()
    trainer = trainer_for(tmp_path, profiler, planned, logger=recording(tmp_path, recorder))
    trainer.fit(Net(), data(samples=10))
    assert [metrics["memory/predicted_mib"] for _, metrics in recorder.ours] == [9.0, 9.0, 5.0]
    assert profiler.summary.predicted_bytes == 9 * MIB
    assert Plan.from_json(read_one(tmp_path, "batch_plan.json")) == planned.plan


def test_the_plan_of_a_finder_is_found(tmp_path, fake_device, monkeypatch):
    device_memory = fake_device(budget_bytes=200 * MIB)
    monkeypatch.setattr(lightning_batchmem.memory_profiler, "device_memory_for", lambda device, quick: device_memory)
    monkeypatch.setattr(lightning_batchmem.batch_finder, "device_memory_for", lambda device: device_memory)
    finder, profiler, recorder = BatchFinder(), MemoryProfiler(), Recorder()
    trainer = trainer_for(
        tmp_path, profiler, finder, logger=recording(tmp_path, recorder), max_steps=3, max_epochs=None
    )
    trainer.fit(Lawful(device_memory, law))
    logged = [metrics for _, metrics in recorder.others + recorder.ours if "memory/predicted_mib" in metrics]
    assert logged
    for metrics in logged:
        assert metrics["memory/predicted_mib"] == pytest.approx(law(finder.plan.batch_size) / MIB, abs=1e-6)
        assert metrics["memory/peak_allocated_mib"] == pytest.approx(law(finder.plan.batch_size) / MIB)
    assert profiler.summary.alerts == ()


ALERTS = {
    "prediction": ("The peak in step 1 .*above the plan", {}),
    "allocator retries": ("released its cache and retried 2 times", {}),
    "nearly full": (r"The peak, 1,000\.0 MiB, is above 95%.*BatchFinder\(memory_limit", {}),
    "nearly full, nothing logged": (r"The peak, 1,000\.0 MiB", {"log_every_n_steps": 0}),
    "leak": (r"grows by 1\.0 MiB a step", {}),
}


@pytest.mark.parametrize("kind", ALERTS)
def test_an_alert_is_one_warning_and_in_the_summary(tmp_path, device_memory, capsys, kind, monkeypatch):
    monkeypatch.setattr(lightning_batchmem.measure.recorder, "LIMIT_INTERVAL_SECONDS", 0.0)
    text, options = ALERTS[kind]

    def work(step, where):
        if kind == "prediction" and step > 0:
            device_memory.use(30 * MIB)
            device_memory.free()
        elif kind == "allocator retries":
            device_memory.num_alloc_retries = 2 * (step >= 3)
        elif kind.startswith("nearly full"):
            spike(device_memory, 2, "backward", 999)(step, where)
        elif kind == "leak" and where == "forward":
            device_memory.use(MIB)

    profiler = MemoryProfiler()
    callbacks = [profiler, Planned()] if kind == "prediction" else [profiler]
    with pytest.warns(UserWarning, match=f"MemoryProfiler: .*{text}") as issued:
        trainer_for(tmp_path, *callbacks, **options).fit(Net(work), data(samples=800 if kind == "leak" else 24))
    assert len([warning for warning in issued if "MemoryProfiler: " in str(warning.message)]) == 1
    (alert,) = profiler.summary.alerts
    assert f"Warning: {alert}" in " ".join(capsys.readouterr().out.split())


def test_a_reporter_needs_constant_memory(tmp_path, device_memory):
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    reporter = StepReporter(trainer, device_memory, "train")

    def run(steps):
        for number in range(steps):
            peaks = StepPeaks({"forward": number % 7 * MIB, "backward": number})
            reporter.add(StepRecord(number, 8, peaks, 0.1, 0.01, start_bytes=number % 5))
            if number % 50 == 0:
                reporter.log("train", number, DeviceReading(2**30))

    run(2000)
    tracemalloc.start()
    run(100)
    before, _ = tracemalloc.get_traced_memory()
    run(8000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 2**18  # 8,000 steps of 100 bytes would be more


# --- several runs, errors, traces


def test_two_fits_in_a_row(tmp_path, device_memory):
    profiler = MemoryProfiler()
    trainer = trainer_for(tmp_path, profiler)
    net = Net()
    trainer.fit(net, data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, data())
    assert profiler.summary.steps == 6
    assert [int(row["step"]) for row in csv_rows(tmp_path)] == list(range(12))
    assert hooks_on(trainer.optimizers) == 0
    trainer_for(tmp_path, profiler).fit(Net(), data())  # another run has another file
    assert [len(rows(path)) for path in sorted(tmp_path.glob("*.csv"))] == [12, 6]


def test_a_resumed_run_appends_to_its_file(tmp_path, device_memory):
    first = trainer_for(tmp_path, MemoryProfiler())
    first.fit(Net(), data())
    first.save_checkpoint(tmp_path / "last.ckpt")
    trainer_for(tmp_path, MemoryProfiler(), max_epochs=2).fit(Net(), data(), ckpt_path=tmp_path / "last.ckpt")
    assert [int(row["step"]) for row in csv_rows(tmp_path)] == list(range(12))


@pytest.mark.parametrize("automatic", [True, False])
def test_an_exception_keeps_the_rows_the_metrics_and_a_summary_and_no_hooks(tmp_path, device_memory, capsys, automatic):
    optimizers = []

    class Keep(Callback):
        def on_train_start(self, trainer, module):
            optimizers.extend(trainer.optimizers)
            assert hooks_on(optimizers) > 0

    recorder, profiler = Recorder(), MemoryProfiler()
    trainer = trainer_for(tmp_path, profiler, Keep(), logger=recording(tmp_path, recorder), log_every_n_steps=50)
    net = Net(failing(3)) if automatic else Gan(device_memory, fail_at=3)
    with pytest.raises(KeyError, match="user's error") as error:
        trainer.fit(net, data())
    assert not getattr(error.value, "__notes__", ())
    assert hooks_on(optimizers) == 0
    assert len(csv_rows(tmp_path)) == profiler.summary.steps == 3
    assert [metrics["batch/size"] for _, metrics in recorder.ours] == [4]
    assert Summary.from_json(read_one(tmp_path, "memory_summary.json")) == profiler.summary
    assert "MiB" not in capsys.readouterr().out


def test_an_error_before_the_first_step_leaves_no_file(tmp_path, device_memory):
    class Fails(Callback):
        def on_fit_start(self, *_):
            raise KeyError("the user's error")

    with pytest.raises(KeyError, match="user's error"):
        trainer_for(tmp_path, MemoryProfiler(), Fails()).fit(Net(), data())
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_prints_its_table(tmp_path, device_memory, capsys):
    with pytest.raises(SystemExit):
        trainer_for(tmp_path, MemoryProfiler()).fit(Net(failing(3, KeyboardInterrupt())), data())
    assert "3 steps of" in capsys.readouterr().out


def test_an_error_in_the_first_steady_step_leaves_no_breakdown(tmp_path, device_memory):
    profiler = MemoryProfiler()
    with pytest.raises(KeyError, match="user's error"):
        trainer_for(tmp_path, profiler).fit(Net(failing(1)), data())
    assert (profiler.summary.steps, profiler.summary.breakdown) == (1, None)


def test_optimizers_that_are_configured_again_are_watched_instead(tmp_path, device_memory):
    class Again(Callback):
        def on_train_start(self, trainer, module):
            self.old = trainer.optimizers
            trainer.strategy.setup_optimizers(trainer)

    again, profiler = Again(), MemoryProfiler()
    trainer_for(tmp_path, profiler, again).fit(Net(), data())
    assert hooks_on(again.old) == 0
    assert "optimizer_step" in profiler.summary.phase_peak_bytes


def notes_of(error):
    return " ".join(getattr(error.value, "__notes__", ()))


@pytest.mark.parametrize(
    ("where", "at_step", "text"),
    [
        ("backward", 0, "in train step 0 with a batch of 4 samples. Until then it held up to 51.0 MiB of 1,024.0 MiB"),
        ("backward", 3, "in train step 3 with a batch of 4 samples. Until then it held up to 51.0 MiB of 1,024.0 MiB"),
        ("validation", 6, "in validate step 0 with a batch of 4 samples"),
        ("epoch end", 6, "between two steps"),
    ],
)
def test_an_out_of_memory_error_gets_a_note(tmp_path, device_memory, where, at_step, text):
    def work(step, now):
        device_memory.use(50 * MIB)
        if (step, now) == (at_step, where):
            device_memory.use(2000 * MIB)
        device_memory.free()

    class Ends(Callback):
        def on_train_epoch_end(self, trainer, module):
            work(module.steps, "epoch end")

    trainer = trainer_for(tmp_path, MemoryProfiler(), Ends(), num_sanity_val_steps=0)
    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        trainer.fit(Validated(work), data(), data(samples=8))
    assert f"memory ran out {text}" in notes_of(error)
    assert "optimizer state" in notes_of(error)


def test_a_failed_device_does_not_hide_the_users_error(tmp_path, device_memory, monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(lightning_batchmem.measure.recorder, "LIMIT_INTERVAL_SECONDS", 0.0)

    def work(step, where):
        if step == 2:
            monkeypatch.setattr(device_memory, "counters", broken)
            raise KeyError("the user's error")

    with pytest.raises(KeyError) as error:
        trainer_for(tmp_path, MemoryProfiler(), log_every_n_steps=50).fit(Net(work), data())
    assert "could not finish its report: RuntimeError: CUDA error: device-side assert" in notes_of(error)
    assert len(csv_rows(tmp_path)) == 2


@pytest.mark.parametrize("runs_out", [True, False])
def test_a_snapshot_is_written_if_memory_runs_out(tmp_path, device_memory, monkeypatch, runs_out):
    calls = []

    class FakeSnapshot:
        @classmethod
        def start(cls, directory, device):
            calls.append(("start", directory, device.type))
            return cls()

        def write(self, rank):
            calls.append(("write", rank))
            return "the snapshot is written"

        def stop(self):
            calls.append(("stop",))

    monkeypatch.setattr(lightning_batchmem.memory_profiler, "OomSnapshot", FakeSnapshot)
    trainer = trainer_for(tmp_path, MemoryProfiler(snapshot="on_oom"))
    if runs_out:
        with pytest.raises(torch.cuda.OutOfMemoryError) as error:
            trainer.fit(Net(failing(2, torch.cuda.OutOfMemoryError("CUDA out of memory."))), data())
        assert "MemoryProfiler: the snapshot is written" in notes_of(error)
    else:
        trainer.fit(Net(), data())
    assert calls == [("start", tmp_path, "cpu"), *([("write", 0)] if runs_out else []), ("stop",)]


@pytest.mark.parametrize("arguments", [{"snapshot": "always"}, {"items_fn": 3}])
def test_invalid_arguments(arguments):
    with pytest.raises(ValueError, match=f"^{next(iter(arguments))} must be"):
        MemoryProfiler(**arguments)


@pytest.mark.parametrize("wanted", [True, False])
def test_peak_and_limit_in_the_progress_bar(tmp_path, device_memory, wanted):
    shown = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            names = trainer.progress_bar_metrics.keys() & {"peak_gib", "limit_gib"}
            shown.append({name: trainer.progress_bar_metrics[name] for name in names})

    recorder = Recorder()
    device_memory.budget, device_memory.current_bytes = 64 * 2**30, 2**30
    device_memory.free = lambda: setattr(device_memory, "_current_bytes", 2**30)
    options = {"logger": recording(tmp_path, recorder), "log_every_n_steps": 3, "max_epochs": 2}
    trainer_for(tmp_path, MemoryProfiler(progress_bar=wanted), Look(), **options).fit(
        Net(spike(device_memory, 2, "forward", 9 * 1024)), data()
    )
    first, later = ({"peak_gib": gib, "limit_gib": 64.0} for gib in (1.0, 10.0))
    assert shown[1:4] == ([first, first, later] if wanted else [{}] * 3)
    assert all("peak_gib" not in metrics for _, metrics in recorder.ours)


def test_the_table_is_printed_after_the_progress_bar_has_stopped(tmp_path, device_memory, monkeypatch):
    order = []

    class Bar(RichProgressBar):
        def _stop_progress(self):
            order.append("bar")
            super()._stop_progress()

    monkeypatch.setattr(lightning_batchmem.memory_profiler, "show_summary", lambda *_: order.append("table"))
    trainer_for(tmp_path, MemoryProfiler(), Bar(), enable_progress_bar=True).fit(Net(), data())
    assert order[:2] == ["bar", "table"]


def test_training_is_bit_identical_with_everything_on(tmp_path):
    class Dropout(Validated):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.mse_loss(self.layer(nn.functional.dropout(x, 0.3)), y) + 0 * torch.rand(())

    def run(*callbacks):
        torch.manual_seed(7)
        net = Dropout()
        trainer = trainer_for(tmp_path, *callbacks, max_epochs=2, accumulate_grad_batches=2)
        loader = DataLoader(TensorDataset(*data(samples=600).dataset.tensors), batch_size=4, shuffle=True)
        trainer.fit(net, loader, data(samples=4))
        state = trainer.optimizers[0].state_dict()["state"]
        moments = [value for entry in state.values() for value in entry.values()]
        return [*net.state_dict().values(), *moments, torch.get_rng_state()]

    profiler = MemoryProfiler(items_fn=lambda batch: len(batch[0]), progress_bar=True)
    for without, with_profiler in zip(run(), run(profiler, Planned(4000.0)), strict=True):
        assert torch.equal(without, with_profiler)


class Spawned(LightningDataModule):
    """Its workers are spawned, and receive the data module, and so the Trainer."""

    def collate(self, samples):
        return torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])

    def train_dataloader(self):
        return DataLoader(
            data().dataset, batch_size=4, num_workers=1, multiprocessing_context="spawn", collate_fn=self.collate
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`")
def test_spawned_workers_can_receive_the_trainer(tmp_path):
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler, max_epochs=2).fit(Net(), datamodule=Spawned())  # in epoch 1 files are open
    assert profiler.summary.steps == 12


# --- the real host


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer_step"])
def test_64_mib_on_the_host_are_in_their_phase_and_no_other(tmp_path, where):
    def work(step, now):
        if now == where:
            torch.ones(16 * MIB)  # 4 bytes each

    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler).fit(Net(work), data())
    for row in csv_rows(tmp_path)[1:]:
        peaks = {phase: float(row[f"{phase}_peak_mib"]) for phase in ("forward", "backward", "optimizer_step")}
        highest = peaks.pop(where)
        assert highest == float(row["peak_allocated_mib"])
        for other in peaks.values():
            assert 60 < highest - other < 68
    assert 60 * MIB < profiler.summary.breakdown.activations_bytes < 68 * MIB


def test_memory_that_the_heap_keeps_counts_as_activations_on_the_host(tmp_path):
    class Hoarding(Net):
        """Forty-eight tensors of 1 MiB live until backward, on the heap, which keeps freed memory."""

        def training_step(self, batch, batch_idx):
            x = self.layer.bias.expand(2**18)
            for _ in range(48):
                x = x.tanh()
            return x.mean()

    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler).fit(Hoarding(), data())
    assert profiler.summary.breakdown.activations_bytes >= 10 * MIB  # without this it would be next to nothing
    assert profiler.summary.breakdown.peak_bytes == profiler.summary.peak_bytes
