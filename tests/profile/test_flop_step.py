"""MemoryProfiler(flops=True) in real trainings, and what it counts."""

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import lightning_batchmem.profile.steady_steps
from lightning_batchmem import MemoryProfiler
from lightning_batchmem.devices.peaks import LiveStorages
from lightning_batchmem.profile.flop_step import (
    FlopCounter,
    FlopRate,
    FlopStep,
    formulas,
    peak_flops,
)
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
    """Two optimizer steps in each batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()


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

    assert profiler.summary.flops.flops_per_sample == FLOPS_PER_SAMPLE
    assert profiler.summary.flops.why_not == ""
    rows = {step: metrics for step, metrics in recorder.ours if "speed/mfu_pct" in metrics}
    # The time of the counted step is not that of the others.
    assert list(rows) == [3, 4, 5]
    assert "speed/samples_per_s" not in recorder.ours[2][1]
    for metrics in rows.values():
        tflops = FLOPS_PER_SAMPLE * metrics["speed/samples_per_s"] / 1e12
        assert metrics["speed/tflops_per_device"] == pytest.approx(tflops)
        assert metrics["speed/mfu_pct"] == pytest.approx(100 * tflops)
    assert not any("speed/tflops_per_device" in metrics for _, metrics in others.ours)
    tflops = FLOPS_PER_SAMPLE * profiler.summary.speed.samples_per_s / 1e12
    assert profiler.summary.flops.tflops_per_device == pytest.approx(tflops)
    assert profiler.summary.flops.mfu_pct == pytest.approx(100 * tflops)
    assert f"{FLOPS_PER_SAMPLE:,} FLOP per sample" in capsys.readouterr().out
    text = next(tmp_path.rglob("memory_summary.json")).read_text()
    assert Summary.from_json(text) == profiler.summary


def test_a_smaller_last_batch_counts_with_its_samples(tmp_path):
    batches = [torch.randn(size, 16) for size in (8, 8, 4, 8, 2)]
    profiler = MemoryProfiler(flops=True)
    module, _ = train(tmp_path, profiler, batches=batches, max_steps=5)
    assert module.counted_steps == [2]
    assert profiler.summary.flops.flops_per_sample == FLOPS_PER_SAMPLE


def test_the_unknown_peak_of_a_cpu_leaves_out_the_mfu_only(tmp_path, capsys):
    profiler = MemoryProfiler(flops=True)
    _, recorder = train(tmp_path, profiler)
    assert profiler.summary.flops.flops_per_sample == FLOPS_PER_SAMPLE
    assert profiler.summary.flops.mfu_pct is None
    sentence = "No MFU: the peak of CPU with precision 32-true is unknown. Set peak_flops."
    assert profiler.summary.flops.why_not == sentence
    assert sentence in capsys.readouterr().out
    assert "speed/tflops_per_device" in recorder.ours[-1][1]
    assert "speed/mfu_pct" not in recorder.ours[-1][1]


def test_a_rate_needs_the_operations_and_the_speed():
    flops = FlopStep(torch.device("cpu"), "32-true", 1e12)
    reason = flops.why_not
    assert flops.rate(300.0) == FlopRate(why_not=reason)
    flops.flops_per_sample = 2e9
    known = FlopRate(2e9, pytest.approx(0.6), pytest.approx(60.0), why_not=reason)
    assert flops.rate(300.0) == known
    assert flops.rate(None) == FlopRate(2e9, why_not=reason)


def test_modules_and_flops_measure_different_steps(tmp_path):
    profiler = MemoryProfiler(flops=True, modules=True)
    module, _ = train(tmp_path, profiler)
    assert module.counted_steps == [3]
    assert profiler.summary.modules.modules
    assert profiler.summary.flops.flops_per_sample == FLOPS_PER_SAMPLE


def test_one_batch_of_an_accumulated_step_counts(tmp_path):
    profiler = MemoryProfiler(flops=True, modules=True)
    module, _ = train(tmp_path, profiler, accumulate_grad_batches=2)
    # The breakdown is taken in batch 2, and the modules have batch 3.
    assert module.counted_steps == [4]
    assert profiler.summary.flops.flops_per_sample == FLOPS_PER_SAMPLE


def test_each_pass_of_a_manual_step_counts(tmp_path):
    profiler = MemoryProfiler(flops=True)
    module, _ = train(tmp_path, profiler, Manual(), max_steps=12)
    assert len(module.counted_steps) == 2
    assert profiler.summary.flops.flops_per_sample == 2 * FLOPS_PER_SAMPLE


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
    assert (
        summary.flops.flops_per_sample
        is summary.flops.tflops_per_device
        is summary.flops.mfu_pct
        is None
    )
    reason = "No FLOPs: torch has no formula for the operator aten.mkldnn_rnn_layer."
    assert summary.flops.why_not == reason
    assert summary.flops.why_not in capsys.readouterr().out
    assert not any("speed/tflops_per_device" in metrics for _, metrics in recorder.ours)


# The second one is compiled in the step that counts.
@pytest.mark.parametrize(("frames", "steps"), [((1, 1), []), ((0, 1), [2])])
def test_a_compiled_step_is_not_counted(tmp_path, monkeypatch, frames, steps):
    now = iter(frames)
    monkeypatch.setattr(
        lightning_batchmem.profile.steady_steps, "compiled_frames", lambda: next(now)
    )
    profiler = MemoryProfiler(flops=True)
    module, _ = train(tmp_path, profiler)
    assert module.counted_steps == steps
    assert profiler.summary.flops.flops_per_sample is None
    reason = "No FLOPs: torch.compile has compiled something in this process."
    assert profiler.summary.flops.why_not == reason


def test_without_the_number_of_samples_nothing_is_scaled(tmp_path):
    class Uneven(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

    batches = [(torch.randn(8, 16), torch.randn(3)) for _ in range(5)]
    profiler = MemoryProfiler(flops=True)
    with pytest.warns(UserWarning, match="cannot count the samples"):
        train(tmp_path, profiler, Uneven(), batches, max_steps=5)
    reason = "No FLOPs: the number of samples in the batch is unknown."
    assert profiler.summary.flops.why_not == reason


def test_a_run_that_ends_early_has_a_reason(tmp_path):
    profiler = MemoryProfiler(flops=True)
    train(tmp_path, profiler, max_steps=2)
    reason = "No FLOPs: the run ended before the step that counts them."
    assert profiler.summary.flops.why_not == reason


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
    assert profiler.summary.flops is None


@pytest.mark.parametrize("peak", [0, -1.0, float("nan"), float("inf"), "1e12", True])
def test_a_peak_must_be_a_number(peak):
    with pytest.raises(ValueError, match="peak_flops must be a number of FLOP/s above 0"):
        MemoryProfiler(flops=True, peak_flops=peak)


def test_a_peak_needs_flops():
    with pytest.raises(ValueError, match=r"peak_flops must be .* with flops=True, got"):
        MemoryProfiler(peak_flops=1e12)


# The counter by itself.


def gradients(network, inputs, mode):
    torch.manual_seed(1)
    network.zero_grad()
    with mode:
        outputs = network(inputs)
        (outputs[0] if isinstance(outputs, tuple) else outputs).square().mean().backward()
    return [weight.grad.clone() for weight in network.parameters()]


def count(network, inputs):
    counter = FlopCounter(formulas())
    gradients(network, inputs, counter)
    return counter


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, inputs):
        query, key, value = self.project(inputs).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(query, key, value)


NETWORKS = {
    "Mish": (lambda: nn.Sequential(nn.Linear(8, 64), nn.Mish(), nn.Linear(64, 4)), (6, 8)),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.3), nn.SiLU()), (6, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6)), (4, 8, 9, 9)),
    "attention": (Attention, (2, 3, 5, 8)),
    "LSTM": (lambda: nn.LSTM(8, 16, num_layers=2), (5, 2, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2), (5, 2, 8)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_counted_step_computes_the_same_bits(name):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    network = make()
    inputs = torch.randn(shape)
    plain = gradients(network, inputs, nullcontext())
    counter = FlopCounter(formulas())
    counted = gradients(network, inputs, counter)
    assert counter.flops > 0 or counter.why_wrong
    assert all(map(torch.equal, plain, counted))


def test_the_count_is_that_of_torch():
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 7 * 7, 5)
    )
    inputs = torch.randn(4, 3, 16, 16)
    expected = FlopCounterMode(display=False)
    gradients(network, inputs, expected)
    counter = count(network, inputs)
    assert (counter.flops, counter.why_wrong) == (expected.get_total_flops(), "")


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_convolution_counts_the_channels_of_its_groups(groups):
    counter = count(nn.Conv2d(8, 16, 3, padding=1, groups=groups), torch.randn(4, 8, 10, 10))
    assert counter.flops == 2 * (2 * 4 * (10 * 10) * 16 * (8 // groups) * 3 * 3)


def test_a_transposed_convolution_counts_the_positions_of_its_inputs():
    inputs = torch.randn(4, 8, 5, 5, requires_grad=True)
    counter = count(nn.ConvTranspose2d(8, 16, 4, stride=2), inputs)
    assert counter.flops == 3 * 2 * 4 * (5 * 5) * 8 * 16 * 4 * 4


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.reentrant = reentrant

    def forward(self, inputs):
        return checkpoint(lambda x: (x @ self.weight).tanh(), inputs, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_backward_computes_again_would_count_twice(reentrant):
    counter = count(Checkpointed(reentrant), torch.randn(3, 4, requires_grad=True))
    assert counter.why_wrong.startswith("backward computes activations again")


def test_operators_that_multiply_nothing_need_no_formula():
    network = nn.Sequential(nn.Embedding(10, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    assert count(network, torch.randint(0, 10, (4, 5))).why_wrong == ""


def test_an_operator_of_another_library_needs_a_formula():
    with torch.library._scoped_library("demo_flops", "FRAGMENT") as library:
        library.define("flash_attn_forward(Tensor a, Tensor b) -> Tensor")
        library.impl("flash_attn_forward", torch.matmul, "CompositeExplicitAutograd")
        counter = FlopCounter(formulas())
        with counter:
            torch.ops.demo_flops.flash_attn_forward(torch.ones(2, 2), torch.ones(2, 2))
        assert counter.why_wrong.endswith("the operator demo_flops.flash_attn_forward")


def test_a_formula_that_fails_does_not_end_the_step():
    def fail(*_, **__):
        raise AssertionError("an unexpected shape")

    counter = FlopCounter({torch.ops.aten.addmm: fail})
    gradients(nn.Linear(4, 4), torch.randn(3, 4), counter)
    assert "formula for the operator aten.addmm failed (an unexpected shape)" in counter.why_wrong


# The peak in Lightning's table.


@pytest.mark.parametrize(
    ("precision", "tflops"), [("bf16-mixed", 312), ("32-true", 19.5), ("16-true", 312)]
)
def test_the_peak_is_that_of_lightnings_table(monkeypatch, precision, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert peak_flops(torch.device("cuda", 0), precision) == tflops * 1e12


@pytest.mark.parametrize("precision", ["transformer-engine", "bf16-mixed"])
def test_a_device_or_precision_that_lightning_does_not_know_has_no_peak(precision):
    assert peak_flops(torch.device("cpu"), precision) is None
