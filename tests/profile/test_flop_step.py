"""MemoryProfiler(flops=True) in real trainings."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_batchmem.profile.flop_step
from lightning_batchmem import MemoryProfiler
from lightning_batchmem.devices.peaks import LiveStorages
from lightning_batchmem.profile.flop_step import FlopStep
from lightning_batchmem.profile.recorded_run import with_flops
from lightning_batchmem.profile.summary import Summary
from tests.helpers.profiled import Recorder, trainer_for

# Two layers, of which the first has no gradient of its inputs.
FLOPS_PER_SAMPLE = 2 * (2 * 16 * 64) + 3 * (2 * 64 * 4)


class Net(LightningModule):
    def __init__(self, layers=None):
        super().__init__()
        self.layers = layers or nn.Sequential(
            nn.Linear(16, 64), nn.Mish(), nn.Dropout(0.2), nn.Linear(64, 4)
        )
        self.losses = []
        self.counted_steps = []

    def training_step(self, batch, batch_idx):
        if not LiveStorages.is_possible():
            self.counted_steps.append(batch_idx)
        loss = self.layers(batch).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


class Manual(Net):
    """Two optimizer steps in each batch, and an optimizer that multiplies matrices."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self):
        return Multiplying(self.parameters(), 0.01)


class Multiplying(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        torch.mm(torch.ones(50, 50), torch.ones(50, 50))
        return loss


class Automatic(Net):
    def configure_optimizers(self):
        return Multiplying(self.parameters(), 0.01)


def train(tmp_path, profiler, module=None, batches=None, **options):
    torch.manual_seed(0)
    module = module or Net()
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.1)
    recorder = Recorder()
    options = {"max_steps": 6, "max_epochs": -1, "logger": recorder, **options}
    trainer = trainer_for(tmp_path, profiler, **options)
    loader = DataLoader(torch.randn(48, 16), batch_size=8)
    if batches is not None:
        loader = DataLoader(batches, batch_size=None)
    trainer.fit(module, loader)
    return module, recorder


def test_the_rate_is_logged_and_the_training_is_the_same(tmp_path, capsys):
    profiler = MemoryProfiler(flops=True, peak_flops=1e12)
    counted, recorder = train(tmp_path, profiler)
    # The breakdown is taken in step 1.
    assert counted.counted_steps == [2]
    plain, others = train(tmp_path, MemoryProfiler())
    assert plain.counted_steps == []
    assert counted.losses == plain.losses
    assert all(map(torch.equal, counted.parameters(), plain.parameters()))

    assert profiler.summary.flops_per_sample == FLOPS_PER_SAMPLE
    assert profiler.summary.no_flops_reason == ""
    rows = {step: metrics for step, metrics in recorder.ours if "throughput/mfu_pct" in metrics}
    # The time of the counted step is not that of the others.
    assert list(rows) == [3, 4, 5]
    assert "throughput/samples_per_s" not in recorder.ours[2][1]
    for metrics in rows.values():
        tflops = FLOPS_PER_SAMPLE * metrics["throughput/samples_per_s"] / 1e12
        assert metrics["throughput/tflops_per_device"] == pytest.approx(tflops)
        assert metrics["throughput/mfu_pct"] == pytest.approx(100 * tflops)
    assert not any("throughput/tflops_per_device" in metrics for _, metrics in others.ours)
    tflops = FLOPS_PER_SAMPLE * profiler.summary.samples_per_second / 1e12
    assert profiler.summary.tflops_per_device == pytest.approx(tflops)
    assert profiler.summary.mfu_pct == pytest.approx(100 * tflops)
    assert f"{FLOPS_PER_SAMPLE:,} FLOP per sample" in capsys.readouterr().out
    text = next(tmp_path.rglob("memory_summary.json")).read_text()
    assert Summary.from_json(text) == profiler.summary


def test_a_smaller_last_batch_counts_with_its_samples(tmp_path):
    batches = [torch.randn(size, 16) for size in (8, 8, 4, 8, 2)]
    profiler = MemoryProfiler(flops=True)
    module, _ = train(tmp_path, profiler, batches=batches, max_steps=5)
    assert module.counted_steps == [2]
    assert profiler.summary.flops_per_sample == FLOPS_PER_SAMPLE


def test_the_unknown_peak_of_a_cpu_leaves_out_the_mfu_only(tmp_path, capsys):
    profiler = MemoryProfiler(flops=True)
    _, recorder = train(tmp_path, profiler)
    assert profiler.summary.flops_per_sample == FLOPS_PER_SAMPLE
    assert profiler.summary.mfu_pct is None
    sentence = "No MFU: the peak of host with precision 32-true is unknown. Set peak_flops."
    assert profiler.summary.no_flops_reason == sentence
    assert sentence in capsys.readouterr().out
    assert "throughput/tflops_per_device" in recorder.ours[-1][1]
    assert "throughput/mfu_pct" not in recorder.ours[-1][1]


def test_the_rate_is_that_of_one_rank():
    flops = FlopStep(torch.device("cpu"), "32-true", 1e12)
    flops.flops_per_sample = 2e9
    summary = Summary("host", 5, None, 0, 8, {}, None, None, None, 600.0, 0.1, None)
    joined = with_flops(summary, flops, 300.0)
    assert joined.samples_per_second == 600.0
    assert joined.tflops_per_device == pytest.approx(0.6)
    assert joined.mfu_pct == pytest.approx(60.0)


def test_modules_and_flops_measure_different_steps(tmp_path):
    profiler = MemoryProfiler(flops=True, modules=True)
    module, _ = train(tmp_path, profiler)
    assert module.counted_steps == [3]
    assert profiler.summary.modules is not None
    assert profiler.summary.flops_per_sample == FLOPS_PER_SAMPLE


def test_one_batch_of_an_accumulated_step_counts(tmp_path):
    profiler = MemoryProfiler(flops=True, modules=True)
    module, _ = train(tmp_path, profiler, accumulate_grad_batches=2)
    # The breakdown is taken in batch 2, and the modules have batch 3.
    assert module.counted_steps == [4]
    assert profiler.summary.flops_per_sample == FLOPS_PER_SAMPLE


@pytest.mark.parametrize(("kind", "passes"), [(Automatic, 1), (Manual, 2)])
def test_the_work_of_an_optimizer_does_not_count(tmp_path, kind, passes):
    profiler = MemoryProfiler(flops=True)
    module, _ = train(tmp_path, profiler, kind(), max_steps=12)
    assert len(module.counted_steps) == passes
    assert profiler.summary.flops_per_sample == passes * FLOPS_PER_SAMPLE


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, batch):
        return self.lstm(batch.view(-1, 4, 4))[0]


def test_a_number_that_would_be_wrong_is_left_out(tmp_path, capsys):
    profiler = MemoryProfiler(flops=True, peak_flops=1e12)
    _, recorder = train(tmp_path, profiler, Net(Recurrent()))
    summary = profiler.summary
    assert summary.flops_per_sample is summary.tflops_per_device is summary.mfu_pct is None
    reason = "No FLOPs: torch has no formula for what layers.lstm (LSTM) computes."
    assert summary.no_flops_reason == reason
    assert summary.no_flops_reason in capsys.readouterr().out
    assert not any("throughput/tflops_per_device" in metrics for _, metrics in recorder.ours)


# The second one is compiled in the step that counts.
@pytest.mark.parametrize(("frames", "steps"), [((1, 1), []), ((0, 1), [2])])
def test_a_compiled_step_is_not_counted(tmp_path, monkeypatch, frames, steps):
    now = iter(frames)
    monkeypatch.setattr(lightning_batchmem.profile.flop_step, "compiled_frames", lambda: next(now))
    profiler = MemoryProfiler(flops=True)
    module, _ = train(tmp_path, profiler)
    assert module.counted_steps == steps
    assert profiler.summary.flops_per_sample is None
    reason = "No FLOPs: torch.compile compiled a part of the step."
    assert profiler.summary.no_flops_reason == reason


def test_without_the_number_of_samples_nothing_is_scaled(tmp_path):
    class Uneven(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

    batches = [(torch.randn(8, 16), torch.randn(3)) for _ in range(5)]
    profiler = MemoryProfiler(flops=True)
    with pytest.warns(UserWarning, match="cannot count the samples"):
        train(tmp_path, profiler, Uneven(), batches, max_steps=5)
    reason = "No FLOPs: the number of samples in the batch is unknown."
    assert profiler.summary.no_flops_reason == reason


def test_a_run_that_ends_early_has_a_reason(tmp_path):
    profiler = MemoryProfiler(flops=True)
    train(tmp_path, profiler, max_steps=2)
    reason = "No FLOPs: the run ended before the step that counts them."
    assert profiler.summary.no_flops_reason == reason


def test_an_error_in_the_counted_step_leaves_nothing_behind(tmp_path):
    class Failing(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise KeyError(batch_idx)
            return super().training_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(KeyError):
        train(tmp_path, MemoryProfiler(flops=True), module)
    assert LiveStorages.is_possible()


def test_an_evaluation_counts_nothing(tmp_path):
    class Evaluated(Net):
        def test_step(self, batch, batch_idx):
            self.training_step(batch, batch_idx)

    profiler = MemoryProfiler(flops=True)
    module = Evaluated()
    recorder = Recorder()
    batches = DataLoader(torch.randn(48, 16), batch_size=8)
    trainer_for(tmp_path, profiler, logger=recorder).test(module, batches)
    assert module.counted_steps == []
    assert profiler.summary.no_flops_reason == ""


@pytest.mark.parametrize("peak", [0, -1.0, float("nan"), float("inf"), "1e12", True])
def test_a_peak_must_be_a_number(peak):
    with pytest.raises(ValueError, match="peak_flops must be a number of FLOP/s above 0"):
        MemoryProfiler(flops=True, peak_flops=peak)


def test_a_peak_needs_flops():
    with pytest.raises(ValueError, match="peak_flops must come with flops=True"):
        MemoryProfiler(peak_flops=1e12)
