"""Trainings whose state changes: the size that a search finds at the start holds until the end."""

from copy import deepcopy

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from lightning_batchmem import BatchFinder
from tests.helpers.lawful import quiet_trainer
from tests.helpers.plans import search_notes

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


class Images(Changing):
    """Convolutions over images that grow."""

    def __init__(self, *, is_late=False):
        super().__init__(is_late=is_late)
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, WIDTH),
        )

    def on_train_epoch_start(self):
        if not self.is_late:
            self.pixels = 16 * (1 + self.current_epoch)

    def make_late(self):
        self.pixels = 16 * EPOCHS

    def train_dataloader(self):
        pixels = getattr(self, "pixels", 16)
        images = torch.ones(1, 1, 1, 1).expand(100_000, 3, pixels, pixels)
        return DataLoader(TensorDataset(images), batch_size=self.batch_size)


class Encoder(Changing):
    """A transformer before the head."""

    def __init__(self, *, is_late=False):
        super().__init__(is_late=is_late)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.backbone = nn.Sequential(encoder)


class TwoOptimizers(Changing):
    """A second head with an optimizer of its own, of two groups."""

    def __init__(self, *, is_late=False):
        super().__init__(is_late=is_late)
        self.second = layers(2)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.second(self.head(self.backbone(batch[0]))).square().mean()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        first = [*self.backbone.parameters(), *self.head.parameters()]
        groups = [{"params": part.parameters()} for part in (self.second[0], self.second[2])]
        return (
            torch.optim.AdamW(one for one in first if one.requires_grad),
            torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        )


class Averaged(Changing):
    """An average of wide layers, which begins in the third epoch."""

    def __init__(self, *, is_late=False):
        self.average = None
        super().__init__()
        self.is_late = is_late
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 4096), nn.GELU(), nn.Linear(4096, WIDTH))
        if is_late:
            self.make_late()

    def on_train_epoch_start(self):
        if self.current_epoch == 2 and not self.is_late:
            self.make_late()

    def make_late(self):
        self.average = deepcopy(self.backbone).requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.AdamW([*self.backbone.parameters(), *self.head.parameters()])

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.average is not None:
            for mean, new in zip(
                self.average.parameters(), self.backbone.parameters(), strict=True
            ):
                mean.lerp_(new, 0.1)


class Replaying(Changing):
    """Trains on a batch of a buffer too, which has the last 20 of them."""

    def __init__(self, *, is_late=False):
        self.buffer = []
        super().__init__(is_late=is_late)

    def make_late(self):
        shape = (self.batch_size, 4, WIDTH)
        self.buffer = [torch.ones(shape, device=self.device) for _ in range(20)]

    def on_train_start(self):
        if self.is_late:
            self.make_late()

    def loss(self, x):
        self.buffer = [*self.buffer, x][-20:]
        return super().loss(torch.cat([x, self.buffer[0]]))


class Growing(Changing):
    """As many layers again from the third epoch on, which the optimizer gets then."""

    def __init__(self, *, is_late=False):
        super().__init__()
        self.is_late = is_late
        if is_late:
            self.backbone.extend(layers(LAYERS))

    def on_train_epoch_start(self):
        if self.current_epoch == 2 and not self.is_late:
            self.make_late()

    def make_late(self):
        new = layers(LAYERS).to(self.device)
        self.backbone.extend(new)
        # There is none yet when loaders are requested.
        for optimizer in self.trainer.optimizers:
            optimizer.add_param_group({"params": list(new.parameters())})


class Judged(Changing):
    """A loss of a frozen network, from the third epoch on."""

    def __init__(self, *, is_late=False):
        self.is_judged = False
        super().__init__(is_late=is_late)
        self.judge = layers(LAYERS).requires_grad_(False)

    def on_train_epoch_start(self):
        if not self.is_late:
            self.is_judged = self.current_epoch >= 2

    def make_late(self):
        self.is_judged = True

    def loss(self, x):
        y = self.head(self.backbone(x))
        loss = y.square().mean()
        if self.is_judged:
            loss = loss + (self.judge(y) - self.judge(x)).square().mean()
        return loss


class Checkpointed(Changing):
    """Activations are recomputed in the first two epochs."""

    def __init__(self, *, is_late=False):
        self.recomputes = True
        super().__init__(is_late=is_late)

    def on_train_epoch_start(self):
        if not self.is_late:
            self.recomputes = self.current_epoch < 2

    def make_late(self):
        self.recomputes = False

    def loss(self, x):
        if self.recomputes:
            return self.head(checkpoint(self.backbone, x, use_reentrant=False)).square().mean()
        return super().loss(x)


class FreezesAgain(BaseFinetuning):
    """Trains the backbone in the second and the third epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)
        if epoch == 3:
            self.freeze(pl_module.backbone)


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


def train(finder, module, tmp_path, *callbacks, **arguments):
    """Search and train; memory may not run out."""
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
    trainer.fit(module)
    assert trainer.current_epoch == EPOCHS


def searched(module, tmp_path, *callbacks, later=None, **arguments):
    """The plan of a search, whose size has held in the training."""
    finder = BatchFinder(min_steps_per_epoch=None, later=later, objective="memory")
    train(finder, module, tmp_path, *callbacks, **arguments)
    return finder.plan


def in_third_epoch():
    return BackboneFinetuning(unfreeze_backbone_at_epoch=2)


RELOADS = {"reload_dataloaders_every_n_epochs": 1}

TRAININGS = {
    "one_step": (Changing, lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1), {}),
    "three_steps": (Changing, InThreeSteps, {}),
    "hook": (Unfreezing, None, {}),
    "tokens": (Lengthening, None, RELOADS),
    "rollout": (RollingOut, None, {}),
    "discriminator": (Adversarial, None, {}),
    "bank": (Remembering, None, {}),
    "images": (Images, None, RELOADS),
    "transformer": (Encoder, in_third_epoch, {}),
    "two_optimizers": (TwoOptimizers, in_third_epoch, {}),
    "accumulation": (Changing, in_third_epoch, {"accumulate_grad_batches": 2}),
    "average": (Averaged, None, {}),
    "buffer": (Replaying, None, {}),
    "new_layers": (Growing, None, {}),
    "judge": (Judged, None, {}),
    "bf16": (Judged, None, {"precision": "bf16-mixed"}),
    "checkpointing": (Checkpointed, None, {}),
    "frozen_again": (Changing, FreezesAgain, {}),
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
    assert plan.chosen.state or any(note.startswith(limits) for note in search_notes(plan))
    at_end = searched(kind(is_late=True), tmp_path, **arguments)
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
    assert not any("frozen" in note for note in search_notes(plan))
    assert not any(parameter.requires_grad for parameter in module.backbone.parameters())
    trained = searched(Changing(), tmp_path)
    assert plan.batch_size > 1.5 * trained.batch_size


class Wide(Changing):
    """Gradients and states take as much as the activations."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 8192), nn.GELU(), nn.Linear(8192, WIDTH))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: GradientAccumulationScheduler({0: 1, 2: 3}),
        lambda: GradientAccumulationScheduler({0: 3, 2: 1}),
        lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=2),
    ],
    ids=["accumulates_later", "accumulates_first", "averages_later"],
)
def test_the_size_holds_with_a_callback_that_begins_later(make, tmp_path, limit_to):
    limit_to(LIMIT_BYTES)
    plan = searched(Wide(), tmp_path, make())
    assert plan.verified


class Kept(Metric):
    """Keeps everything until it is reset."""

    def __init__(self):
        super().__init__()
        self.add_state("kept", default=[], dist_reduce_fx="cat")

    def update(self, x):
        self.kept.append(x)

    def compute(self):
        return self.kept[-1].mean()


class Measured(Changing):
    """A metric that keeps the outputs of an epoch, or of the whole training."""

    def __init__(self, *, resets):
        super().__init__()
        self.resets = resets
        self.metric = Kept()

    def loss(self, x):
        y = self.head(self.backbone(x))
        self.metric.update(y.detach())
        return y.square().mean()

    def on_train_epoch_end(self):
        if self.resets:
            self.metric.reset()


@pytest.mark.slow
@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("max_batch_size", [512, None])
def test_a_metric_that_keeps_outputs_fits_where_the_plan_is_verified(
    resets, max_batch_size, tmp_path, limit_to
):
    limit_to(LIMIT_BYTES)
    finder = BatchFinder(
        min_steps_per_epoch=None, max_batch_size=max_batch_size, objective="memory"
    )
    try:
        train(finder, Measured(resets=resets), tmp_path)
    except torch.OutOfMemoryError:
        assert not finder.plan.verified
    notes = [note for note in search_notes(finder.plan) if note.startswith("Equal steps need")]
    # A rehearsal has whole epochs, whose end may free the outputs.
    assert len(notes) == (not resets)
    assert all("an epoch has 6." in note for note in notes)
    if max_batch_size is not None:
        assert finder.plan.verified
