"""MemoryProfiler(flops=True) on CUDA."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_batchmem import MemoryProfiler
from tests.helpers.profiled import Recorder, trainer_for


class Net(LightningModule):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def training_step(self, batch, batch_idx):
        outputs = self.layers(batch)
        loss = (outputs[0] if isinstance(outputs, tuple) else outputs).square().mean()
        # In so few steps the host would run ahead of the device, and the rate is per wall time.
        loss.item()
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


def normalized():
    # FlopCounterMode would compute RMSNorm with other operators.
    return nn.Sequential(nn.Linear(64, 256), nn.RMSNorm(256), nn.Mish(), nn.Linear(256, 8))


def train(tmp_path, layers, profiler):
    torch.manual_seed(0)
    module = Net(layers())
    recorder = Recorder()
    trainer = trainer_for(
        tmp_path,
        profiler,
        accelerator="gpu",
        max_steps=20,
        max_epochs=-1,
        logger=recorder,
    )
    trainer.fit(module, DataLoader(torch.randn(512, 64), batch_size=32))
    return module, recorder


def test_the_count_is_exact_and_the_training_is_the_same(tmp_path):
    profiler = MemoryProfiler(flops=True, peak_flops=1e15)
    counted, recorder = train(tmp_path, normalized, profiler)
    plain, _ = train(tmp_path, normalized, MemoryProfiler())
    assert all(map(torch.equal, counted.parameters(), plain.parameters()))
    assert profiler.summary.flops.flops_per_sample == 2 * (2 * 64 * 256) + 3 * (2 * 256 * 8)
    assert profiler.summary.flops.why_not == ""
    metrics = recorder.ours[-1][1]
    assert 0 < metrics["speed/mfu_pct"] < 100
    assert recorder.ours[0][1].get("memory/num_alloc_retries", 0) == 0
    first = recorder.ours[0][1]
    assert first["memory/peak_allocated_mib"] <= first["memory/peak_reserved_mib"]
    used_mib = first["memory/used_pct"] / 100 * first["memory/limit_mib"]
    assert used_mib == pytest.approx(first["memory/peak_reserved_mib"])


@pytest.mark.real_device
def test_cudnn_has_no_formula_for_an_lstm(tmp_path):
    profiler = MemoryProfiler(flops=True, peak_flops=1e15)
    train(tmp_path, lambda: nn.LSTM(64, 32), profiler)
    reason = "No FLOPs: torch has no formula for the operator aten._cudnn_rnn."
    assert profiler.summary.flops.why_not == reason


# Lightning warns of a device that its table lacks.
@pytest.mark.filterwarnings("ignore:FLOPs not found for")
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_large_product_is_below_the_peak(tmp_path, precision):
    if precision == "bf16-mixed" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("the device has no native bfloat16")

    def large():
        return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))

    profiler = MemoryProfiler(flops=True)
    torch.manual_seed(0)
    trainer = trainer_for(
        tmp_path, profiler, accelerator="gpu", max_steps=30, max_epochs=-1, precision=precision
    )
    trainer.fit(Net(large()), DataLoader(torch.randn(4096, 4096), batch_size=2048))
    summary = profiler.summary
    assert summary.flops.tflops_per_device > 0
    if summary.flops.mfu_pct is None:
        pytest.skip(summary.flops.why_not)
    assert 0 < summary.flops.mfu_pct < 100
