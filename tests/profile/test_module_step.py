"""MemoryProfiler(modules=True) in real trainings."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

import lightning_batchmem.profile.module_step
from lightning_batchmem import MemoryProfiler
from lightning_batchmem.profile.summary import Summary


class Blocks(LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(3))
        )
        self.fails_in_step = None

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fails_in_step:
            raise KeyError(batch_idx)
        return self.blocks(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


class Recorder(Blocks):
    """Notes in which steps autograd calls hooks for what it saves."""

    def __init__(self):
        super().__init__()
        self.measured_steps = []

    def training_step(self, batch, batch_idx):
        if are_saved_tensors_watched():
            self.measured_steps.append(batch_idx)
        return super().training_step(batch, batch_idx)


def are_saved_tensors_watched():
    # This function of torch fails where hooks are active.
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("hooks are active"):
            return False
    except RuntimeError:
        return True


def train(tmp_path, module, profiler, **options):
    torch.manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.1)
    trainer = Trainer(
        default_root_dir=tmp_path,
        max_steps=4,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[profiler],
        **options,
    )
    trainer.fit(module, DataLoader(torch.randn(64, 16), batch_size=8))
    return module


def test_the_table_has_the_modules_and_the_training_is_the_same(tmp_path, capsys):
    profiler = MemoryProfiler(modules=True)
    measured = train(tmp_path, Recorder(), profiler)
    assert measured.measured_steps == [2]
    text = (tmp_path / "memory_summary.json").read_text()
    assert Summary.from_json(text) == profiler.summary
    without = MemoryProfiler()
    plain = train(tmp_path, Recorder(), without)
    assert plain.measured_steps == []
    assert (without.summary.modules, without.summary.no_modules_reason) == (None, "")
    for weight, expected in zip(measured.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, expected)
    modules = profiler.summary.modules
    by_name = {module.name: module for module in modules.modules}
    assert list(by_name)[:3] == ["", "blocks", "blocks.0"]
    assert by_name["blocks.1.0"].parameters_bytes == (16 * 64 + 64) * 4
    assert modules.batch_size == 8
    output = capsys.readouterr().out
    assert "Memory by module at the peak" in output
    assert "blocks.1.0 (Linear)" in output
    assert "everything else" in output
    peak = profiler.summary.modules
    assert sum(module.total_bytes for module in peak.modules) + peak.other_bytes == peak.peak_bytes


def test_one_batch_of_an_accumulated_step_is_measured(tmp_path):
    profiler = MemoryProfiler(modules=True)
    module = train(tmp_path, Recorder(), profiler, accumulate_grad_batches=3)
    # The optimizer steps in batch 2, and the breakdown is taken in batch 3.
    assert module.measured_steps == [4]


class EndsEpochEarly(Recorder):
    """Ends each epoch at batch 2, in which a measurement has begun."""

    def __init__(self):
        super().__init__()
        self.is_measured_after_epoch = []

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None

    def on_train_epoch_end(self):
        self.is_measured_after_epoch.append(are_saved_tensors_watched())


def test_a_step_that_is_skipped_is_not_measured_until_the_next_one(tmp_path):
    profiler = MemoryProfiler(modules=True)
    module = train(tmp_path, EndsEpochEarly(), profiler)
    assert module.is_measured_after_epoch == [False, False]
    assert profiler.summary.modules.batch_size == 8


def test_a_compiled_step_gets_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lightning_batchmem.profile.module_step, "compiled_frames", lambda: 1)
    profiler = MemoryProfiler(modules=True)
    train(tmp_path, Blocks(), profiler)
    assert profiler.summary.modules is None
    sentence = "No table of the modules: torch.compile compiled a part of the step."
    assert sentence in capsys.readouterr().out


def test_an_error_in_the_measured_step_leaves_nothing_behind(tmp_path):
    module = Blocks()
    module.fails_in_step = 2
    with pytest.raises(KeyError):
        train(tmp_path, module, MemoryProfiler(modules=True))
    assert not are_saved_tensors_watched()
