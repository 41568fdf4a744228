"""Trainings whose state changes: the size that a search finds at the start holds until the end."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import BatchFinder
from tests.helpers.lawful import quiet_trainer

# The search leaves 5 % of it free.
LIMIT_BYTES = 336 * 2**20
WIDTH = 256
LAYERS = 6
EPOCHS = 4


def layers(count):
    """Layers with a nonlinearity that keeps its input for backward."""
    parts = [part for _ in range(count) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*parts)


class Changing(LightningModule):
    """A backbone, a head, and tokens whose number may change. ``is_late``: in the last state."""

    def __init__(self, *, is_late=False):
        super().__init__()
        self.batch_size = 4
        self.is_late = is_late
        self.backbone = layers(LAYERS)
        self.head = layers(2)
        self.tokens = 4
        if is_late:
            self.make_late()

    def make_late(self):
        """Make the last state of the training."""

    def loss(self, x):
        return self.head(self.backbone(x)).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(p for p in self.parameters() if p.requires_grad)

    def train_dataloader(self):
        dataset = TensorDataset(torch.ones(1, 1, WIDTH).expand(100_000, self.tokens, WIDTH))
        return DataLoader(dataset, batch_size=self.batch_size)


class Unfreezing(Changing):
    """A hook of the module unfreezes the backbone, whose parameters an optimizer has."""

    def __init__(self, *, is_late=False):
        super().__init__(is_late=is_late)
        self.backbone.requires_grad_(is_late)

    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            self.make_late()

    def make_late(self):
        self.backbone.requires_grad_(True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Lengthening(Changing):
    """More tokens in each epoch."""

    def on_train_epoch_start(self):
        if not self.is_late:
            self.tokens = min(4 * 2**self.current_epoch, 16)

    def make_late(self):
        self.tokens = 16


class RollingOut(Changing):
    """A longer rollout in each epoch."""

    def __init__(self, *, is_late=False):
        self.rollout = 1
        super().__init__(is_late=is_late)

    def on_train_epoch_start(self):
        if not self.is_late:
            self.rollout = 1 + self.current_epoch

    def make_late(self):
        self.rollout = EPOCHS

    def loss(self, x):
        for _ in range(self.rollout):
            x = self.backbone(x)
        return self.head(x).square().mean()


class Adversarial(Changing):
    """A discriminator that starts in the third epoch."""

    def __init__(self, *, is_late=False):
        self.has_discriminator = False
        super().__init__(is_late=is_late)
        self.discriminator = layers(2 * LAYERS)
        self.automatic_optimization = False

    def on_train_epoch_start(self):
        if not self.is_late:
            self.has_discriminator = self.current_epoch >= 2

    def make_late(self):
        self.has_discriminator = True

    def training_step(self, batch, batch_idx):
        of_generator, of_discriminator = self.optimizers()
        fake = self.backbone(batch[0])
        loss = self.head(fake).square().mean()
        if self.has_discriminator:
            loss = loss + self.discriminator(fake).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        if self.has_discriminator:
            of_discriminator.zero_grad()
            self.manual_backward(self.discriminator(fake.detach()).square().mean())
            of_discriminator.step()

    def configure_optimizers(self):
        generator = [*self.backbone.parameters(), *self.head.parameters()]
        return torch.optim.Adam(generator), torch.optim.Adam(self.discriminator.parameters())


class Remembering(Changing):
    """Keeps the outputs of the last 12 steps."""

    def __init__(self, *, is_late=False):
        self.bank = []
        super().__init__(is_late=is_late)

    def make_late(self):
        shape = (self.batch_size, 4, WIDTH)
        self.bank = [torch.ones(shape, device=self.device) for _ in range(12)]

    def on_train_start(self):
        if self.is_late:
            self.make_late()

    def loss(self, x):
        y = self.head(self.backbone(x))
        self.bank = [*self.bank, y.detach()][-12:]
        return y.square().mean()


class InThreeSteps(BaseFinetuning):
    """Unfreezes two layers of the backbone in each epoch from the second one on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if 1 <= epoch <= 3:
            parts = 2 * LAYERS // 3
            begin = parts * (3 - epoch)
            layers = pl_module.backbone[begin : begin + parts]
            layers.requires_grad_(True)
            optimizer.add_param_group({"params": list(layers.parameters())})


def late(trainer, module):
    module.make_late()


def searched(make, tmp_path, *callbacks, later=None, **arguments):
    """The plan of a search, and the training at its size, which may not run out of memory."""
    finder = BatchFinder(min_steps_per_epoch=None, later=later)
    trainer = quiet_trainer(
        finder,
        *callbacks,
        accelerator="gpu",
        devices=1,
        max_epochs=EPOCHS,
        limit_train_batches=6,
        default_root_dir=tmp_path,
        **arguments,
    )
    trainer.fit(make)
    assert trainer.current_epoch == EPOCHS
    return finder.plan


TRAININGS = {
    "one_step": (Changing, lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1), {}),
    "three_steps": (Changing, InThreeSteps, {}),
    "hook": (Unfreezing, None, {}),
    "tokens": (Lengthening, None, {"reload_dataloaders_every_n_epochs": 1}),
    "rollout": (RollingOut, None, {}),
    "discriminator": (Adversarial, None, {}),
    "bank": (Remembering, None, {}),
}


# BackboneFinetuning compares the values of parameters, which are all equal on the stub.
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("three_steps", "rollout") else pytest.mark.slow)
        for name in TRAININGS
    ],
)
def test_the_size_holds_and_is_that_of_the_last_state(name, tmp_path, limit_to):
    limit_to(LIMIT_BYTES)
    kind, callback, arguments = TRAININGS[name]
    callbacks = [callback()] if callback is not None else []
    later = None if callbacks else late
    plan = searched(kind(), tmp_path, *callbacks, later=later, **arguments)
    assert plan.verified
    # The first state may leave memory in pieces that the later one cannot use.
    limits = "The state in which the training starts limits the size"
    assert plan.chosen.state or any(note.startswith(limits) for note in plan.notes)
    at_end = searched(kind(is_late=True), tmp_path)
    assert plan.batch_size >= 0.8 * at_end.batch_size


class Adapted(Changing):
    """Low-rank adapters beside frozen layers, which stay frozen."""

    def __init__(self):
        super().__init__()
        self.backbone.requires_grad_(False)


def test_a_frozen_base_stays_frozen(tmp_path, limit_to):
    limit_to(LIMIT_BYTES)
    module = Adapted()
    plan = searched(module, tmp_path)
    assert not plan.chosen.state
    assert not any("frozen" in note for note in plan.notes)
    assert not any(parameter.requires_grad for parameter in module.backbone.parameters())
    trained = searched(Changing(), tmp_path)
    assert plan.batch_size > 1.5 * trained.batch_size
