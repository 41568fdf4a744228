from __future__ import annotations

import csv
import math
import os
import time

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lightning_batchmem.report.reporter
from lightning_batchmem.measure.breakdown import MemoryBreakdown
from lightning_batchmem.memory_profiler import MemoryProfiler
from tests.profiled import METRICS, MIB, Net, Recorder, Validated, csv_rows, data, rows, spike, trainer_for

# ---------------------------------------------------------------------------------------------------- the CSV's rows


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
        assert row["limit_mib"] == ("" if step else "1024.0")  # it is asked once a second
        assert float(row["forward_peak_mib"]) == 11 + step
        assert float(row["backward_peak_mib"]) == float(row["peak_allocated_mib"]) == 21 + step
        assert float(row["optimizer_step_peak_mib"]) == 6
        assert row["peak_reserved_mib"] == row["gpu_pct"] == ""
        assert float(row["samples_per_s"]) == pytest.approx(4 / (float(row["step_ms"]) / 1e3), rel=0.01)
        assert 0 < float(row["data_wait_pct"]) < 100
        assert 0 <= float(row["cpu_pct"]) <= 100
    assert profiler.summary.phase_peak_bytes == {
        "forward": 16 * MIB,
        "backward": 26 * MIB,
        "optimizer_step": 6 * MIB,
    }
    assert (profiler.summary.peak_bytes, profiler.summary.peak_step) == (26 * MIB, 5)


def test_limit_and_utilization_only_in_the_rows_in_which_they_were_asked(tmp_path, device_memory, monkeypatch):
    monkeypatch.setattr(lightning_batchmem.report.reporter, "LIMIT_EVERY_SECONDS", 0.0)
    trainer_for(tmp_path, MemoryProfiler(), log_every_n_steps=3).fit(Net(), data())
    assert [bool(row["limit_mib"]) for row in csv_rows(tmp_path)] == [True, False, True, False, False, True]
    assert [bool(row["cpu_pct"]) for row in csv_rows(tmp_path)] == [False, False, True, False, False, True]


def test_reserved_bytes_where_there_are_some(tmp_path, device_memory):
    device_memory.reserved_ratio = 2.0
    recorder, profiler = Recorder(), MemoryProfiler()
    trainer_for(tmp_path, profiler, logger=recorder).fit(Net(spike(device_memory, 2, "backward", 99)), data())
    assert recorder.ours[2][1]["memory/peak_reserved_mib"] == 200
    assert profiler.summary.peak_reserved_bytes == 200 * MIB


def test_a_short_last_batch_counts_with_its_own_size(tmp_path, device_memory):
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler).fit(Net(), data(samples=10))
    assert [row["batch_size"] for row in csv_rows(tmp_path)] == ["4", "4", "2"]
    summary = profiler.summary
    assert summary.samples_per_second == pytest.approx(10 / (summary.steps * summary.step_seconds))


def test_no_csv_when_it_is_not_wanted_and_under_fast_dev_run(tmp_path, device_memory):
    trainer_for(tmp_path, MemoryProfiler(csv=False)).fit(Net(), data())
    trainer_for(tmp_path, MemoryProfiler(), fast_dev_run=2).fit(Net(), data())
    assert not list(tmp_path.rglob("*.csv"))


def test_a_remote_log_directory_gets_no_csv_and_a_word(tmp_path, device_memory, monkeypatch):
    monkeypatch.setattr(Trainer, "log_dir", "s3://bucket/run")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"no memory_per_batch\.csv.*s3://bucket/run"):
        trainer_for(tmp_path, MemoryProfiler()).fit(Net(), data())
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path, device_memory):
    (tmp_path / "root").write_text("a file")
    net = Net()
    with pytest.raises(OSError, match="root"):
        trainer_for(tmp_path / "root", MemoryProfiler()).fit(net, data())
    assert net.steps == 0


def test_a_full_disk_ends_the_csv_and_not_the_training(tmp_path, device_memory, monkeypatch):
    class FillDisk(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                os.dup2(full.fileno(), profiler._run.report._csv._file.fileno())

    net, profiler = Net(), MemoryProfiler()
    with open("/dev/full", "w") as full, pytest.warns(UserWarning, match="no more rows.*No space left"):
        trainer_for(tmp_path, profiler, FillDisk()).fit(net, data())
    assert net.steps == profiler.summary.steps == 6
    assert len(csv_rows(tmp_path)) == 2


# ------------------------------------------------------------------------------------------------------- the loggers


def test_tensorboard_and_csv_logger_get_exactly_the_designs_names(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [TensorBoardLogger(tmp_path, name="tb"), CSVLogger(tmp_path, name="csv")]
    trainer = trainer_for(tmp_path, MemoryProfiler(), logger=loggers, log_every_n_steps=2)
    trainer.fit(Net(), data())
    events = EventAccumulator(str(loggers[0].log_dir))
    events.Reload()
    assert set(events.Tags()["scalars"]) == METRICS | {"loss", "epoch"}
    for name in METRICS:
        assert [event.step for event in events.Scalars(name)] == [1, 3, 5]
        assert all(math.isfinite(event.value) for event in events.Scalars(name))
    assert {event.value for event in events.Scalars("batch/size")} == {4.0}
    with open(f"{loggers[1].log_dir}/metrics.csv") as file:
        logged = list(csv.DictReader(file))
    assert set(logged[0]) == METRICS | {"loss", "epoch", "step"}
    assert [row["step"] for row in logged if row["batch/size"]] == ["1", "3", "5"]
    assert (tmp_path / "tb" / "version_0" / "memory_per_batch.csv").exists()  # log_dir is the first logger's


def test_a_peak_between_two_logs_is_not_lost(tmp_path, device_memory):
    recorder = Recorder()
    net = Net(spike(device_memory, 2, "forward", 300))
    trainer_for(tmp_path, MemoryProfiler(), logger=recorder, log_every_n_steps=2, max_epochs=2).fit(net, data())
    assert [step for step, _ in recorder.ours] == recorder.lightnings == [1, 3, 5, 7, 9, 11]
    assert [metrics["memory/peak_allocated_mib"] for _, metrics in recorder.ours] == [1, 301, 1, 1, 1, 1]


def test_a_peak_after_the_last_log_is_not_lost(tmp_path, device_memory):
    recorder = Recorder()
    net = Net(spike(device_memory, 5, "forward", 300))
    trainer_for(tmp_path, MemoryProfiler(), logger=recorder, log_every_n_steps=4).fit(net, data())
    assert [(step, metrics["memory/peak_allocated_mib"]) for step, metrics in recorder.ours] == [(3, 1), (5, 301)]


def test_nothing_is_logged_where_the_trainer_logs_nothing(tmp_path, device_memory):
    recorder = Recorder()
    trainer_for(tmp_path, MemoryProfiler(), logger=recorder, log_every_n_steps=0).fit(Net(), data())
    assert recorder.ours == []


def test_throughput_is_that_of_all_ranks(tmp_path, device_memory, monkeypatch):
    monkeypatch.setattr(Trainer, "world_size", 2)
    recorder = Recorder()
    trainer_for(tmp_path, MemoryProfiler(), logger=recorder).fit(Net(), data())
    for _, metrics in recorder.ours:
        assert metrics["throughput/samples_per_s"] == pytest.approx(2 * 4 / (metrics["throughput/step_ms"] / 1e3))


# ------------------------------------------------------------------------------------ accumulation, manual, odd batches


def test_accumulation_logs_when_an_optimizer_stepped(tmp_path, device_memory):
    recorder = Recorder()
    net = Net(spike(device_memory, 1, "backward", 50))
    trainer = trainer_for(tmp_path, MemoryProfiler(), logger=recorder, accumulate_grad_batches=4)
    trainer.fit(net, data())
    assert [step for step, _ in recorder.ours] == recorder.lightnings == [0, 1]
    assert recorder.ours[0][1]["memory/peak_allocated_mib"] == 51


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


class Gan(LightningModule):
    """Manual optimization, two optimizers; the second forward needs more than the first, as does the first backward."""

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
                raise KeyError("the user's own error")
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.one.parameters(), 0.1), torch.optim.Adam(self.two.parameters(), 0.1)


def test_manual_optimization_with_two_optimizers(tmp_path, device_memory):
    recorder, profiler = Recorder(), MemoryProfiler()
    trainer = trainer_for(tmp_path, profiler, logger=recorder)
    trainer.fit(Gan(device_memory), data())
    assert profiler.summary.phase_peak_bytes == {
        "forward": 31 * MIB,
        "backward": 61 * MIB,
        "optimizer_step": 61 * MIB,  # what backward left is freed after its end
    }
    assert [step for step, _ in recorder.ours] == [0, 1, 2, 3, 4, 5]
    assert (
        profiler.summary.breakdown.optimizer_state_bytes == 2 * (4 + 1) * 4 + 2 * 4
    )  # Adam's; SGD without momentum: none


class Strings(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return "text"


def test_samples_that_cannot_be_told_are_missing_and_said_once(tmp_path, device_memory):
    class NoTensors(Net):
        def training_step(self, batch, batch_idx):
            return self.layer(torch.ones(1, 4)).sum()

    recorder, profiler = Recorder(), MemoryProfiler()
    trainer = trainer_for(tmp_path, profiler, logger=[CSVLogger(tmp_path), recorder])
    with pytest.warns(UserWarning, match="cannot tell how many samples") as said:
        trainer.fit(NoTensors(), DataLoader(Strings(), batch_size=2))
    assert len([warning for warning in said if "cannot tell" in str(warning.message)]) == 1
    assert set(recorder.ours[0][1]) == METRICS - {"batch/size", "throughput/samples_per_s"}
    assert [(row["batch_size"], row["samples_per_s"]) for row in csv_rows(tmp_path)] == [("", "")] * 3
    assert profiler.summary.batch_size is None
    assert profiler.summary.samples_per_second is None


def test_steps_that_lightning_skips_are_no_steps(tmp_path, device_memory):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from (torch.ones(4), torch.ones(4), None, torch.ones(4))

    class Sum(Net):
        def training_step(self, batch, batch_idx):
            return self.layer(batch).sum()

    profiler = MemoryProfiler()
    with pytest.warns(UserWarning, match="yielded None"):
        trainer_for(tmp_path, profiler).fit(Sum(), DataLoader(Stream(), batch_size=None))
    assert profiler.summary.steps == 3

    class StopsEarly(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    trainer_for(tmp_path / "2", profiler, max_epochs=2).fit(StopsEarly(), data())
    assert profiler.summary.steps == 4


# ------------------------------------------------------------------------------------------------------ time and stages


class SlowToLoad(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.03)
        return super().__getitem__(index)


def test_waiting_for_data_is_part_of_the_step_and_known_apart(tmp_path, device_memory):
    x = torch.ones(4, 4)
    loader = DataLoader(SlowToLoad(x, x[:, :1]), batch_size=1)
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler).fit(Net(lambda *_: time.sleep(0.01)), loader)
    for row in csv_rows(tmp_path):
        assert float(row["step_ms"]) >= 60
        assert 25 < float(row["data_wait_pct"]) < 60  # 30 of 60 ms
    assert profiler.summary.step_seconds >= 0.06
    assert 0.25 < profiler.summary.data_wait_share < 0.6


@pytest.mark.parametrize("checkpoints", [True, False])
def test_evaluation_checkpoints_and_the_ends_of_epochs_are_left_out(tmp_path, device_memory, checkpoints):
    def work(step, where):
        if where == "validation":
            time.sleep(0.3)

    class SlowEpochEnds(Callback):
        def on_train_epoch_end(self, *_):
            time.sleep(0.3)

    class SlowCheckpoint(ModelCheckpoint):
        def on_validation_end(self, trainer, module):
            super().on_validation_end(trainer, module)
            time.sleep(0.3)

    recorder, profiler = Recorder(), MemoryProfiler()
    callbacks = [profiler, SlowEpochEnds()] + [SlowCheckpoint(tmp_path / "checkpoints")] * checkpoints
    options = {"max_epochs": 2, "val_check_interval": 2, "num_sanity_val_steps": 1}
    trainer = trainer_for(tmp_path, *callbacks, logger=recorder, **options)
    trainer.fit(Validated(work), data(), data(samples=4))
    assert bool(checkpoints) == bool(trainer.checkpoint_callback and trainer.checkpoint_callback.best_model_path)
    assert len(recorder.ours) == profiler.summary.steps == 12
    assert all(0 < metrics["throughput/step_ms"] < 250 for _, metrics in recorder.ours)
    assert profiler.summary.peak_bytes == MIB
    # the wait is not known after an evaluation, nor where a checkpoint was written before the step
    known = [True, True, False, True, False, True]
    assert ["throughput/data_wait_pct" in metrics for _, metrics in recorder.ours] == known * 2


# ----------------------------------------------------------------------------------------- the summary and its parts


def test_the_parts_of_the_steady_state_add_up_to_the_peak(tmp_path, device_memory, capsys):
    device_memory.free()
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


def test_a_spike_while_warming_up_is_kept_apart(tmp_path, device_memory, capsys):
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler).fit(Net(spike(device_memory, 0, "forward", 500)), data())
    assert (profiler.summary.peak_bytes, profiler.summary.peak_step) == (501 * MIB, 0)
    assert profiler.summary.breakdown.peak_bytes == MIB
    assert "before the first step after an optimizer step" in " ".join(capsys.readouterr().out.split())


def test_under_accumulation_the_parts_wait_for_the_optimizers_state(tmp_path, device_memory):
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler, accumulate_grad_batches=3).fit(Net(), data())
    assert profiler.summary.breakdown.optimizer_state_bytes > 0
    assert profiler.summary.breakdown.gradients_bytes == 20


def test_gradients_that_validation_freed_are_looked_for_again(tmp_path, device_memory):
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler, val_check_interval=1, limit_val_batches=1, num_sanity_val_steps=0).fit(
        Validated(), data(samples=8), data(samples=4)
    )
    assert profiler.summary.breakdown.gradients_bytes == 0

    class OnlyOnce(Validated):
        def on_validation_model_zero_grad(self):
            if self.steps < 3:
                super().on_validation_model_zero_grad()

    trainer_for(tmp_path / "2", profiler, val_check_interval=1, num_sanity_val_steps=0).fit(
        OnlyOnce(), data(), data(samples=4)
    )
    assert profiler.summary.breakdown.gradients_bytes == 20


def test_too_short_for_parts_and_too_short_for_a_summary(tmp_path, device_memory, capsys):
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler, max_steps=1).fit(Net(), data())
    assert profiler.summary.breakdown is None
    assert "too short" in capsys.readouterr().out
    trainer_for(tmp_path / "2", profiler, max_steps=0).fit(Net(), data())
    assert profiler.summary is None
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------ several fits, errors, no trace


def hooks_on(optimizers):
    return sum(len(optimizer._optimizer_step_post_hooks) for optimizer in optimizers)


def test_two_fits_in_a_row(tmp_path, device_memory):
    profiler = MemoryProfiler()
    trainer = trainer_for(tmp_path, profiler)
    net = Net()
    trainer.fit(net, data())
    assert profiler.summary.steps == 6
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, data())
    assert profiler.summary.steps == 6
    assert [int(row["step"]) for row in csv_rows(tmp_path)] == list(range(12))
    assert hooks_on(trainer.optimizers) == 0
    trainer_for(tmp_path, profiler).fit(Net(), data())  # a new run: its own file
    assert [len(rows(path)) for path in sorted(tmp_path.glob("*.csv"))] == [12, 6]


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path, device_memory):
    first = trainer_for(tmp_path, MemoryProfiler())
    first.fit(Net(), data())
    first.save_checkpoint(tmp_path / "last.ckpt")
    trainer_for(tmp_path, MemoryProfiler(), max_epochs=2).fit(Net(), data(), ckpt_path=tmp_path / "last.ckpt")
    assert [int(row["step"]) for row in csv_rows(tmp_path)] == list(range(12))


@pytest.mark.parametrize("automatic", [True, False])
def test_an_exception_leaves_a_flushed_csv_a_summary_and_no_hooks(tmp_path, device_memory, capsys, automatic):
    def work(step, where):
        if step == 3 and where == "backward":
            raise KeyError("the user's own error")

    profiler = MemoryProfiler()
    trainer = trainer_for(tmp_path, profiler, log_every_n_steps=50)
    optimizers = []

    class Keep(Callback):
        def on_train_start(self, trainer, module):
            optimizers.extend(trainer.optimizers)
            assert hooks_on(optimizers) > 0

    trainer.callbacks.append(Keep())
    with pytest.raises(KeyError, match="own error"):
        trainer.fit(Net(work) if automatic else Gan(device_memory, fail_at=3), data())
    assert hooks_on(optimizers) == 0
    assert len(csv_rows(tmp_path)) == profiler.summary.steps == 3
    assert "MiB" not in capsys.readouterr().out


def test_a_run_that_breaks_off_in_its_first_steady_step_has_no_parts(tmp_path, device_memory):
    def work(step, where):
        if step == 1:
            raise KeyError("the user's own error")

    profiler = MemoryProfiler()
    with pytest.raises(KeyError, match="own error"):
        trainer_for(tmp_path, profiler).fit(Net(work), data())
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


class Dropout(Validated):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.layer(nn.functional.dropout(x, 0.3)), y) + 0 * torch.rand(())


def test_training_is_bit_identical_with_and_without(tmp_path):
    def run(*callbacks):
        seed_everything(7, verbose=False)
        net, set_ = Dropout(), data().dataset
        trainer = trainer_for(tmp_path, *callbacks, max_epochs=2, accumulate_grad_batches=2)
        trainer.fit(net, DataLoader(set_, batch_size=5, shuffle=True), data(samples=4))
        state = trainer.optimizers[0].state_dict()["state"]
        moments = [value for entry in state.values() for value in entry.values()]
        return [*net.state_dict().values(), *moments, torch.get_rng_state()]

    for without, with_profiler in zip(run(), run(MemoryProfiler()), strict=True):
        assert torch.equal(without, with_profiler)


# ------------------------------------------------------------------------------------------------------- the real host


class Takes(LightningModule):
    """Adds 64 MiB to the resident set inside the phase that it is told to."""

    def __init__(self, where):
        super().__init__()
        self.layer, self.where = nn.Linear(4, 1), where

    def take(self, where):
        if where == self.where:
            torch.ones(16 * MIB)  # 4 bytes each

    def training_step(self, batch, batch_idx):
        self.take("forward")
        loss = self.layer(batch[0]).sum()
        loss.register_hook(lambda gradient: self.take("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.take("optimizer_step")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer_step"])
def test_64_mib_on_the_host_are_seen_in_their_phase_and_no_other(tmp_path, where):
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler).fit(Takes(where), data())
    if not profiler.summary.has_peak:
        pytest.skip("this system keeps no peak that can be reset")
    for row in csv_rows(tmp_path)[1:]:
        peaks = {phase: float(row[f"{phase}_peak_mib"]) for phase in ("forward", "backward", "optimizer_step")}
        highest = peaks.pop(where)
        assert highest == float(row["peak_allocated_mib"])
        for other in peaks.values():
            assert 60 < highest - other < 68
    assert 60 * MIB < profiler.summary.breakdown.activations_bytes < 68 * MIB


class Hoarding(LightningModule):
    """Forty-eight tensors of 1 MiB live until backward, from the heap, which keeps what is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
        x = self.weight.expand(2**18)
        for _ in range(48):
            x = x.tanh()
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.zeros(16, 1)), batch_size=2)


def test_what_the_heap_keeps_of_the_step_before_counts_as_activations_on_the_host(tmp_path) -> None:
    profiler = MemoryProfiler()
    Trainer(
        accelerator="cpu",
        max_steps=6,
        callbacks=[profiler],
        logger=False,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Hoarding())
    assert profiler.summary is not None
    assert profiler.summary.breakdown is not None
    assert profiler.summary.breakdown.activations_bytes >= 10 * 2**20  # it would be next to nothing
    assert profiler.summary.breakdown.peak_bytes == profiler.summary.peak_bytes


class Breaks(Recorder):
    """Raises whenever the profiler logs."""

    def log_metrics(self, metrics, step=None):
        super().log_metrics(metrics, step)
        if "loss" not in metrics:
            raise ConnectionError("the server is gone")


def test_a_logger_that_raises_does_not_end_training(tmp_path, device_memory):
    broken, other = Breaks(), Recorder()
    profiler = MemoryProfiler()
    with pytest.warns(UserWarning, match="Breaks gets no more metrics of MemoryProfiler: .* the server is gone"):
        trainer_for(tmp_path, profiler, logger=[broken, other]).fit(Net(), data())
    assert len(broken.ours) == 1  # and is not asked again
    assert len(other.ours) > 1
    assert profiler.summary is not None


def test_the_peaks_of_epoch_and_run_can_be_read_at_any_time(tmp_path, device_memory):
    seen = []

    class Reads(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append((profiler.epoch_peak_bytes // MIB, profiler.run_peak_bytes // MIB))

    profiler = MemoryProfiler()
    assert (profiler.epoch_peak_bytes, profiler.run_peak_bytes) == (None, None)
    trainer_for(tmp_path, profiler, Reads(), max_epochs=2).fit(Net(spike(device_memory, 1, "forward", 9)), data())
    steps = len(seen) // 2
    assert seen[0] == (1, 1)
    assert seen[1] == seen[steps - 1] == (10, 10)
    assert seen[steps] == (1, 10)
    assert profiler.epoch_peak_bytes is None
    assert profiler.run_peak_bytes == 10 * MIB
