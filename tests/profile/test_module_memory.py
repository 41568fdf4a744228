"""The memory of a step by module, from numbers that can be computed by hand."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_batchmem.profile.steady_steps
from lightning_batchmem import MemoryProfiler
from lightning_batchmem.profile.module_memory import ModuleStep, PeakByModule
from lightning_batchmem.profile.summary import Summary

HOST = torch.device("cpu")


class Twice(nn.Module):
    """One module runs twice in a step."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU())

    def forward(self, batch):
        return self.body(self.body(batch)).square().mean()


class Checkpointed(nn.Module):
    """Each block is computed again in backward."""

    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(blocks)
        )

    def forward(self, batch):
        for block in self.blocks:
            batch = checkpoint(block, batch, use_reentrant=False)
        return batch.square().mean()


class Tied(nn.Module):
    """The head has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, batch):
        return self.head(self.embedding(batch)).square().mean()


def measured(module, batch, peak_bytes=None):
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    step = ModuleStep(HOST)
    for number in range(2):
        optimizer.zero_grad()
        if number == 1:
            step.begin(module, [optimizer], [batch])
        module(batch).backward()
        optimizer.step()
    step.close()
    step.end(8, peak_bytes)
    return step.peak, {module.name: module for module in step.peak.modules}


def test_activations_belong_to_the_module_that_saves_them():
    peak, by_name = measured(Twice(), torch.ones(512, 64), peak_bytes=2**20)
    size = 512 * 64 * 4
    # The linear layer saves its input, which is the batch or what the activation function has made.
    assert by_name["body.0"].activations_bytes == size
    # The activation function saves its input twice, and the square saves its last output.
    assert by_name["body.1"].activations_bytes == 2 * size
    assert by_name[""].activations_bytes == size
    weights = (64 * 64 + 64) * 4
    layer = by_name["body.0"]
    assert layer.parameters_bytes == layer.gradients_bytes == layer.optimizer_state_bytes == weights
    assert sum(module.total_bytes for module in peak.modules) == 3 * weights + 4 * size


def test_a_checkpointed_block_keeps_only_its_input():
    _, by_name = measured(Checkpointed(blocks=3), torch.ones(2048, 64))
    assert by_name[""].activations_bytes > 0
    assert all(module.activations_bytes == 0 for name, module in by_name.items() if name)


class Reentrant(nn.Module):
    """Backward computes the block again."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 64), nn.GELU())

    def forward(self, batch):
        return checkpoint(self.block, batch, use_reentrant=True).square().mean()


def test_what_backward_computes_again_is_no_activation():
    _, by_name = measured(Reentrant(), torch.ones(512, 64, requires_grad=True))
    assert by_name["block.0"].activations_bytes == 0
    assert "block.1" not in by_name


def test_a_weight_of_two_modules_counts_once():
    _, by_name = measured(Tied(), torch.zeros(8, 4, dtype=torch.int64))
    assert by_name["embedding"].parameters_bytes == 50 * 32 * 4
    assert "head" not in by_name or by_name["head"].parameters_bytes == 0
    assert by_name["embedding"].gradients_bytes == 50 * 32 * 4


# Real trainings.


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
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


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
    text = next(tmp_path.rglob("memory_summary.json")).read_text()
    assert Summary.from_json(text) == profiler.summary
    without = MemoryProfiler()
    plain = train(tmp_path, Recorder(), without)
    assert plain.measured_steps == []
    assert without.summary.modules is None
    for weight, expected in zip(measured.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, expected)
    modules = profiler.summary.modules
    by_name = {module.name: module for module in modules.modules}
    assert list(by_name)[:3] == ["", "blocks.0.0", "blocks.0.1"]
    assert by_name["blocks.1.0"].parameters_bytes == (16 * 64 + 64) * 4
    assert modules.batch_size == 8
    output = capsys.readouterr().out
    assert "Memory by module at the peak" in output
    assert "blocks.*.0 (Linear)" in output
    assert "everything else" in output


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
    monkeypatch.setattr(lightning_batchmem.profile.steady_steps, "compiled_frames", lambda: 1)
    profiler = MemoryProfiler(modules=True)
    train(tmp_path, Blocks(), profiler)
    sentence = "No table of the modules: torch.compile has compiled something in this process."
    assert profiler.summary.modules == PeakByModule(why_not=sentence)
    assert sentence in capsys.readouterr().out


def test_an_error_in_the_measured_step_leaves_nothing_behind(tmp_path):
    module = Blocks()
    module.fails_in_step = 2
    with pytest.raises(KeyError):
        train(tmp_path, module, MemoryProfiler(modules=True))
    assert not are_saved_tensors_watched()


def test_hooks_of_the_training_stay_and_there_is_no_table():
    step = ModuleStep(HOST)
    module = Twice()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(1) or tensor, lambda tensor: tensor
    ):
        step.begin(module, [], [])
        module(torch.ones(4, 64)).backward()
        step.close()
    step.end(4, None)
    assert packed
    reason = "No table of the modules: the training has hooks on saved tensors itself."
    assert step.peak == PeakByModule(why_not=reason)


def test_a_saved_tensor_that_changed_in_place_is_an_error_as_without_the_measurement():
    step = ModuleStep(HOST)
    weight = nn.Parameter(torch.ones(2))
    step.begin(nn.Linear(2, 2), [], [])
    saved = weight * 2
    loss = saved.square().sum()
    saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    step.close()
