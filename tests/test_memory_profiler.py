"""MemoryProfiler in real Trainers, mostly on a device whose use the test sets."""

import math
import mmap
import pickle
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from lightning_batchmem import BatchFinder, MemoryProfiler, Plan, memory_profiler
from lightning_batchmem.devices.breakdown import MemoryBreakdown
from lightning_batchmem.devices.cpu import usable_cores
from lightning_batchmem.profile import device_reader
from lightning_batchmem.profile.device_reader import DeviceReader
from lightning_batchmem.profile.recorder import StepClock
from lightning_batchmem.profile.steady_steps import SteadyBreakdown
from lightning_batchmem.profile.summary import Summary
from tests.helpers import lawful
from tests.helpers.lawful import Lawful, law
from tests.helpers.profiled import (
    METRICS,
    MIB,
    OWN_LOGS,
    At,
    Evaluated,
    Gan,
    Net,
    Planned,
    Recorder,
    Validated,
    csv_rows,
    data,
    failing,
    rows,
    spike,
    trainer_for,
)


def profiled(tmp_path, net, *callbacks, loader=None, profiler=None, val=None, **options):
    """Train with a profiler and a logger that has a directory.

    Returns the profiler, and a recorder of everything that was logged.
    """
    recorder = Recorder()
    profiler = profiler or MemoryProfiler()
    trainer = trainer_for(
        tmp_path, profiler, *callbacks, logger=[CSVLogger(tmp_path), recorder], **options
    )
    trainer.fit(net, data() if loader is None else loader, val)
    return profiler, recorder


def hooks_on(optimizers):
    return sum(len(optimizer._optimizer_step_post_hooks) for optimizer in optimizers)


def notes_of(error):
    return " ".join(getattr(error.value, "__notes__", ()))


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still between calls of ``sleep``."""
    clock = SimpleNamespace(now=100.0)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(StepClock, "now", staticmethod(lambda: clock.now))
    return clock


# --- rows, metrics and the summary of a training


def test_every_step_is_a_row_with_its_peak(tmp_path, device_memory, monkeypatch, capsys):
    monkeypatch.setattr(Trainer, "world_size", 2)
    monkeypatch.setattr(DeviceReader, "interval_seconds", 0.0)
    device_memory.reserved_ratio = 2.0
    # The last batch has 40 bytes less, which this device does not count.
    device_memory.granularity_bytes = 40

    def work(step, where):
        sizes_mib = {"forward": 10 + step, "backward": 20 + step, "optimizer_step": 5}
        device_memory.use(sizes_mib[where] * MIB)
        device_memory.free()

    profiler = MemoryProfiler(items_fn=lambda batch: torch.tensor(10 * len(batch[0])))
    _, recorder = profiled(
        tmp_path, Net(work), profiler=profiler, loader=data(samples=22), log_every_n_steps=3
    )
    found = csv_rows(tmp_path)
    summary = profiler.summary
    for step, row in enumerate(found):
        peaks = [float(row[f"peak_{kind}_mib"]) for kind in ("allocated", "reserved")]
        assert peaks == [21 + step, 42 + 2 * step]
        assert (row["step"], row["stage"]) == (str(step), "train")
        assert row["batch_size"] == ("2" if step == 5 else "4")
        assert row["limit_mib"] == ("1024.000" if step in (2, 5) else "")
        assert bool(row["cpu_utilization_pct"]) == (step in (2, 5))
        samples = 2 * int(row["batch_size"])
        step_seconds = float(row["step_ms"]) / 1e3
        samples_per_s = float(row["samples_per_s"])
        assert samples_per_s == pytest.approx(samples / step_seconds, rel=0.01)
        assert float(row["items_per_s"]) == pytest.approx(10 * samples_per_s, rel=1e-3)
        assert 0 < float(row["data_wait_pct"]) < 100
    logged = [(step, metrics["memory/peak_reserved_mib"]) for step, metrics in recorder.ours]
    assert logged == [(2, 46), (5, 52)]
    assert (summary.memory.peak_bytes, summary.memory.peak_step) == (26 * MIB, 5)
    assert (summary.steps, summary.memory.batch_size) == (6, 2)
    assert summary.speed.cores == usable_cores()
    # The first step is no part of the means.
    samples_per_s = 2 * 18 / (5 * summary.speed.step_ms / 1e3)
    assert summary.speed.samples_per_s == pytest.approx(samples_per_s)
    # The breakdown has gradients and the state of Adam, which exist from the second step on.
    weights = (4 + 1) * 4
    batch = 4 * 4 * 4 + 4 * 4
    known = (weights, weights, 2 * weights + 2 * 4, batch)
    assert summary.memory.breakdown == MemoryBreakdown(
        *known, 25 * MIB, MIB - sum(known), step=1, phase="backward"
    )
    (path,) = tmp_path.rglob("memory_summary.json")
    assert Summary.from_json(path.read_text()) == summary
    assert "26.0 MiB at step 5 (2 samples)" in capsys.readouterr().out


def test_tensorboard_gets_the_documented_names(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(DeviceReader, "interval_seconds", 0.0)
    logger = TensorBoardLogger(tmp_path, name="tb")
    options = {"logger": logger, "log_every_n_steps": 2}
    trainer_for(tmp_path, MemoryProfiler(), Planned(4000.0, limit_mib=8000), **options).fit(
        Net(), data()
    )
    events = EventAccumulator(str(logger.log_dir))
    events.Reload()
    names = METRICS | {"memory/limit_mib"}
    assert set(events.Tags()["scalars"]) == names | {"loss", "epoch"}
    for name in names:
        # The size of a batch is logged where it changes.
        steps = [1] if name == "speed/batch_size" else [1, 3, 5]
        assert [event.step for event in events.Scalars(name)] == steps
        assert all(math.isfinite(event.value) for event in events.Scalars(name))
    assert (tmp_path / "tb" / "version_0" / "memory_per_batch.csv").exists()


@pytest.mark.parametrize(
    ("spike_at", "options", "logged"),
    [
        (2, {"log_every_n_steps": 2}, [(1, 1), (3, 301), (5, 1)]),
        # The end of the training logs the steps that are left.
        (5, {"log_every_n_steps": 4}, [(3, 1), (5, 301)]),
        # Metrics are logged after each optimizer step.
        (1, {"accumulate_grad_batches": 4}, [(0, 301), (1, 1)]),
        (1, {"log_every_n_steps": 0}, []),
    ],
)
def test_no_peak_is_lost_between_two_logs(tmp_path, device_memory, spike_at, options, logged):
    _, recorder = profiled(tmp_path, Net(spike(device_memory, spike_at, "forward", 300)), **options)
    peaks = [(step, metrics["memory/peak_process_mib"]) for step, metrics in recorder.ours]
    assert peaks == logged
    assert recorder.lightnings == [step for step, _ in logged][: len(recorder.lightnings)]


def test_a_logger_that_raises_does_not_end_training(tmp_path, device_memory):
    class Breaks(Recorder):
        def log_metrics(self, metrics, step=None):
            super().log_metrics(metrics, step)
            if "loss" not in metrics:
                raise ConnectionError("the server is gone")

    broken = Breaks()
    other = Recorder()
    with pytest.warns(
        UserWarning, match="Breaks gets no more metrics of MemoryProfiler: .* the server is gone"
    ):
        trainer_for(tmp_path, MemoryProfiler(), logger=[broken, other]).fit(Net(), data())
    assert (len(broken.ours), len(other.ours)) == (1, 6)


# --- accumulation, manual optimization, batches


def test_with_accumulation_the_breakdown_is_taken_after_the_first_optimizer_step(
    tmp_path, device_memory
):
    def work(step, where):
        device_memory.use({"forward": 10, "backward": 20, "optimizer_step": 40}[where] * MIB)

    end = At(on_train_batch_end=lambda *_: device_memory.free())
    profiler, _ = profiled(tmp_path, Net(work), end, accumulate_grad_batches=2)
    found = csv_rows(tmp_path)
    assert [row["peak_process_mib"] for row in found] == ["31.000", "71.000"] * 3
    assert profiler.summary.memory.breakdown.optimizer_state_bytes > 0


def test_manual_optimization_with_two_optimizers(tmp_path, device_memory):
    profiler, recorder = profiled(tmp_path, Gan(device_memory))
    assert profiler.summary.memory.peak_bytes == 61 * MIB
    assert [step for step, _ in recorder.ours] == [0, 1, 2, 3, 4, 5]
    # Only Adam has a state, since SGD runs without momentum.
    assert profiler.summary.memory.breakdown.optimizer_state_bytes == 2 * (4 + 1) * 4 + 2 * 4


class Constant(Net):
    """Does not read its batch."""

    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(1, 4)).sum()


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class GraphBatch:
    """Tensors of nodes and edges, which disagree about the samples."""

    def __init__(self, graphs):
        self.x = torch.ones(3 * len(graphs), 4)
        self.edges = torch.ones(2, 5)
        # A batch of PyTorch Geometric has this attribute too.
        if graphs[0]:
            self.num_graphs = len(graphs)

    def to(self, device, **_):
        return self


@pytest.mark.parametrize(
    ("loader", "sizes"),
    [
        (DataLoader([1] * 5, batch_size=2, collate_fn=GraphBatch), ["2", "2", "1"]),
        (DataLoader([0] * 5, batch_size=2, collate_fn=GraphBatch), ["2", "2", "1"]),
        # The last batch of a stream may have fewer samples, and its tensors do not tell.
        (DataLoader(Stream([0] * 5), batch_size=2, collate_fn=GraphBatch), ["2", "2", ""]),
        (DataLoader([["text"]] * 2, batch_size=None), ["", ""]),
    ],
)
@pytest.mark.filterwarnings("always:MemoryProfiler cannot count the samples")
def test_samples_that_are_never_known_are_one_warning(
    tmp_path, device_memory, recwarn, loader, sizes
):
    profiler, recorder = profiled(tmp_path, Constant(), Planned(), loader=loader)
    assert len([one for one in recwarn if "cannot count" in str(one.message)]) == (not any(sizes))
    assert [row["batch_size"] for row in csv_rows(tmp_path)] == sizes
    logged = ["speed/samples_per_s" in metrics for _, metrics in recorder.ours]
    # The first step has no speed of its own.
    assert logged == [False, *(bool(size) for size in sizes[1:])]
    assert profiler.summary.memory.batch_size == (2 if sizes[0] else None)


def test_steps_that_lightning_skips_are_no_steps(tmp_path, device_memory):
    class StopsEarly(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    samples = [torch.ones(4), torch.ones(4), None, torch.ones(4)]
    with pytest.warns(UserWarning, match="yielded None"):
        profiler, _ = profiled(tmp_path, Constant(), loader=DataLoader(samples, batch_size=None))
    assert profiler.summary.steps == 3
    profiler, _ = profiled(tmp_path, StopsEarly(), max_epochs=2)
    assert profiler.summary.steps == 4


def test_a_batch_of_none_has_no_samples_in_an_evaluation(tmp_path, device_memory):
    """Lightning passes it to the step there."""
    samples = [torch.ones(4)] * 6
    loader = DataLoader(
        samples, batch_size=2, collate_fn=lambda samples: next(batches), shuffle=False
    )
    batches = iter([torch.ones(2, 4), None, torch.ones(2, 4)])
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler).validate(Validated(), loader, verbose=False)
    assert [row["batch_size"] for row in csv_rows(tmp_path)] == ["2", "0", "2"]


@pytest.mark.parametrize("skipped", [0, 2])
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_the_first_step_of_an_optimizer_counts_only_with_gradients(
    tmp_path, device_memory, skipped
):
    """Lightning calls the optimizer where training_step returned None too."""

    class Returns(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if batch_idx >= skipped else None

    profiler, _ = profiled(tmp_path, Returns())
    breakdown = profiler.summary.memory.breakdown
    assert breakdown.step == skipped + 1
    assert breakdown.optimizer_state_bytes == 2 * breakdown.gradients_bytes + 2 * 4


# --- time


def test_the_wait_for_data_is_part_of_the_step_and_known_separately(tmp_path, device_memory, clock):
    def slow(samples):
        clock.sleep(3)
        return default_collate(samples)

    loader = DataLoader(TensorDataset(torch.ones(4, 4), torch.ones(4, 1)), collate_fn=slow)
    profiler, _ = profiled(tmp_path, Net(lambda *_: clock.sleep(1)), loader=loader)
    times = [(row["step_ms"], row["data_wait_pct"]) for row in csv_rows(tmp_path)]
    assert times == [("6000.000", "50.000")] * 4
    speed = profiler.summary.speed
    assert (speed.step_ms, speed.data_wait_pct) == (6000, 50)


class Compiled(Net):
    """Compiles something in each shape's first step, which takes 30 s."""

    def __init__(self, clock, compiles):
        super().__init__(lambda *_: clock.sleep(1))
        self.run = torch.compile(self.layer, backend="eager", dynamic=False) if compiles else None
        self.clock = clock
        self.shapes = set()

    def training_step(self, batch, batch_idx):
        if self.run is not None:
            self.run(batch[0])
            if batch[0].shape not in self.shapes:
                self.clock.sleep(30)
                self.shapes.add(batch[0].shape)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("compiles", [True, False])
def test_steps_that_compile_are_no_part_of_the_means(
    tmp_path, device_memory, clock, capsys, compiles
):
    torch.compiler.reset()
    # The last batch of an epoch has another shape.
    profiler, recorder = profiled(
        tmp_path, Compiled(clock, compiles), loader=data(samples=22), max_epochs=2
    )
    speed = profiler.summary.speed
    assert (speed.step_ms, profiler.summary.steps) == (3000.0, 12)
    # Two of the 12 steps have another shape, and one of these compiles.
    samples = 9 * 4 + 2 if compiles else 9 * 4 + 2 * 2
    steps = 10 if compiles else 11
    assert speed.samples_per_s == pytest.approx(samples / (3.0 * steps))
    assert speed.first_step_ms == (33000.0 if compiles else 3000.0)
    shown = "12 steps of 3,000.0 ms (the first: 33,000.0 ms)"
    printed = capsys.readouterr().out
    assert (shown in printed) == ("(the first:" in printed) == compiles
    # What the first step takes, and one that compiles, is not logged as a speed.
    logged = [metrics.get("speed/step_ms") for _, metrics in recorder.ours]
    slow = (0, 5) if compiles else (0,)
    assert logged == [None if step in slow else 3000.0 for step in range(12)]


def test_a_single_step_has_no_speed(tmp_path, device_memory, capsys):
    profiler, recorder = profiled(tmp_path, Net(), max_steps=1)
    speed = profiler.summary.speed
    assert (speed.samples_per_s, speed.data_wait_pct, speed.cpu_utilization_pct) == (None,) * 3
    shown = f"1 step of {speed.first_step_ms:,.1f} ms"
    assert f"{shown}\n" in capsys.readouterr().out
    assert repr(profiler.summary).endswith(f"{shown}>")
    assert profiler.summary.conclusion == ""
    (logged,) = recorder.ours
    assert {"memory/used_pct", "speed/batch_size"} <= logged[1].keys()
    assert not {"speed/samples_per_s", "speed/step_ms", "speed/data_wait_pct"} & logged[1].keys()


class Gathering(Validated):
    """Its weights take a while to gather."""

    def __init__(self, clock):
        super().__init__(lambda *_: clock.sleep(1))
        self.gather = lambda: clock.sleep(30)

    def state_dict(self, *arguments, **keywords):
        self.gather()
        return super().state_dict(*arguments, **keywords)


@pytest.mark.parametrize("is_last", [True, False])
def test_what_other_callbacks_do_between_steps_is_left_out(tmp_path, device_memory, clock, is_last):
    def slowly(*_):
        clock.sleep(30)

    slow = At(on_train_epoch_end=slowly, on_save_checkpoint=slowly, on_validation_start=slowly)
    saves = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1, save_top_k=-1)
    profiler = MemoryProfiler()
    callbacks = [slow, profiler] if is_last else [profiler, slow]
    trainer = trainer_for(
        tmp_path, *callbacks, saves, max_epochs=2, enable_checkpointing=True, val_check_interval=2
    )
    trainer.fit(Gathering(clock), data(), data(samples=4))
    steps_ms = [row["step_ms"] for row in csv_rows(tmp_path) if row["stage"] == "train"]
    # A second in forward, backward and the step of the optimizer.
    assert steps_ms == ["3000.000"] * trainer.global_step


@pytest.mark.parametrize("saves", [True, False])
def test_what_is_between_steps_and_the_breakdown_are_left_out(
    tmp_path, device_memory, clock, monkeypatch, saves
):
    take = SteadyBreakdown.take

    def take_slowly(self, *arguments):
        clock.sleep(30)
        take(self, *arguments)

    monkeypatch.setattr(SteadyBreakdown, "take", take_slowly)

    def work(step, where):
        clock.sleep(30 if where == "validation" else 1)

    class SlowCheckpoint(ModelCheckpoint):
        def on_validation_end(self, trainer, module):
            super().on_validation_end(trainer, module)
            clock.sleep(30)

    slow = At(
        on_train_epoch_end=lambda *_: clock.sleep(30), on_validation_end=lambda *_: clock.sleep(30)
    )
    options = {
        "max_epochs": 2,
        "val_check_interval": 2,
        "num_sanity_val_steps": 1,
        "val": data(samples=4),
    }
    checkpoints = [SlowCheckpoint(tmp_path / "checkpoints")] if saves else []
    _, recorder = profiled(tmp_path, Validated(work), slow, *checkpoints, **options)
    # The first step has no speed of its own.
    logged = [metrics for _, metrics in recorder.ours[1:]]
    assert [metrics["speed/step_ms"] for metrics in logged] == [3000] * 11
    # The wait for a batch begins after an evaluation or a checkpoint.
    assert [metrics["speed/data_wait_pct"] for metrics in logged] == [0] * 11


# --- evaluation


def test_validation_in_a_training_has_rows_metrics_and_a_summary(tmp_path, device_memory):
    options = {"val_check_interval": 3, "num_sanity_val_steps": 2, "val": data(samples=10)}
    profiler, recorder = profiled(tmp_path, Evaluated(device_memory), **options)
    found = [(row["stage"], row["step"]) for row in csv_rows(tmp_path)]
    steps = [("train", str(step)) for step in range(6)]
    part = [("validate", str(step)) for step in range(3)]
    assert found == [*steps[:3], *part, *steps[3:], *part]
    row = csv_rows(tmp_path)[5]
    assert row["peak_process_mib"] == "6.000"
    assert row["batch_size"] == "2"
    assert [step for step, _ in recorder.others] == [2, 5]
    for _, metrics in recorder.others:
        names = {f"{name}_validate" for name in METRICS}
        # The device is read once a second.
        sparse = {"speed/cpu_utilization_pct_validate", "speed/batch_size_validate"}
        assert names - sparse <= set(metrics) <= names
        assert metrics["memory/peak_process_mib_validate"] == 6
    assert profiler.summary.memory.validation_peak_bytes == 6 * MIB
    assert (profiler.summary.steps, profiler.summary.memory.peak_bytes) == (6, MIB)
    # The peak of the run includes evaluations, as torch.cuda.max_memory_allocated() does.
    assert profiler.run_peak_bytes == 6 * MIB


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_by_itself(tmp_path, device_memory, stage):
    recorder = Recorder()
    profiler = MemoryProfiler()
    trainer = trainer_for(tmp_path, profiler, logger=[CSVLogger(tmp_path), recorder])
    getattr(trainer, stage)(Evaluated(device_memory), [data(samples=8), data(samples=2)])
    found = [(row["stage"], row["step"], row["batch_size"]) for row in csv_rows(tmp_path)]
    # Steps are counted over both loaders.
    assert found == [(stage, "0", "4"), (stage, "1", "4"), (stage, "2", "2")]
    names = {f"{name}_{stage}" for name in METRICS}
    assert [set(metrics) for _, metrics in recorder.others] == [names]
    summary = profiler.summary
    known = 20 + 4 * 5 * 4
    assert (summary.stage, summary.steps, summary.memory.peak_bytes) == (stage, 3, 6 * MIB)
    parts = (20, 0, 0, 4 * 5 * 4, 5 * MIB, MIB - known)
    assert summary.memory.breakdown == MemoryBreakdown(*parts, step=1)
    (path,) = tmp_path.rglob(f"memory_summary_{stage}.json")
    assert Summary.from_json(path.read_text()) == summary


# --- the breakdown, peaks at any time, no memory


@pytest.mark.parametrize(
    ("options", "breakdown_peak", "text"),
    [
        ({}, MIB, "before the steady steps"),
        ({"max_steps": 1, "accumulate_grad_batches": 2}, None, "No breakdown"),
        # One step has no table.
        ({"max_steps": 1}, None, "training: peak 501.0 MiB, 1 step of"),
    ],
)
def test_a_peak_before_the_steady_state(
    tmp_path, device_memory, capsys, options, breakdown_peak, text
):
    profiler, _ = profiled(tmp_path, Net(spike(device_memory, 0, "forward", 500)), **options)
    memory = profiler.summary.memory
    assert (memory.peak_bytes, memory.peak_step) == (501 * MIB, 0)
    breakdown = memory.breakdown
    assert (breakdown and breakdown.peak_bytes) == breakdown_peak
    printed = capsys.readouterr().out
    assert text in " ".join(printed.split())
    assert (printed.count("\n") == 1) == (profiler.summary.steps == 1)


@pytest.mark.parametrize(
    ("is_host", "kept_mib", "row"),
    [
        (False, 1, "| kept since step 1 | 98.0 MiB | 98.0% |"),
        (True, 1, "| kept since step 1 | 98.0 MiB | 98.0% |"),
        (False, 0, ""),
        # On the host memory that does not grow steadily may be memory that was freed.
        (True, 0.05, ""),
    ],
)
@pytest.mark.filterwarnings("ignore:MemoryProfiler. The memory in use")
def test_what_steps_keep_is_no_activation(tmp_path, device_memory, capsys, is_host, kept_mib, row):
    if is_host:
        device_memory.as_host()

    def work(step, where):
        if where == "forward":
            device_memory.keep(int(kept_mib * step * MIB))

    options = {"loader": data(samples=40), "max_epochs": 10, "log_every_n_steps": 10}
    profiler, _ = profiled(tmp_path, Net(work), **options)
    breakdown = profiler.summary.memory.breakdown
    # What the last step keeps is an activation of this step.
    assert breakdown.kept_bytes == (98 * MIB if row else 0)
    assert breakdown.peak_bytes == MIB + int(kept_mib * 99 * MIB)
    text = " ".join(capsys.readouterr().out.split())
    assert row in text
    assert ("kept since" in text) == bool(row)


def test_a_larger_batch_is_not_kept(tmp_path, device_memory):
    """The last batches are larger, and lie on the device when their steps start."""
    sizes = [4] * 8 + [2**20] * 3

    def work(step, where):
        device_memory.keep(sizes[step] * 5 * 4)

    start = At(on_train_batch_start=lambda trainer, module: work(module.steps, "start"))
    profiler = MemoryProfiler()
    loader = DataLoader(
        Stream([(torch.ones(n, 4), torch.ones(n, 1)) for n in sizes]), batch_size=None
    )
    trainer_for(tmp_path, start, profiler).fit(Net(), loader)
    breakdown = profiler.summary.memory.breakdown
    assert breakdown.peak_bytes > 20 * MIB
    assert breakdown.kept_bytes == 0


class Zeroing(Net):
    """Manual optimization that frees its gradients at the end of a step, or keeps them."""

    def __init__(self, device_memory, frees):
        super().__init__()
        self.automatic_optimization = False
        self.device_memory = device_memory
        self.frees = frees

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if not self.frees:
            optimizer.zero_grad()
        self.manual_backward(self.layer(batch[0]).square().mean())
        self.device_memory.use(MIB)
        optimizer.step()
        self.device_memory.free()
        if self.frees:
            optimizer.zero_grad()


@pytest.mark.parametrize("frees", [True, False])
def test_gradients_are_read_when_an_optimizer_steps(tmp_path, device_memory, frees):
    profiler, _ = profiled(tmp_path, Zeroing(device_memory, frees))
    breakdown = profiler.summary.memory.breakdown
    assert breakdown.gradients_bytes == breakdown.parameters_bytes == 20
    assert breakdown.activations_bytes == MIB - (20 if frees else 0)
    assert breakdown.peak_bytes == 2 * MIB


@pytest.mark.parametrize("highest", ["forward", "backward", "optimizer_step", "validation", ""])
def test_the_phase_of_the_peak_of_one_step_is_named(tmp_path, device_memory, capsys, highest):
    """In each phase more is freed than in the next one, but for the highest."""

    def work(step, where):
        if highest:
            device_memory.use((20 if where == highest else 10) * MIB)
            device_memory.free()

    options = {"val": data(samples=4), "num_sanity_val_steps": 0}
    profiler, _ = profiled(tmp_path, Validated(work), **options)
    phase = {"optimizer_step": "optimizer step", "validation": "forward"}.get(highest, highest)
    assert profiler.summary.memory.breakdown.phase == phase
    text = capsys.readouterr().out
    assert (f"\nPeak of step 1: in {phase}\n" in text) == bool(highest)


class Skips(Net):
    """Ends the first epoch at its second step, which callbacks have begun then, or does not."""

    def __init__(self, work, skips):
        super().__init__(work)
        self.skips = skips

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.skips and batch_idx == 1 and self.current_epoch == 0 else None


@pytest.mark.parametrize("skips", [False, True])
def test_the_phase_of_a_step_that_is_skipped_is_not_known(tmp_path, device_memory, skips):
    def work(step, where):
        device_memory.use(10 * MIB)
        device_memory.free()

    profiler, _ = profiled(tmp_path, Skips(work, skips), max_epochs=2)
    breakdown = profiler.summary.memory.breakdown
    assert (breakdown.step, breakdown.phase) == (1, "" if skips else "forward")


def test_manual_optimization_has_forward_after_each_step_of_an_optimizer(tmp_path, device_memory):
    """The second forward needs the most, and a backward frees it before."""
    profiler, _ = profiled(tmp_path, SecondForward(device_memory))
    assert profiler.summary.memory.breakdown.phase == "forward"


@pytest.mark.filterwarnings("ignore:MemoryProfiler. The peak")
@pytest.mark.parametrize("place", ["forward", "backward", "optimizer step"])
def test_the_phase_in_which_memory_runs_out_is_named(tmp_path, device_memory, place):
    class Fails(Net):
        def configure_optimizers(self):
            return FailsIn(self.parameters(), lambda: self.work(self.steps, "optimizer step"))

    def work(step, where):
        if (step, where) == (2, place):
            device_memory.use(2000 * MIB)

    profiler = MemoryProfiler()
    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        trainer_for(tmp_path, profiler).fit(Fails(work), data())
    assert f"with a batch of 4 samples, in {place}." in notes_of(error)


class FailsIn(torch.optim.SGD):
    """Calls a function where its own step begins, after the closure."""

    def __init__(self, parameters, function):
        super().__init__(parameters, lr=0.1)
        self.function = function

    def step(self, closure=None):
        loss = closure()
        self.function()
        super().step()
        return loss


class SecondForward(Gan):
    def training_step(self, batch, batch_idx):
        for layer, optimizer in zip((self.one, self.two), self.optimizers(), strict=True):
            self.device_memory.use((30 if layer is self.two else 10) * MIB)
            self.device_memory.free()
            optimizer.zero_grad()
            self.manual_backward(layer(batch[0]).square().mean())
            optimizer.step()


class WithBackbone(Net):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((self.backbone(x), y), batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.layer.parameters())


def test_layers_that_are_unfrozen_later_have_gradients_and_states_in_the_breakdown(
    tmp_path, device_memory
):
    module = WithBackbone()
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    profiler, _ = profiled(tmp_path, module, callback, max_epochs=3)
    breakdown = profiler.summary.memory.breakdown
    assert module.backbone.weight.grad is not None
    trained_bytes = sum(parameter.nbytes for parameter in module.parameters())
    assert breakdown.gradients_bytes == trained_bytes
    # Adam has a step for each of the tensors.
    assert breakdown.optimizer_state_bytes == 2 * trained_bytes + 4 * 4


def test_the_host_has_its_cores_and_memory_that_the_heap_keeps_counts_as_activations(
    tmp_path, device_memory
):
    device_memory.as_host()

    def work(step, where):
        if (step, where) == (0, "forward"):
            device_memory.use(50 * MIB)

    profiler, _ = profiled(tmp_path, Net(work))
    breakdown = profiler.summary.memory.breakdown
    assert breakdown.other_bytes == MIB - breakdown.parameters_bytes
    assert breakdown.peak_bytes == 51 * MIB
    assert profiler.summary.speed.cores == usable_cores()


def test_the_peaks_of_epoch_and_run_can_be_read_at_any_time(tmp_path, device_memory):
    seen = []
    profiler = MemoryProfiler()

    def read(*_):
        seen.append((profiler.epoch_peak_bytes // MIB, profiler.run_peak_bytes // MIB))
        # A loader that spawns workers may pickle the Trainer. Lightning adds these two methods,
        # which belong to the module.
        state = vars(profiler)
        pickle.dumps({name: state[name] for name in state.keys() - {"log", "log_dict"}})

    net = Net(spike(device_memory, 1, "forward", 9))
    profiled(tmp_path, net, At(on_train_batch_end=read), profiler=profiler, max_epochs=2)
    assert seen == [(1, 1)] + [(10, 10)] * 5 + [(1, 10)] * 6
    assert (profiler.epoch_peak_bytes, profiler.run_peak_bytes) == (None, 10 * MIB)


def before_mib(tmp_path):
    """The training steps whose rows have a peak before them of more than 100 MiB."""
    return {
        int(row["step"]): float(row["peak_before_mib"])
        for row in csv_rows(tmp_path)
        if row["stage"] == "train" and float(row["peak_before_mib"] or 0) > 100
    }


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize(
    ("hook", "steps"),
    [
        ("on_train_epoch_end", [6]),
        ("on_validation_start", [3, 6, 9]),
        ("on_validation_epoch_end", [3, 6, 9]),
        ("on_validation_end", [3, 6, 9]),
        ("on_save_checkpoint", [3, 6, 9]),
    ],
)
def test_the_peak_between_two_steps_is_known_with_the_step_before(
    tmp_path, device_memory, capsys, hook, steps, is_last
):
    def use(*_):
        device_memory.use(300 * MIB)
        device_memory.free()

    profiler = MemoryProfiler()
    others = At(**{hook: use})
    saves = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=3, save_top_k=-1)
    callbacks = [others, profiler] if is_last else [profiler, others]
    trainer = trainer_for(
        tmp_path, *callbacks, saves, max_epochs=2, val_check_interval=3, num_sanity_val_steps=0
    )
    trainer.fit(Validated(), data(), data(samples=4))
    memory = profiler.summary.memory
    assert (memory.between_steps.peak_bytes, memory.peak_bytes) == (301 * MIB, MIB)
    assert memory.between_steps.after_step == steps[0] - 1
    assert profiler.run_peak_bytes == 301 * MIB
    found = before_mib(tmp_path)
    # A step of a validation may come first.
    is_before_validation = hook in ("on_validation_start", "on_save_checkpoint")
    assert found == dict.fromkeys([] if is_before_validation else steps, 301.0)
    text = f"| after step {steps[0] - 1} | 301.0 MiB |"
    assert text in " ".join(capsys.readouterr().out.split())


def test_the_memory_after_the_last_step_counts(tmp_path, device_memory, capsys):
    def use(trainer, module):
        if trainer.current_epoch == 1:
            device_memory.use(300 * MIB)
            device_memory.free()

    profiler, _ = profiled(tmp_path, Net(), At(on_train_epoch_end=use), max_epochs=2)
    between = profiler.summary.memory.between_steps
    assert (between.peak_bytes, between.after_step) == (301 * MIB, 11)
    assert before_mib(tmp_path) == {}
    assert "| after step 11 " in capsys.readouterr().out
    profiler, _ = profiled(tmp_path / "quiet", Net(), max_epochs=2)
    assert profiler.summary.memory.between_bytes == 0
    assert "| after step" not in capsys.readouterr().out


class UsesAtEnd(Net):
    def __init__(self, use):
        super().__init__()
        self.use = use

    def on_train_batch_end(self, *_):
        super().on_train_batch_end()
        self.use(None, self)


@pytest.mark.parametrize("place", ["before", "after", "module"])
def test_what_a_hook_takes_after_a_step_is_no_part_of_it(tmp_path, device_memory, place):
    """After step 96 what is between two steps is read at some steps, or where a hook is there."""

    def use(trainer, module):
        if module.steps == 150 + (place == "module"):
            device_memory.use(300 * MIB)
            device_memory.free()

    profiler = MemoryProfiler()
    callbacks = [profiler]
    if place != "module":
        callbacks.insert(place == "after", At(on_train_batch_end=use))
    module = UsesAtEnd(use) if place == "module" else Net()
    trainer_for(tmp_path, *callbacks).fit(module, data(samples=800))
    assert before_mib(tmp_path) == {151: 301.0}
    memory = profiler.summary.memory
    assert memory.peak_bytes == MIB
    assert (memory.between_steps.peak_bytes, memory.between_steps.after_step) == (301 * MIB, 150)
    assert profiler.run_peak_bytes == 301 * MIB


def test_what_the_module_takes_at_the_start_of_a_batch_is_in_its_step(tmp_path, device_memory):
    class UsesAtStart(Net):
        def on_train_batch_start(self, batch, batch_idx):
            spike(device_memory, 150, "start", 300)(self.steps, "start")

    profiler, _ = profiled(tmp_path, UsesAtStart(), loader=data(samples=800))
    memory = profiler.summary.memory
    assert (memory.peak_bytes, memory.peak_step, memory.between_bytes) == (301 * MIB, 150, 0)
    assert before_mib(tmp_path) == {}


def test_what_a_hook_takes_after_a_validation_step_is_no_part_of_it(tmp_path, device_memory):
    def use(*_):
        device_memory.use(300 * MIB)
        device_memory.free()

    profiler, _ = profiled(
        tmp_path, Validated(), At(on_validation_batch_end=use), val=data(samples=8)
    )
    assert profiler.summary.memory.validation_peak_bytes == MIB
    assert profiler.summary.memory.between_steps.peak_bytes == 301 * MIB


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_what_a_checkpoint_loads_is_before_the_first_step(tmp_path, device_memory, capsys):
    class Loads(Net):
        def on_load_checkpoint(self, checkpoint):
            device_memory.use(300 * MIB)
            device_memory.free()

    trainer = trainer_for(tmp_path, max_steps=3)
    trainer.fit(Net(), data())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    profiler = MemoryProfiler()
    trainer = trainer_for(tmp_path, profiler, max_steps=6, max_epochs=3)
    trainer.fit(Loads(), data(), ckpt_path=tmp_path / "last.ckpt")
    between = profiler.summary.memory.between_steps
    assert (between.peak_bytes, between.after_step) == (301 * MIB, None)
    (step,) = before_mib(tmp_path)
    assert step == int(csv_rows(tmp_path)[0]["step"])
    assert "| before the first step | 301.0 MiB |" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("searches", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
def test_a_search_is_not_before_the_first_step(tmp_path, device_memory, searches, is_last):
    device_memory.budget = 600 * MIB
    finder = BatchFinder(max_batch_size=4, objective="memory")
    finder.device_memory = lambda device: device_memory

    def use(*_):
        device_memory.use(500 * MIB)
        device_memory.free()

    callbacks = [At(on_fit_start=use), *([finder] if searches else [])]
    profiler = MemoryProfiler()
    callbacks = [*callbacks, profiler] if is_last else [profiler, *callbacks]
    trainer_for(tmp_path, *callbacks, max_steps=3).fit(Lawful(device_memory, law))
    memory = profiler.summary.memory
    assert (memory.between_steps.peak_bytes > 500 * MIB) is not searches


class WithoutMemory(MemoryProfiler):
    """As on MPS, and on a host whose kernel peak cannot be reset."""

    def device_memory(self, device):
        return None


def test_without_a_peak_counter_memory_is_left_out(tmp_path, capsys):
    options = {
        "profiler": WithoutMemory(),
        "num_sanity_val_steps": 0,
        "val": data(samples=4),
    }
    with pytest.warns(
        UserWarning, match="measures no memory, because cpu or its allocator has no peak counter"
    ) as issued:
        profiler, recorder = profiled(tmp_path, Validated(), Planned(), **options)
    assert len([warning for warning in issued if "measures no memory" in str(warning.message)]) == 1
    for row in csv_rows(tmp_path):
        assert not [name for name, value in row.items() if name.endswith("_mib") and value]
        assert row["step_ms"]
    names = {name for name in METRICS if not name.startswith("memory/")}
    assert {name for _, metrics in recorder.ours for name in metrics} == names
    summary = profiler.summary
    memory = summary.memory
    assert (memory.peak_bytes, memory.limit_bytes, memory.batch_size) == (None, None, 4)
    assert "MiB" not in capsys.readouterr().out


# --- plans and alerts


def test_the_plan_of_a_finder_is_found(tmp_path, device_memory, capsys):
    device_memory.budget = 200 * MIB
    finder = BatchFinder(objective="memory")
    finder.device_memory = lambda device: device_memory
    profiler = MemoryProfiler()
    recorder = Recorder()
    trainer = trainer_for(
        tmp_path, profiler, finder, logger=[CSVLogger(tmp_path), recorder], max_steps=3
    )
    trainer.fit(Lawful(device_memory, law))
    logged = recorder.others + recorder.ours
    name = "memory/limit_mib"
    limits_mib = [metrics[name] for _, metrics in logged if name in metrics]
    assert set(limits_mib) == {finder.plan.limit_bytes / MIB}
    assert profiler.summary.alerts == ()
    size = finder.plan.batch_size
    line = f"batch size {size} fits in 184 MiB (CPU, torch {torch.__version__.partition('+')[0]}"
    assert profiler.summary.fits == f"{line}, 32-true)"
    printed = " ".join(capsys.readouterr().out.split())
    assert profiler.summary.fits in printed
    assert profiler.summary.training == finder.plan.training
    assert f"Training: 3 steps of 3 -> {size} samples: " in printed
    (path,) = tmp_path.rglob("batch_plan.json")
    assert Plan.from_json(path.read_text()) == finder.plan


ALERTS = {
    "nearly full": (
        r"The peak, 1,000\.0 MiB, is above 95%.*Use a smaller batch, or recompute",
        {"log_every_n_steps": 0},
    ),
    "leak": (
        r"grows by 1,000\.0 MiB in 1,000 steps",
        {"loader": data(samples=80), "max_epochs": 10},
    ),
}


@pytest.mark.parametrize("kind", ALERTS)
def test_an_alert_is_one_warning_and_in_the_summary(
    tmp_path, device_memory, capsys, kind, monkeypatch, clock
):
    monkeypatch.setattr(DeviceReader, "interval_seconds", 0.0)
    text, options = ALERTS[kind]

    def work(step, where):
        if kind == "nearly full":
            spike(device_memory, 2, "backward", 999)(step, where)
        elif kind == "leak" and where == "forward":
            device_memory.use(MIB)

    with pytest.warns(UserWarning, match=f"MemoryProfiler: .*{text}") as issued:
        profiler, _ = profiled(tmp_path, Net(work), **options)
    assert len([warning for warning in issued if "MemoryProfiler: " in str(warning.message)]) == 1
    assert f"Warning: {profiler.summary.alerts[0]}" in " ".join(capsys.readouterr().out.split())


def test_a_leak_is_found_where_a_validation_follows_each_step(tmp_path, device_memory, monkeypatch):
    monkeypatch.setattr(DeviceReader, "interval_seconds", 0.0)

    def work(step, where):
        if where == "forward":
            device_memory.use(MIB)

    # The steps of a validation have numbers of their own.
    module = Validated(work)
    options = {"val_check_interval": 1, "max_epochs": 10}
    with pytest.warns(UserWarning, match=r"MemoryProfiler: .*grows by 1,000\.0 MiB in 1,000 steps"):
        profiled(tmp_path, module, loader=data(samples=40), val=data(samples=4), **options)


def test_a_list_that_each_epoch_empties_is_no_leak(tmp_path, device_memory, monkeypatch):
    monkeypatch.setattr(DeviceReader, "interval_seconds", 0.0)

    def work(step, where):
        # An epoch has 100 steps.
        device_memory.keep(step % 100 * MIB)

    profiler, _ = profiled(tmp_path, Net(work), loader=data(samples=400), max_epochs=4)
    assert profiler.summary.alerts == ()


@pytest.mark.parametrize("is_host", [False, True])
def test_a_peak_that_grows_is_no_leak(tmp_path, device_memory, monkeypatch, is_host):
    monkeypatch.setattr(DeviceReader, "interval_seconds", 0.0)
    if is_host:
        device_memory.as_host()

    def work(step, where):
        if where == "forward":
            device_memory.use(step * MIB)
        elif where == "optimizer_step":
            device_memory.free()

    profiler, _ = profiled(tmp_path, Net(work), loader=data(samples=400))
    assert (profiler.summary.memory.peak_bytes, profiler.summary.alerts) == (100 * MIB, ())


class WithoutHooks(Net):
    on_train_batch_end = LightningModule.on_train_batch_end


@pytest.mark.parametrize("grows", [False, True])
def test_most_steps_of_a_long_training_neither_call_hooks_nor_read_the_memory_in_use(
    tmp_path, device_memory, monkeypatch, clock, grows
):
    device_memory.as_host()
    readings = []
    hooks = []
    read = device_memory.peak_and_private_bytes
    monkeypatch.setattr(
        device_memory, "peak_and_private_bytes", lambda: readings.append(0) or read()
    )
    count = At(on_before_backward=lambda trainer, _: hooks.append(hooks_on(trainer.optimizers)))
    module = WithoutHooks(lambda *_: device_memory.keep(grows * len(hooks) * MIB))
    profiled(tmp_path, module, count, loader=data(samples=800))
    # The hook is removed after the step of the breakdown, which has a reading of its own.
    assert hooks == [1, 1, *[0] * 198]
    # The memory is also read before the first two steps, and twice after the last one. Where the
    # peak grows it is read before 136 more.
    assert len(readings) == 1 + 4 + grows * 136


def test_the_retries_of_the_allocator_since_the_run_began_are_a_curve(
    tmp_path, device_memory, monkeypatch
):
    monkeypatch.setattr(DeviceReader, "interval_seconds", 0.0)
    # A search may cause these.
    device_memory.num_alloc_retries = 5

    def work(step, where):
        device_memory.num_alloc_retries = 5 + 2 * (step >= 3)

    _, recorder = profiled(tmp_path, Net(work))
    retries = [metrics.get("memory/num_alloc_retries") for _, metrics in recorder.ours]
    # A card that has nothing but zeros is left out.
    assert retries == [None, None, None, 2, 2, 2]
    assert not any("memory/num_ooms" in metrics for _, metrics in recorder.ours)


def failing_allocation(device_memory, at_step, catches):
    def work(step, where):
        with suppress(torch.cuda.OutOfMemoryError) if catches else nullcontext():
            if (step, where) == (at_step, "forward"):
                device_memory.use(2000 * MIB)

    return work


@pytest.mark.filterwarnings("ignore:MemoryProfiler. Allocations failed")
@pytest.mark.parametrize("at_step", [2, 5, 99])
def test_allocations_that_failed_in_steps_that_went_on_are_counted(
    tmp_path, device_memory, capsys, at_step
):
    device_memory.num_ooms = 3
    work = failing_allocation(device_memory, at_step, catches=True)
    profiler, _ = profiled(tmp_path, Net(work))
    text = "Allocations failed 1 time in steps that went on"
    assert text in str(profiler.summary.alerts) if at_step < 6 else not profiler.summary.alerts
    assert (text in capsys.readouterr().out) == (at_step < 6)


def test_the_allocation_that_ends_a_run_is_not_in_a_step_that_went_on(
    tmp_path, device_memory, monkeypatch
):
    monkeypatch.setattr(DeviceReader, "interval_seconds", 0.0)
    profiler = MemoryProfiler()
    work = failing_allocation(device_memory, 3, catches=False)
    trainer = trainer_for(tmp_path, profiler, log_every_n_steps=50)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        trainer.fit(Net(work), data())
    assert profiler.summary.alerts == ()


def test_the_error_of_another_library_counts_as_no_allocation(tmp_path, device_memory, monkeypatch):
    monkeypatch.setattr(DeviceReader, "interval_seconds", 0.0)
    recorder = Recorder()

    def work(step, where):
        if step == 3:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")

    trainer = trainer_for(tmp_path, MemoryProfiler(), logger=recorder, log_every_n_steps=50)
    with pytest.raises(RuntimeError, match="CUBLAS"):
        trainer.fit(Net(work), data())
    assert [metrics.get("memory/num_ooms", 0) for _, metrics in recorder.ours] == [0]


@pytest.mark.filterwarnings("ignore:MemoryProfiler. ")
@pytest.mark.parametrize("kind", ["leak", "failed", "one step", ""])
def test_a_size_whose_memory_is_not_known_has_no_line_to_paste(tmp_path, device_memory, kind):
    def work(step, where):
        if kind == "leak" and where == "forward":
            device_memory.use(MIB)
        if kind == "failed" and step == 3:
            device_memory.num_ooms = 1

    options = {"loader": data(samples=40), "max_epochs": 10}
    if kind == "one step":
        options["max_steps"] = 1
    profiler, _ = profiled(tmp_path, Net(work), Planned(), **options)
    assert bool(profiler.summary.fits) == (not kind)
    assert len(profiler.summary.alerts) == (kind in ("leak", "failed"))


@pytest.mark.parametrize(
    ("size_name", "names"),
    [
        ("fixed_size", ["batch_plan.json"]),
        ("batch_size", ["batch_plan.json", "batch_plan_1.json"]),
    ],
)
def test_each_search_has_one_file_with_its_plan(tmp_path, device_memory, size_name, names):
    device_memory.budget = 220 * MIB
    finder = BatchFinder(objective="memory")
    finder.device_memory = lambda device: device_memory
    profiler = MemoryProfiler()
    trainer = trainer_for(
        tmp_path, profiler, finder, max_steps=3, limit_val_batches=0, limit_test_batches=2
    )
    net = lawful.Evaluated(device_memory, size_name)
    trainer.fit(net)
    plans = [finder.plan]
    # A loader of a hook has the size that fit has found, and a loader that is passed does not.
    if size_name == "batch_size":
        trainer.test(net, net.test_dataloader(), verbose=False)
        plans.append(finder.plan)
    else:
        trainer.test(net, verbose=False)
        # The limit of the search held until the training ended.
        limit_bytes = profiler.summary.memory.limit_bytes
        assert plans[0].limit_bytes < limit_bytes == device_memory.available_bytes()
    paths = sorted(tmp_path.rglob("batch_plan*.json"))
    assert [path.name for path in paths] == names
    assert [Plan.from_json(path.read_text()) for path in paths] == plans


def test_an_interrupt_before_the_setup_has_no_report():
    error = KeyboardInterrupt()
    MemoryProfiler().on_exception(Trainer(logger=False), Net(), error)
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("cause", ["an alert that is an error", "an interrupt in a logger"])
def test_each_step_counts_once_if_a_report_is_interrupted(
    tmp_path, device_memory, monkeypatch, cause
):
    monkeypatch.setattr(DeviceReader, "interval_seconds", 0.0)
    profiler = MemoryProfiler()

    def interrupt(logger, metrics, step=None):
        if "speed/step_ms" in metrics and step == 3:
            raise KeyboardInterrupt

    net = Net()
    error = SystemExit
    if cause == "an alert that is an error":
        net = Net(spike(device_memory, 2, "backward", 999))
        error = UserWarning
    else:
        monkeypatch.setattr(CSVLogger, "log_metrics", interrupt)
    trainer = trainer_for(tmp_path, profiler, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    with pytest.raises(error):
        trainer.fit(net, data())
    (path,) = tmp_path.rglob("memory_per_batch.csv")
    numbers = [row["step"] for row in rows(path)]
    assert numbers == [str(number) for number in range(profiler.summary.steps)]
    assert len(numbers) >= 3


def test_an_evaluation_without_a_search_has_no_plan_of_an_earlier_one(tmp_path, device_memory):
    device_memory.budget = 220 * MIB
    finder = BatchFinder(objective="memory")
    finder.device_memory = lambda device: device_memory
    profiler = MemoryProfiler()
    trainer = trainer_for(tmp_path, profiler, finder)
    net = lawful.Evaluated(device_memory)
    trainer.validate(net, verbose=False)
    net.size_name = "fixed_size"
    trainer.test(net, verbose=False)
    limit_bytes = profiler.summary.memory.limit_bytes
    assert finder.plan.limit_bytes < limit_bytes == device_memory.available_bytes()
    assert [path.name for path in tmp_path.rglob("batch_plan*.json")] == ["batch_plan.json"]


@pytest.mark.parametrize("validation_seconds", [0.0, 2.0])
def test_the_utilization_of_a_validation_is_not_that_of_the_training(
    tmp_path, device_memory, monkeypatch, validation_seconds
):
    """The device is busy in validations only, which are shorter or longer than a reading."""
    now_seconds = 0.0
    was_validating = False

    class Busy:
        def __call__(self):
            nonlocal was_validating
            percent = 100.0 if was_validating else 0.0
            was_validating = False
            return percent

    def work(step, where):
        nonlocal now_seconds, was_validating
        if where == "validation":
            was_validating = True
            now_seconds += validation_seconds
        elif where == "forward":
            now_seconds += 2.0 if step % 2 else 0.0

    monkeypatch.setattr(device_reader, "utilization_for", lambda _: Busy())
    monkeypatch.setattr(device_reader, "time", SimpleNamespace(monotonic=lambda: now_seconds))
    options = {"val_check_interval": 2, "num_sanity_val_steps": 0}
    profiler, _ = profiled(tmp_path, Validated(work), val=data(), **options)
    assert profiler.summary.speed.cpu_utilization_pct == 0.0


# --- figures


def drawn_steps(profiler):
    (line,) = profiler.plot().axes[0].lines
    return list(line.get_xdata())


def test_the_steps_of_the_last_run_are_drawn_in_it_and_after_it(
    tmp_path, device_memory, monkeypatch
):
    monkeypatch.setattr(DeviceReader, "interval_seconds", 0.0)
    profiler = MemoryProfiler()
    found = []

    def draw(trainer, module):
        if module.steps:
            found.append(drawn_steps(profiler))

    for max_steps in (4, 2):
        net = Net()
        end = At(on_train_batch_start=draw)
        profiled(tmp_path, net, end, profiler=profiler, max_steps=max_steps)
        found.append(drawn_steps(profiler))
    assert found == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0], [0, 1]]


@pytest.mark.parametrize(
    ("arguments", "options", "is_first"),
    [
        (None, {}, True),
        ({"csv": False}, {}, True),
        ({}, {"fast_dev_run": 2}, True),
        ({}, {}, False),
    ],
)
def test_without_a_file_the_steps_cannot_be_drawn(
    tmp_path, device_memory, monkeypatch, arguments, options, is_first
):
    monkeypatch.setattr(Trainer, "is_global_zero", is_first)
    profiler = MemoryProfiler(**(arguments or {}))
    if arguments is not None:
        trainer_for(tmp_path, profiler, **options).fit(Net(), data())
    with pytest.raises(
        ValueError, match=r"no memory_per_batch\.csv of a run to draw\. Call plot on"
    ):
        profiler.plot()


# --- files, several runs, errors, traces


@pytest.mark.parametrize(
    ("arguments", "options"),
    [({"csv": False}, {}), ({}, {"fast_dev_run": 2}), ({}, {"max_steps": 0})],
)
def test_no_files(tmp_path, device_memory, monkeypatch, arguments, options):
    trainer_for(tmp_path, MemoryProfiler(**arguments), Planned(), **options).fit(Net(), data())
    monkeypatch.setattr(Trainer, "log_dir", "s3://bucket/run")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"no memory_per_batch\.csv.*s3://bucket/run"):
        trainer_for(tmp_path, MemoryProfiler()).fit(Net(), data())
    assert not list(tmp_path.iterdir())


def test_rows_are_in_the_file_within_a_second(tmp_path, device_memory, monkeypatch):
    monotonic = SimpleNamespace(now=100.0)
    monkeypatch.setattr(device_reader.time, "monotonic", lambda: monotonic.now)
    found = []

    def count(*_):
        found.append(len(csv_rows(tmp_path)))
        monotonic.now += 0.4

    _, recorder = profiled(tmp_path, Net(), At(on_train_batch_start=count), Planned())
    # The first log reads the device at once, and the next reading is in the fourth step after it.
    assert [*found, len(csv_rows(tmp_path))] == [0, 1, 1, 1, 4, 4, 6]
    # The loggers get what was read, once.
    were_read = ["memory/limit_mib" in metrics for _, metrics in recorder.ours]
    assert were_read == [True, False, False, True, False, False]


@pytest.mark.parametrize(("interval", "num_rows"), [(1, 4), (50, 6)])
def test_a_device_that_fails_keeps_the_rows_of_its_steps(
    tmp_path, device_memory, monkeypatch, interval, num_rows
):
    steps = []

    def read(reader):
        if len(steps) > 3:
            raise RuntimeError("the device is lost")
        return reader.last

    monkeypatch.setattr(DeviceReader, "read", read)
    end = At(on_train_batch_end=lambda *_: steps.append(0))
    with pytest.raises(RuntimeError, match="the device is lost"):
        profiled(tmp_path, Net(), end, log_every_n_steps=interval)
    assert len(csv_rows(tmp_path)) == num_rows


def test_each_run_has_its_own_files(tmp_path, device_memory):
    profiler = MemoryProfiler()
    net = Evaluated(device_memory)
    trainer = trainer_for(tmp_path, profiler)
    trainer.fit(net, data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, data())
    trained = profiler.summary
    assert (trained.steps, hooks_on(trainer.optimizers)) == (6, 0)
    trainer.test(net, data(samples=4), verbose=False)
    found = {path.name: [row["step"] for row in rows(path)] for path in tmp_path.rglob("*.csv")}
    assert found == {
        "memory_per_batch.csv": [str(step) for step in range(6)],
        "memory_per_batch_1.csv": [str(step) for step in range(6, 12)],
        "memory_per_batch_2.csv": ["0"],
    }
    assert Summary.from_json((tmp_path / OWN_LOGS / "memory_summary_1.json").read_text()) == trained
    tested = (tmp_path / OWN_LOGS / "memory_summary_test_2.json").read_text()
    assert Summary.from_json(tested) == profiler.summary


@pytest.mark.parametrize("automatic", [True, False])
def test_an_exception_keeps_rows_metrics_and_a_summary_and_no_hooks(
    tmp_path, device_memory, capsys, automatic
):
    optimizers = []
    recorder = Recorder()
    profiler = MemoryProfiler()
    keep = At(on_train_start=lambda trainer, module: optimizers.extend(trainer.optimizers))
    # Its size did not train to the end.
    keep.plan = Planned().plan
    options = {"logger": [CSVLogger(tmp_path), recorder], "log_every_n_steps": 50}
    net = Net(failing(3)) if automatic else Gan(device_memory, fail_at=3)
    with pytest.raises(KeyError, match="user's error") as error:
        trainer_for(tmp_path, profiler, keep, **options).fit(net, data())
    assert notes_of(error) == ""
    assert (hooks_on(optimizers), len(optimizers)) == (0, 1 if automatic else 2)
    assert len(csv_rows(tmp_path)) == profiler.summary.steps == 3
    assert profiler.summary.fits == ""
    assert [metrics["speed/batch_size"] for _, metrics in recorder.ours] == [4]
    (path,) = tmp_path.rglob("memory_summary.json")
    assert Summary.from_json(path.read_text()) == profiler.summary
    assert "MiB" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        trainer_for(tmp_path, MemoryProfiler()).fit(Net(failing(3, KeyboardInterrupt())), data())
    # An interrupted run prints its table.
    assert "3 steps of" in capsys.readouterr().out


def test_the_directory_of_a_logger_may_be_a_path(tmp_path, device_memory):
    class InPath(Recorder):
        save_dir = tmp_path / "logs"

    trainer_for(tmp_path, MemoryProfiler(), logger=InPath()).fit(Net(), data())
    assert len(csv_rows(tmp_path / "logs")) == 6


def test_a_mock_of_a_logger_has_no_directory(tmp_path, device_memory):
    trainer_for(tmp_path, MemoryProfiler(), logger=Mock(spec=Logger)).fit(Net(), data())
    assert len(csv_rows(tmp_path)) == 6


def test_a_run_that_fails_before_its_first_step_leaves_no_file(tmp_path, device_memory):
    (tmp_path / "file").touch()
    fail = At(on_fit_start=lambda *_: failing(0)(0, "start"))
    with pytest.raises(KeyError, match="user's error"):
        trainer_for(tmp_path, MemoryProfiler(), fail).fit(Net(), data())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_class_among_the_callbacks_is_named(tmp_path):
    # Lightning sets attributes of a callback, which here are those of a class.
    class Profiler(MemoryProfiler):
        pass

    class Finder(BatchFinder):
        pass

    trainer = trainer_for(tmp_path, At())
    # Lightning 2.5 refuses a class in __init__, without a sentence for the user.
    trainer.callbacks += [Profiler, Finder]
    with pytest.raises(ValueError, match=r"write BatchFinder\(\) or MemoryProfiler\(\)"):
        trainer.fit(Net(), data())
    trainer.callbacks += [Finder]
    with pytest.raises(ValueError, match=r"write BatchFinder\(\) or MemoryProfiler\(\)"):
        trainer.fit(Net(), data())


def test_arguments_without_their_names():
    with pytest.raises(TypeError, match=r"takes its arguments by name, such as csv=\.\.\., got 3"):
        MemoryProfiler(3)
    with pytest.raises(TypeError, match=r"no argument module\. Did you mean modules\?"):
        MemoryProfiler(module=True)


def test_a_training_goes_on_where_the_log_directory_cannot_be_made(tmp_path, device_memory):
    directory = tmp_path / "logs"
    # A file is there by then.
    remove = At(on_fit_start=lambda *_: directory.touch())
    profiler = MemoryProfiler()
    trainer = trainer_for(directory, profiler, remove)
    message = r"writes no memory_per_batch\.csv: .*Not a directory.* Give the Trainer another"
    with pytest.warns(UserWarning, match=message):
        trainer.fit(Net(), data())
    assert trainer.global_step > 0
    assert profiler.summary is not None
    assert directory.is_file()


@pytest.mark.parametrize(
    ("where", "at_step", "text"),
    [
        ("forward", 3, "in train step 3 with a batch of 4 samples, in forward"),
        ("backward", 3, "in train step 3 with a batch of 4 samples, in backward"),
        ("validation", 6, "in validate step 0 with a batch of 4 samples"),
        ("epoch end", 6, "after train step 5 and before the next one, in a hook or a callback"),
        (
            "validation start",
            6,
            "after train step 5 and before the next one, in a hook or a callback",
        ),
    ],
)
def test_an_out_of_memory_error_gets_a_note_and_a_snapshot(
    tmp_path, device_memory, monkeypatch, where, at_step, text
):
    calls = []
    snapshot = SimpleNamespace(
        write=lambda rank: calls.append(("write", rank)) or "the snapshot is written",
        stop=lambda: calls.append("stop"),
        begin_step=lambda number: None,
        end_step=lambda rank: "",
    )

    def start(when, directory, device):
        calls.append((directory, device.type))
        return snapshot

    def work(step, now):
        device_memory.use(50 * MIB)
        if (step, now) == (at_step, where):
            device_memory.use(2000 * MIB)
        device_memory.free()

    monkeypatch.setattr(memory_profiler, "start_snapshot", start)
    hooks = At(
        on_train_epoch_end=lambda trainer, module: work(module.steps, "epoch end"),
        on_validation_epoch_start=lambda trainer, module: work(module.steps, "validation start"),
    )
    profiler = MemoryProfiler(snapshot="on_oom")
    trainer = trainer_for(tmp_path, profiler, hooks, num_sanity_val_steps=0)
    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        trainer.fit(Validated(work), data(), data(samples=8))
    note = f"MemoryProfiler: memory ran out {text}."
    assert f"{note} The highest peak before was 51.0 MiB, in train step 0." in notes_of(error)
    assert "MemoryProfiler: the snapshot is written" in notes_of(error)
    assert calls == [(tmp_path / OWN_LOGS, "cpu"), ("write", 0), "stop"]


@pytest.mark.parametrize(
    ("hook", "at_step", "text"),
    [
        ("on_train_epoch_end", 6, "300.0 MiB after step 5"),
        ("on_validation_end", 3, "300.0 MiB after step 2"),
        # A callback may come after the last step before the one that fails.
        ("on_validation_end", 6, "300.0 MiB after step 5"),
        ("on_before_optimizer_step", 3, "300.0 MiB after step 2"),
        # Each step keeps 50 MiB.
        ("on_train_batch_start", None, "750.0 MiB after step 0"),
    ],
)
def test_an_out_of_memory_error_says_which_memory_has_grown(
    tmp_path, device_memory, hook, at_step, text
):
    device_memory.budget = 1000 * MIB

    def keep(trainer, module):
        if at_step is None:
            device_memory.keep(50 * MIB * module.steps)
        elif module.steps == at_step:
            device_memory.keep(300 * MIB)

    def work(step, now):
        # The second step has gradients and states.
        device_memory.use(750 * MIB if step >= 5 and at_step else 200 * MIB)
        device_memory.free()

    hooks = At(**{hook: keep})
    trainer = trainer_for(tmp_path, MemoryProfiler(), hooks, max_epochs=9, val_check_interval=3)
    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        trainer.fit(Validated(work), data(), data(samples=8))
    assert f"The memory in use has grown by {text}." in notes_of(error)


@pytest.mark.parametrize("kind", ["none", "freed", "of the host"])
def test_no_growth_is_not_named(tmp_path, device_memory, kind):
    if kind == "of the host":
        # It may be memory that was freed.
        device_memory.as_host()

    def work(step, now):
        is_kept = step >= 3 if kind == "of the host" else kind == "freed" and 3 <= step < 6
        device_memory.keep(300 * MIB if is_kept else 0)
        device_memory.use(2000 * MIB if step == 9 else 50 * MIB)
        device_memory.free()

    trainer = trainer_for(tmp_path, MemoryProfiler(), max_epochs=9)
    with pytest.raises(torch.cuda.OutOfMemoryError) as error:
        trainer.fit(Net(work), data())
    assert "grown" not in notes_of(error)


@pytest.mark.parametrize(
    "items",
    [
        None,
        "many",
        "3",
        b"3",
        True,
        torch.tensor(True),
        math.nan,
        math.inf,
        torch.tensor(math.nan),
        -1,
        10**400,
        10**5000,
        1e300,
        1j,
        [3],
        torch.ones(2),
        np.array([1, 2]),
    ],
    ids=lambda items: type(items).__name__,
)
def test_what_is_not_a_count_of_items_is_one_warning_and_a_missing_reading(
    tmp_path, device_memory, recwarn, items
):
    # The second of three steps has items that can be counted.
    returned = iter([items, 6, items])
    profiler = MemoryProfiler(items_fn=lambda batch: next(returned))
    profiled(tmp_path, Net(), profiler=profiler, loader=data(samples=12))
    (warning,) = [str(one.message) for one in recwarn if "items_fn" in str(one.message)]
    assert warning.startswith("items_fn must return a finite number that is not negative, got ")
    assert [bool(row["items_per_s"]) for row in csv_rows(tmp_path)] == [False, True, False]
    assert math.isfinite(profiler.summary.speed.items_per_s)


@pytest.mark.parametrize("snapshot", ["on_oom", 3])
@pytest.mark.filterwarnings("always:No memory snapshot")
def test_a_snapshot_on_the_cpu_is_one_warning(tmp_path, device_memory, recwarn, snapshot):
    profiled(tmp_path, Net(), profiler=MemoryProfiler(snapshot=snapshot))
    (warning,) = [str(one.message) for one in recwarn if "snapshot" in str(one.message)]
    assert warning == "No memory snapshot will be written: it needs a CUDA device."
    assert not list(tmp_path.rglob("*.pickle"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"snapshot": "always"},
        {"snapshot": -1},
        {"snapshot": True},
        {"snapshot": 2.5},
        {"items_fn": 3},
        {"flops": 1},
    ],
)
def test_invalid_arguments(arguments):
    with pytest.raises(ValueError, match=f"^{next(iter(arguments))} must be"):
        MemoryProfiler(**arguments)


def test_the_progress_bar_stops_before_the_table(tmp_path, device_memory, capsys):
    outputs = []

    class Bar(RichProgressBar):
        def teardown(self, trainer, module, stage):
            outputs.append(capsys.readouterr().out)
            super().teardown(trainer, module, stage)

    profiled(tmp_path, Net(), Bar(), enable_progress_bar=True)
    # Lightning calls it, once, after the table. The bar has ended before.
    (output,) = outputs
    assert output.index("6/6") < output.index("Highest peak")


def test_training_is_bit_identical_with_everything_on(tmp_path):
    class Dropout(Validated):
        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.mse_loss(self.layer(nn.functional.dropout(x, 0.3)), y)
            return loss + 0 * torch.rand(())

    def run(*callbacks):
        torch.manual_seed(7)
        net = Dropout()
        trainer = trainer_for(tmp_path, *callbacks, max_epochs=2, accumulate_grad_batches=2)
        loader = DataLoader(data(samples=100).dataset, batch_size=4, shuffle=True)
        trainer.fit(net, loader, data(samples=4))
        states = trainer.optimizers[0].state_dict()["state"].values()
        moments = [value for state in states for value in state.values()]
        return [*net.state_dict().values(), *moments, torch.get_rng_state()]

    profiler = MemoryProfiler(items_fn=lambda batch: len(batch[0]))
    for without, with_profiler in zip(
        run(), run(profiler, Planned(4000.0, limit_mib=8000)), strict=True
    ):
        assert torch.equal(without, with_profiler)


# --- the real host


def test_64_mib_on_the_host_are_in_their_step_and_no_other(tmp_path):
    places = {2: "forward", 3: "backward", 5: "optimizer_step"}

    def work(step, now):
        if places.get(step) == now:
            # malloc would take them from the heap, and keep them, where earlier tests left a hole.
            block = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            torch.frombuffer(block, dtype=torch.uint8).fill_(1)

    profiler, _ = profiled(tmp_path, Net(work))
    peaks = [float(row["peak_process_mib"]) for row in csv_rows(tmp_path)]
    for step in places:
        # Step 4 has none of them.
        assert 60 < peaks[step] - peaks[4] < 68
    # The first steps of a process load some 8 MiB of libraries.
    assert 60 * MIB < profiler.summary.memory.breakdown.activations_bytes < 80 * MIB
