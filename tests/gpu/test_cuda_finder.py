"""BatchFinder on a CUDA device: training completes, and nothing of the search is left."""

from itertools import pairwise

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import BatchFinder
from lightning_batchmem.devices.accelerator import AcceleratorMemory
from tests.helpers.lawful import quiet_trainer

STEPS = 30
SMALL_DEVICE_BYTES = 16 * 2**30

pytestmark = [
    # Python 3.12 and later warn where a process with threads is forked.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]


class ConvNet(LightningModule):
    """Convolutions of 32 channels on 128 x 128 pixels.

    A sample has some 40 MiB of activations, and the parameters are few.
    """

    def __init__(self, batch_size=2):
        super().__init__()
        self.batch_size = batch_size
        widths = (3, *[32] * 7)
        layers = [nn.Upsample(scale_factor=8)]
        for inputs, outputs in pairwise(widths):
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).mean((2, 3))

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        dataset = TensorDataset(torch.ones(20_000, 3, 16, 16))
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(64, 3, 16, 16)), batch_size=self.batch_size)


def train(module, folder, *callbacks, precision="32-true"):
    options = {"accelerator": "gpu", "devices": 1, "max_steps": STEPS, "precision": precision}
    trainer = quiet_trainer(*callbacks, default_root_dir=folder, **options)
    trainer.fit(module)
    return module


@pytest.mark.skipif(
    not hasattr(torch.cuda, "get_per_process_memory_fraction"),
    reason="this torch cannot report the memory fraction",
)
# The limit is no share of the device: a step that fills a large one takes half a second.
@pytest.mark.parametrize("limit_gib", [1.5, 3, 9])
def test_training_at_the_size_found_completes_within_the_limit(
    limit_gib, device, limit_to, tmp_path
):
    device_memory = AcceleratorMemory(device)
    limit_bytes = limit_gib * 2**30
    fraction = limit_bytes / torch.cuda.mem_get_info(device)[1]
    is_small = torch.cuda.get_device_properties(device).total_memory < SMALL_DEVICE_BYTES
    if limit_gib == (9 if is_small else 1.5):
        pytest.skip("small devices are slow, so that their limits are 1.5 and 3 GiB, not 3 and 9")
    if device_memory.available_bytes() < limit_bytes:
        pytest.skip("other processes use the device")
    limit_to(limit_bytes)
    finder = BatchFinder(min_steps_per_epoch=None, objective="memory")
    reset = LambdaCallback(on_train_start=lambda *_: device_memory.reset_peak())
    train(ConvNet(), tmp_path, reset, finder)
    assert finder.plan.limited_by == "memory"
    # The allocator counts more errors, since cuDNN catches some and takes another algorithm.
    assert sum(trial.outcome == "out_of_memory" for trial in finder.plan.trials) <= 2
    assert torch.cuda.get_per_process_memory_fraction(device) == pytest.approx(fraction, abs=1e-6)
    peak = device_memory.peak()
    assert peak.allocated_bytes <= peak.reserved_bytes <= limit_bytes


def test_training_after_a_search_is_that_of_the_hard_coded_size(device, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    finder = BatchFinder(max_batch_size=16, objective="memory")
    seed_everything(1, verbose=False)
    searched = train(ConvNet(), tmp_path, finder)
    random_state = torch.cuda.get_rng_state(device)
    seed_everything(1, verbose=False)
    hard_coded = train(ConvNet(16), tmp_path)
    assert finder.plan.batch_size == 16
    assert torch.equal(random_state, torch.cuda.get_rng_state(device))
    for name, tensor in hard_coded.state_dict().items():
        assert torch.equal(tensor, searched.state_dict()[name]), name


def test_a_search_in_double_precision(tmp_path):
    finder = BatchFinder(max_batch_size=4, objective="memory")
    train(ConvNet(), tmp_path, finder, precision="64-true")
    assert finder.plan.batch_size == 4
    assert finder.plan.verified


def test_a_search_with_an_optimizer_that_takes_dot_products(tmp_path):
    class WithLineSearch(ConvNet):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    finder = BatchFinder(max_batch_size=4, objective="memory")
    train(WithLineSearch(), tmp_path, finder)
    assert finder.plan.batch_size == 4
    assert finder.plan.verified


def test_a_search_with_attention_in_half_precision(tmp_path):
    class WithAttention(ConvNet):
        def forward(self, x):
            places = self.layers(x)[:, :, ::8, ::8].flatten(2).transpose(1, 2).contiguous()
            one_head = places.unsqueeze(1)
            return nn.functional.scaled_dot_product_attention(one_head, one_head, one_head)

    finder = BatchFinder(max_batch_size=4, objective="memory")
    train(WithAttention(), tmp_path, finder, precision="bf16-mixed")
    assert finder.plan.batch_size == 4
    assert finder.plan.verified
