"""What the profiler reports of a run: rows and metrics of every stage, warnings, files; with a real Trainer."""

from __future__ import annotations

import json
import sys
import time
import tracemalloc

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_batchmem.measure.recorder
import lightning_batchmem.memory_profiler
import lightning_batchmem.report.images
import lightning_batchmem.report.reporter
from lightning_batchmem import BatchFinder, Line, MemoryModel, Plan, Trial
from lightning_batchmem.measure.composition import Composition
from lightning_batchmem.measure.phases import StepPeaks
from lightning_batchmem.measure.step_record import StepRecord
from lightning_batchmem.memory_profiler import MemoryProfiler
from lightning_batchmem.report.reporter import StepReporter
from lightning_batchmem.report.summary import Summary
from tests.lawful import Lawful, law
from tests.profiled import MIB, Net, Recorder, Validated, csv_rows, data, rows, spike, trainer_for

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


def a_plan(batch_size=4, fixed_mib=1.0, mib_a_sample=2.0):
    lines = {"forward": Line(fixed_mib * MIB, mib_a_sample * MIB, 0.0, 2, batch_size)}
    trial = Trial(batch_size, "ok", {"forward": 9 * MIB})
    return Plan(
        batch_size=batch_size,
        limited_by="memory",
        limit_bytes=1024 * MIB,
        trials=(trial,),
        predicted_peak_bytes=None,
        upper_peak_bytes=None,
        measured_peak_bytes=9 * MIB,
        verified=True,
        memory=MemoryModel(lines),
        time=None,
    )


def recording(tmp_path, recorder):
    """A logger with a directory, and the recorder."""
    return [CSVLogger(tmp_path), recorder]


def the_file(tmp_path, name):
    (path,) = tmp_path.rglob(name)
    return path.read_text()


class Planned(Callback):
    """Has a plan, as a BatchFinder has one."""

    def __init__(self, plan):
        self.plan = plan


# ------------------------------------------------------------------------------------------------------- evaluations


def test_validation_inside_a_training_has_rows_metrics_and_a_summary(tmp_path, device_memory):
    recorder, profiler = Recorder(), MemoryProfiler()
    trainer = trainer_for(
        tmp_path, profiler, logger=recording(tmp_path, recorder), val_check_interval=3, num_sanity_val_steps=2
    )
    with pytest.warns(UserWarning, match=r"validate.*above"):
        trainer.fit(Evaluated(device_memory), data(), data(samples=10))
    assert [(row["stage"], row["step"]) for row in csv_rows(tmp_path)] == [
        *(("train", str(step)) for step in range(3)),
        *(("validate", str(step)) for step in range(3)),
        *(("train", str(step)) for step in range(3, 6)),
        *(("validate", str(step)) for step in range(3)),
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
    assert profiler.summary.steps == 6
    assert profiler.summary.peak_bytes == MIB
    assert profiler.run_peak_bytes == 6 * MIB  # as torch.cuda.max_memory_allocated() would say
    assert len(profiler.summary.alerts) == 1


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_by_itself(tmp_path, device_memory, stage, capsys):
    recorder, profiler = Recorder(), MemoryProfiler()
    trainer = trainer_for(tmp_path, profiler, logger=recording(tmp_path, recorder))
    getattr(trainer, stage)(Evaluated(device_memory), data(samples=10))
    found = csv_rows(tmp_path)
    assert [(row["stage"], row["step"], row["batch_size"]) for row in found] == [
        (stage, "0", "4"),
        (stage, "1", "4"),
        (stage, "2", "2"),
    ]
    ((_, metrics),) = recorder.others
    assert set(metrics) == {f"{stage}/{name}" for name in EVALUATED}
    summary = profiler.summary
    assert (summary.stage, summary.steps, summary.peak_bytes) == (stage, 3, 6 * MIB)
    assert (summary.breakdown.gradients_bytes, summary.breakdown.optimizer_state_bytes) == (0, 0)
    assert summary.estimate.gradients_bytes == 0
    assert (summary.breakdown.parameters_bytes, summary.breakdown.batch_bytes) == (20, 4 * 5 * 4)
    assert summary.breakdown.peak_bytes == 6 * MIB
    assert Summary.from_json(the_file(tmp_path, f"memory_summary_{stage}.json")) == summary
    called = {"validate": "validation", "test": "test", "predict": "prediction"}[stage]
    assert f"Memory of a {called} step" in capsys.readouterr().out


def test_a_test_after_a_training_goes_on_in_its_file_and_keeps_its_summary(tmp_path, device_memory):
    profiler = MemoryProfiler()
    trainer, net = trainer_for(tmp_path, profiler), Evaluated(device_memory)
    trainer.fit(net, data())
    trained = profiler.summary
    trainer.test(net, data(samples=4), verbose=False)
    assert [row["stage"] for row in csv_rows(tmp_path)] == ["train"] * 6 + ["test"]
    assert Summary.from_json(the_file(tmp_path, "memory_summary.json")) == trained
    assert profiler.summary.stage == "test"


def test_batches_of_several_loaders_are_counted_on(tmp_path, device_memory):
    trainer_for(tmp_path, MemoryProfiler()).test(
        Evaluated(device_memory), [data(samples=8), data(samples=12)], verbose=False
    )
    assert [row["step"] for row in csv_rows(tmp_path)] == ["0", "1", "2", "3", "4"]


# ---------------------------------------------------------------------------------------------------- items and plans


@pytest.mark.parametrize("as_a", [int, torch.tensor])
def test_items_are_counted_where_the_user_says_how(tmp_path, device_memory, as_a):
    recorder, profiler = Recorder(), MemoryProfiler(items_fn=lambda batch: as_a(10 * len(batch[0])))
    trainer_for(tmp_path, profiler, logger=recording(tmp_path, recorder)).fit(Net(), data())
    for (_, metrics), row in zip(recorder.ours, csv_rows(tmp_path), strict=True):
        assert metrics["throughput/items_per_s"] == pytest.approx(10 * metrics["throughput/samples_per_s"])
        assert float(row["items_per_s"]) == pytest.approx(10 * float(row["samples_per_s"]), rel=1e-3)
    assert profiler.summary.items_per_second == pytest.approx(10 * profiler.summary.samples_per_second)


def test_without_a_function_no_items_are_named(tmp_path, device_memory):
    recorder = Recorder()
    trainer_for(tmp_path, MemoryProfiler(), logger=recording(tmp_path, recorder)).fit(Net(), data())
    assert not any("throughput/items_per_s" in metrics for _, metrics in recorder.ours)
    assert {row["items_per_s"] for row in csv_rows(tmp_path)} == {""}


def test_what_a_plan_predicts_is_logged_beside_what_is_measured(tmp_path, device_memory):
    recorder, profiler = Recorder(), MemoryProfiler()
    plan = a_plan()
    trainer_for(tmp_path, profiler, Planned(plan), logger=recording(tmp_path, recorder)).fit(Net(), data(samples=10))
    assert [metrics["memory/predicted_mib"] for _, metrics in recorder.ours] == [9.0, 9.0, 5.0]
    assert profiler.summary.predicted_bytes == 9 * MIB
    assert Plan.from_json(the_file(tmp_path, "batch_plan.json")) == plan


def test_a_plan_of_the_finder_is_found(tmp_path, fit, fake_device, monkeypatch):
    device_memory = fake_device(budget_bytes=200 * MIB)
    monkeypatch.setattr(lightning_batchmem.memory_profiler, "device_memory_for", lambda device, quick: device_memory)
    finder, profiler, recorder = BatchFinder(), MemoryProfiler(), Recorder()
    module = Lawful(device_memory, law)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[profiler, finder],
        logger=recording(tmp_path, recorder),
        max_steps=3,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    monkeypatch.setattr(lightning_batchmem.batch_finder, "device_memory_for", lambda device: device_memory)
    trainer.fit(module)
    size = finder.plan.batch_size
    for _, metrics in recorder.others + recorder.ours:
        if "memory/predicted_mib" in metrics:
            assert metrics["memory/predicted_mib"] == pytest.approx(law(size) / MIB, abs=1e-6)
            assert metrics["memory/peak_allocated_mib"] == pytest.approx(law(size) / MIB)
    assert any("memory/predicted_mib" in metrics for _, metrics in recorder.ours)
    assert profiler.summary.alerts == ()


# ------------------------------------------------------------------------------------------------------------ alarms


def test_a_step_far_above_the_plan_is_said_once_and_stays_in_the_summary(tmp_path, device_memory, capsys):
    profiler = MemoryProfiler()

    def work(step, where):
        if step > 1:
            device_memory.use(30 * MIB)
            device_memory.free()

    with pytest.warns(UserWarning, match="MemoryProfiler: The peak in step 2 .*plan") as issued:
        trainer_for(tmp_path, profiler, Planned(a_plan())).fit(Net(work), data())
    assert len([warning for warning in issued if "plan" in str(warning.message)]) == 1
    (alarm,) = profiler.summary.alerts
    assert f"Warned: {alarm}" in " ".join(capsys.readouterr().out.split())


def test_allocator_retries_are_said(tmp_path, device_memory):
    def work(step, where):
        device_memory.num_alloc_retries = 2 * (step >= 3)

    with pytest.warns(UserWarning, match="allocator"):
        trainer_for(tmp_path, MemoryProfiler()).fit(Net(work), data())


def test_a_limit_that_is_near_is_said(tmp_path, device_memory):
    with pytest.warns(UserWarning, match=r"1,000\.0 MiB"):
        trainer_for(tmp_path, MemoryProfiler()).fit(Net(spike(device_memory, 2, "backward", 999)), data())


def test_a_leak_is_said_with_its_size_per_step(tmp_path, device_memory):
    class Leak(Callback):
        def on_train_batch_end(self, *_):
            device_memory.use(MIB)

    with pytest.warns(UserWarning, match=r"1\.0 MiB (a|per) step"):
        trainer_for(tmp_path, MemoryProfiler(), Leak()).fit(Net(), data(samples=4 * 150))


# ----------------------------------------------------------------------------------------------- the time of the device


class FakeTimer:
    """A device on which a step takes 2 s, and which is one step behind."""

    def __init__(self):
        self.phase_peaks = 0

    def mark(self):
        self.phase_peaks += 1
        return self.phase_peaks

    def seconds_between(self, earlier, later):
        return 2.0 * (later - earlier) if later < self.phase_peaks else None


def test_the_devices_time_comes_a_step_later_and_its_rows_in_order(tmp_path, device_memory, monkeypatch):
    monkeypatch.setattr(lightning_batchmem.measure.recorder, "timer_for", lambda device: FakeTimer())
    recorder, profiler = Recorder(), MemoryProfiler()
    trainer_for(tmp_path, profiler, logger=recording(tmp_path, recorder)).fit(Net(), data())
    found = csv_rows(tmp_path)
    assert [row["step"] for row in found] == ["0", "1", "2", "3", "4", "5"]
    assert [row["step_ms"] for row in found[:-1]] == ["2000.0"] * 5
    assert float(found[-1]["step_ms"]) < 1000  # the device never told: the wall's
    assert [metrics["throughput/step_ms"] for _, metrics in recorder.ours[1:]] == [2000.0] * 5
    assert profiler.summary.step_seconds == 2.0


# ------------------------------------------------------------------------------------------------------------- files


def test_the_summary_is_kept_beside_the_csv_under_its_number(tmp_path, device_memory):
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler).fit(Net(), data())
    first = profiler.summary
    trainer_for(tmp_path, profiler).fit(Net(), data(samples=8))
    assert Summary.from_json(the_file(tmp_path, "memory_summary.json")) == first
    assert Summary.from_json((tmp_path / "memory_summary_1.json").read_text()) == profiler.summary
    with pytest.raises(ValueError, match="must be the JSON of a Summary"):
        Summary.from_json(json.dumps({"device": "host"}))


def test_no_file_when_none_is_wanted(tmp_path, device_memory):
    trainer_for(tmp_path, MemoryProfiler(csv=False), Planned(a_plan())).fit(Net(), data())
    assert not list(tmp_path.iterdir())


def test_a_step_costs_no_memory_that_stays(tmp_path, device_memory):
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    composition = Composition(device_memory, torch.device("cpu"), Net(), [])
    report = StepReporter(trainer, device_memory, None, None, stage="train", composition=composition)

    def run(steps):
        for number in range(steps):
            if number >= report.alerts.next_floor:
                report.floor(number)
            peaks = StepPeaks({"forward": number % 7 * MIB, "backward": number})
            report.add(StepRecord(number, 8, peaks, 0.1, 0.01), None, None)
            if number % 50 == 0:
                report.log("train", number)

    run(8000)
    tracemalloc.start()
    run(100)
    before, _ = tracemalloc.get_traced_memory()
    run(16_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 2**20  # 16,000 steps of 100 bytes would be more


def test_an_exception_keeps_what_was_not_logged_yet(tmp_path, device_memory):
    def work(step, where):
        if step == 3:
            raise KeyError("the user's own error")

    recorder = Recorder()
    with pytest.raises(KeyError, match="own error"):
        trainer_for(tmp_path, MemoryProfiler(), logger=recording(tmp_path, recorder), log_every_n_steps=50).fit(
            Net(work), data()
        )
    ((_, metrics),) = recorder.ours
    assert metrics["batch/size"] == 4
    assert Summary.from_json(the_file(tmp_path, "memory_summary.json")).steps == 3


def test_a_directory_that_cannot_be_written_is_an_error_at_setup(tmp_path, device_memory):
    (tmp_path / "root").write_text("a file")
    seen = []

    class Watch(Callback):
        def on_fit_start(self, *_):
            seen.append("fit")

    with pytest.raises(OSError, match="root"):
        trainer_for(tmp_path / "root", MemoryProfiler(), Watch()).fit(Net(), data())
    assert not seen


# ------------------------------------------------------------------------------------------------------ progress bar


@pytest.mark.parametrize("wanted", [True, False])
def test_peak_and_limit_in_the_progress_bar_when_asked(tmp_path, device_memory, wanted):
    shown = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            shown.append(dict(trainer.progress_bar_metrics))

    recorder = Recorder()
    device_memory.budget, device_memory.current_bytes = 64 * 2**30, 2**30
    device_memory.free = lambda: setattr(device_memory, "_current_bytes", 2**30)
    trainer_for(
        tmp_path,
        MemoryProfiler(progress_bar=wanted),
        Look(),
        logger=recording(tmp_path, recorder),
        log_every_n_steps=3,
        max_epochs=2,
    ).fit(Net(spike(device_memory, 2, "forward", 9 * 1024)), data())
    asked = [{name: metrics[name] for name in ("peak_gib", "limit_gib") if name in metrics} for metrics in shown]
    if not wanted:
        assert not any(asked)
        return
    assert asked[1:4] == [{"peak_gib": 1.0, "limit_gib": 64.0}] * 2 + [{"peak_gib": 10.0, "limit_gib": 64.0}]
    assert all("peak_gib" not in metrics for _, metrics in recorder.ours)


# ------------------------------------------------------------------------------------------------------ no other trace


def test_a_training_with_everything_on_is_bit_identical(tmp_path):
    class Dropout(Validated):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.mse_loss(self.layer(nn.functional.dropout(x, 0.3)), y) + 0 * torch.rand(())

    def run(*callbacks):
        torch.manual_seed(7)
        net = Dropout()
        trainer = trainer_for(tmp_path, *callbacks, max_epochs=3)
        loader = DataLoader(TensorDataset(*data(samples=400).dataset.tensors), batch_size=4, shuffle=True)
        trainer.fit(net, loader, data(samples=4))
        return [*net.state_dict().values(), torch.get_rng_state()]

    profiler = MemoryProfiler(items_fn=lambda batch: len(batch[0]), progress_bar=True)
    for without, with_profiler in zip(run(), run(profiler, Planned(a_plan(fixed_mib=4000))), strict=True):
        assert torch.equal(without, with_profiler)


# ---------------------------------------------------------------------------------------------------- as people use it


def test_an_evaluation_by_itself_does_not_wait_for_the_profiler(tmp_path, device_memory, monkeypatch):
    monkeypatch.setattr(device_memory, "release_cached", lambda: time.sleep(0.5))
    trainer_for(tmp_path, MemoryProfiler()).test(Evaluated(device_memory), data(), verbose=False)
    assert all(float(row["step_ms"]) < 400 for row in csv_rows(tmp_path))


def test_what_surrounds_an_evaluation_is_no_wait_of_training(tmp_path, device_memory):
    class Slow(Callback):
        def on_validation_end(self, *_):
            time.sleep(0.5)

    trainer_for(tmp_path, MemoryProfiler(), Slow(), val_check_interval=2).fit(Validated(), data(), data(samples=4))
    assert all(float(row["step_ms"]) < 400 for row in csv_rows(tmp_path))


def test_each_trainer_goes_on_in_its_own_file(tmp_path, device_memory):
    one, other = (trainer_for(tmp_path, MemoryProfiler()) for _ in range(2))
    net = Evaluated(device_memory)
    one.fit(net, data())
    other.fit(Evaluated(device_memory), data(samples=8))
    one.test(net, data(samples=4), verbose=False)
    stages = [[row["stage"] for row in rows(path)] for path in sorted(tmp_path.glob("memory_per_batch*.csv"))]
    assert stages == [["train"] * 6 + ["test"], ["train"] * 2]


class Spawned(LightningDataModule):
    """Its workers are spawned, and take the data module, and so the Trainer, with them."""

    def collate(self, samples):
        return torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])

    def train_dataloader(self):
        return DataLoader(
            data().dataset, batch_size=4, num_workers=1, multiprocessing_context="spawn", collate_fn=self.collate
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`")
def test_workers_that_are_spawned_take_the_trainer_with_them(tmp_path):
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler, max_epochs=2).fit(Net(), datamodule=Spawned())  # those of epoch 0 start before
    assert profiler.summary.steps == 12


def test_a_directory_is_found_for_a_logger_that_has_none(tmp_path, device_memory):
    trainer_for(tmp_path, MemoryProfiler(), logger=Recorder()).fit(Net(), data())
    assert len(csv_rows(tmp_path)) == 6


def test_the_table_is_printed_once_the_progress_bar_has_stopped(tmp_path, device_memory, monkeypatch):
    order = []

    class Bar(RichProgressBar):
        def _stop_progress(self):
            order.append("bar")
            super()._stop_progress()

    monkeypatch.setattr(lightning_batchmem.memory_profiler, "show_summary", lambda *_: order.append("table"))
    trainer_for(tmp_path, MemoryProfiler(), Bar(), enable_progress_bar=True).fit(Net(), data())
    assert order[:2] == ["bar", "table"]


def test_who_interrupts_a_run_is_told_what_it_used(tmp_path, device_memory, capsys):
    def work(step, where):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        trainer_for(tmp_path, MemoryProfiler()).fit(Net(work), data())
    assert "3 steps of" in capsys.readouterr().out


def test_a_trainer_that_logs_nothing_is_warned_all_the_same(tmp_path, device_memory):
    recorder = Recorder()
    with pytest.warns(UserWarning, match=r"1,000\.0 MiB"):
        trainer_for(tmp_path, MemoryProfiler(), logger=recorder, log_every_n_steps=0).fit(
            Net(spike(device_memory, 2, "backward", 999)), data()
        )
    assert not recorder.ours


def test_a_leak_in_a_run_that_goes_on_is_told_by_the_steps_of_the_csv(tmp_path, device_memory):
    class Leak(Callback):
        leaks = False

        def on_train_batch_end(self, *_):
            device_memory.use(MIB * self.leaks)

    leak, profiler = Leak(), MemoryProfiler()
    trainer, net = trainer_for(tmp_path, profiler, leak), Net()
    trainer.fit(net, data(samples=400))
    leak.leaks, trainer.fit_loop.max_epochs = True, 2
    with pytest.warns(UserWarning, match=r"step 1\d\d"):
        trainer.fit(net, data(samples=400))


def test_the_figures_of_a_training_reach_tensorboard_and_those_of_a_test_do_not(tmp_path, device_memory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    trainer = trainer_for(tmp_path, MemoryProfiler(), Planned(a_plan()), logger=logger)
    net = Evaluated(device_memory)
    trainer.fit(net, data())
    trainer.test(net, data(), verbose=False)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    names = {"memory_over_steps", "memory_composition", "memory_vs_batch_size"}
    assert set(events.Tags()["images"]) == {f"batchmem/{name}" for name in names}
    for name in names:
        assert [image.step for image in events.Images(f"batchmem/{name}")] == [5]


def test_a_figure_that_cannot_be_drawn_does_not_end_training(tmp_path, device_memory, monkeypatch):
    def broken(*_):
        raise RuntimeError("no font")

    monkeypatch.setattr(lightning_batchmem.report.images, "draw", broken)
    profiler = MemoryProfiler()
    with pytest.warns(UserWarning, match="could not log figures to TensorBoardLogger: RuntimeError: no font"):
        trainer_for(tmp_path, profiler, logger=TensorBoardLogger(tmp_path)).fit(Net(), data())
    assert profiler.summary is not None


def test_without_matplotlib_a_word_and_no_figures(tmp_path, device_memory, monkeypatch):
    issued = []
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(lightning_batchmem.report.reporter, "rank_zero_info", issued.append)
    trainer_for(tmp_path, MemoryProfiler(), logger=TensorBoardLogger(tmp_path)).fit(Net(), data())
    assert len(issued) == 1
    assert "lightning-batchmem[plot]" in issued[0]
