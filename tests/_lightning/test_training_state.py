"""Sizes for the state of a training that needs most memory, which may come in a later epoch."""

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import BatchFinder, factory
from tests.helpers.lawful import MIB, SAMPLES, Lawful, Sizes, found_size, quiet_trainer
from tests.helpers.plans import search_notes

AVAILABLE = 500 * MIB
FIXED = 99 * MIB
FOUND = found_size(AVAILABLE, multiple_of=1)
# The Trainer runs all epochs, so that a size that does not hold is an error of the fake device.
EPOCHS = {"max_steps": -1, "max_epochs": 5, "limit_train_batches": 2}


class Frozen(Lawful):
    """A sample takes one MiB, and two more for each part of the backbone that is trained."""

    def __init__(self, device_memory, parts=1):
        super().__init__(device_memory, lambda count_bytes: count_bytes)
        self.backbone = nn.Sequential(*(nn.Linear(1, 1) for _ in range(parts)))
        self.needed = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        trained = sum(part.weight.requires_grad for part in self.backbone)
        self.needed.append(FIXED + len(x) * (1 + 2 * trained) * MIB)
        self.use(self.needed[-1])
        return self.layer(self.backbone(x)).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.layer.parameters())


class InSteps(BaseFinetuning):
    """Unfreezes one more part of the backbone in each epoch from the second one on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if 0 < epoch <= len(pl_module.backbone):
            self.unfreeze_and_add_param_group(pl_module.backbone[epoch - 1], optimizer)


class FreezesAgain(InSteps):
    """Trains the backbone in the third epoch only."""

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 2:
            self.make_trainable(pl_module.backbone)
        if epoch == 3:
            self.freeze(pl_module.backbone)


class All(InSteps):
    """Freezes everything, and unfreezes it in the first epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.children())

    def finetune_function(self, pl_module, epoch, optimizer):
        self.make_trainable(pl_module.children())


class NeedsMetrics(InSteps):
    """Reads what only the training knows, from an epoch on; unfreezes in the second epoch."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch >= self.first:
            self.loss = pl_module.trainer.callback_metrics["loss"]
            return
        super().finetune_function(pl_module, epoch, optimizer)


@pytest.mark.parametrize(
    ("callback", "parts", "name"),
    [
        (lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=2), 1, "BackboneFinetuning"),
        (InSteps, 1, "InSteps"),
        (InSteps, 3, "InSteps"),
        (FreezesAgain, 1, "FreezesAgain"),
    ],
)
def test_the_size_holds_when_layers_are_unfrozen(search, device, callback, parts, name):
    module = Frozen(device, parts)
    sizes = Sizes()
    plan = search(module, callback(), sizes, **EPOCHS)
    per_sample = 1 + 2 * parts
    assert 0.8 * FOUND / per_sample <= plan.batch_size <= FOUND / per_sample
    assert sizes.seen == {plan.batch_size}
    assert max(module.needed) == FIXED + plan.batch_size * per_sample * MIB
    assert plan.verified
    assert plan.chosen.state == f"with the layers that {name} unfreezes"
    assert f"(verified, with the layers that {name} unfreezes)" in " ".join(str(plan).split())


def test_a_callback_that_unfreezes_everything_in_the_first_epoch_needs_no_later_state(
    search, device
):
    plan = search(Frozen(device), All(), **EPOCHS)
    assert FOUND / 3 * 0.8 <= plan.batch_size <= FOUND / 3
    assert plan.chosen.state == ""


class Logs(Frozen):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize(("first", "bytes_of_a_sample"), [(1, 1), (3, 3)])
def test_a_callback_that_cannot_be_called_before_the_training_is_a_warning(
    search, device, first, bytes_of_a_sample
):
    sizes = Sizes()
    with pytest.warns(UserWarning, match=rf"as NeedsMetrics will do in epoch {first} \(KeyError"):
        plan = search(Logs(device), NeedsMetrics(first), sizes, **EPOCHS)
    assert 0.8 * FOUND / bytes_of_a_sample <= plan.batch_size <= FOUND / bytes_of_a_sample
    assert sizes.seen == {plan.batch_size}


def test_epochs_that_a_training_does_not_reach_do_not_count(search, device):
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=4)
    # At the largest size that the data allow, an epoch has one batch.
    plan = search(Frozen(device), callback, max_steps=4, limit_train_batches=2)
    assert plan.batch_size == FOUND
    assert search(Frozen(device), callback, max_steps=10, limit_train_batches=2).batch_size < FOUND


class ReadsInHook(Frozen):
    """Reads in the hook at the begin of an epoch what is frozen."""

    def on_train_epoch_start(self):
        self.is_frozen = not self.backbone[0].weight.requires_grad

    def training_step(self, batch, batch_idx):
        (x,) = batch
        self.use(FIXED + len(x) * (1 if self.is_frozen else 3) * MIB)
        return self.layer(self.backbone(x)).mean()


def test_hooks_of_the_module_come_after_the_callback(search, device):
    sizes = Sizes()
    plan = search(ReadsInHook(device), InSteps(), sizes, **EPOCHS)
    assert 0.8 * FOUND / 3 <= plan.batch_size <= FOUND / 3
    assert sizes.seen == {plan.batch_size}


class LogsToo(InSteps):
    def finetune_function(self, pl_module, epoch, optimizer):
        super().finetune_function(pl_module, epoch, optimizer)
        pl_module.log("epoch_of_callback", float(epoch))


def test_a_callback_may_log(search, device):
    plan = search(Logs(device), LogsToo(), **EPOCHS)
    assert plan.chosen.state


# --- states that the user makes


class Images(Lawful):
    """Images that grow from epoch to epoch; a sample takes a MiB for each pixel."""

    def __init__(self, device_memory, pixels=(1, 2, 4)):
        super().__init__(device_memory, lambda count_bytes: count_bytes)
        self.pixels = pixels
        self.resolution = pixels[0]
        self.seen = set()
        self.needed = []

    def on_train_epoch_start(self):
        self.resolution = self.pixels[min(self.current_epoch, len(self.pixels) - 1)]

    def train_dataloader(self):
        self.images = TensorDataset(torch.zeros(SAMPLES, self.resolution))
        return DataLoader(self.images, batch_size=self.batch_size)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        self.seen.add(x.shape[1])
        self.needed.append(FIXED + x.numel() * MIB)
        self.use(self.needed[-1])
        return self.layer(x[:, :1]).mean()


def last_resolution(trainer, module):
    module.resolution = module.pixels[-1]


def test_samples_and_sizes_are_those_of_the_later_state(search, device):
    module = Images(device)
    sizes = Sizes()
    plan = search(
        module,
        sizes,
        options={"later": last_resolution},
        reload_dataloaders_every_n_epochs=1,
        **EPOCHS,
    )
    assert 0.8 * FOUND / 4 <= plan.batch_size <= FOUND / 4
    assert sizes.seen == {plan.batch_size}
    assert max(module.needed) == FIXED + plan.batch_size * 4 * MIB
    assert plan.chosen.state == "in the state that later= makes"
    # The training begins as without a search.
    assert module.seen == {1, 2, 4}
    assert next(iter(module.needed)) == FIXED + plan.batch_size * MIB


def test_a_state_at_the_start_that_needs_more_limits_the_size(search, device):
    module = Images(device, pixels=(4, 2, 1))
    sizes = Sizes()
    plan = search(module, sizes, options={"later": last_resolution}, **EPOCHS)
    assert 0.8 * FOUND / 4 <= plan.batch_size <= FOUND / 4
    assert sizes.seen == {plan.batch_size}
    assert plan.verified
    note = (
        "The state in which the training starts limits the size, perhaps because it fragments"
        f" memory: in the state that later= makes alone, {FOUND} samples fit."
    )
    assert note in search_notes(plan)
    assert not any("earlier plan" in note or "pass later=" in note for note in search_notes(plan))


# More than the steps of a rehearsal.
BANK_STEPS = 30


class InPieces(Images):
    """Images of four pixels need a fifth more in the memory that those of one pixel have left."""

    def __init__(self, device_memory):
        super().__init__(device_memory, pixels=(1, 4))
        releases = {}

        # A search does not restore what a function keeps.
        def share(pixels):
            releases[pixels] = device_memory.num_releases
            return 1.2 if pixels == 4 and releases.get(1) == releases[4] else 1.0

        self.share = share

    def training_step(self, batch, batch_idx):
        (x,) = batch
        self.needed.append(FIXED + int(self.share(x.shape[1]) * x.numel() * MIB))
        self.use(self.needed[-1])
        return self.layer(x[:, :1]).mean()


def test_the_size_holds_in_memory_that_the_first_state_has_left_in_pieces(search, device):
    module = InPieces(device)
    plan = search(
        module, options={"later": last_resolution}, reload_dataloaders_every_n_epochs=1, **EPOCHS
    )
    room = AVAILABLE * 95 // 100 - FIXED
    assert 0.8 * FOUND / 4.8 <= plan.batch_size <= room / MIB / 4.8
    assert max(module.needed) == FIXED + int(1.2 * plan.batch_size * 4 * MIB)
    assert plan.verified
    note = "The state in which the training starts limits the size"
    assert any(one.startswith(note) for one in search_notes(plan))


class Bank(Lawful):
    """Keeps a MiB for each sample of the last steps."""

    def __init__(self, device_memory):
        super().__init__(device_memory, lambda count_bytes: count_bytes)
        self.kept = []
        self.keep = lambda: device_memory.keep(sum(self.kept) * MIB)

    def on_fit_start(self):
        self.keep()

    def training_step(self, batch, batch_idx):
        (x,) = batch
        self.keep()
        self.use(FIXED + len(x) * MIB)
        self.kept = [*self.kept, len(x)][-BANK_STEPS:]
        self.keep()
        return self.layer(x).mean()


def fill(trainer, module):
    module.kept = [module.batch_size] * BANK_STEPS


def test_a_bank_that_is_full(search, device):
    sizes = Sizes()
    # What would grow in all of these steps needs more than there is.
    plan = search(Bank(device), sizes, options={"later": fill}, max_steps=60)
    assert plan.verified
    room = AVAILABLE * 95 // 100 - FIXED
    assert 0.8 * FOUND / (BANK_STEPS + 1) <= plan.batch_size <= room / MIB / (BANK_STEPS + 1)
    assert sizes.seen == {plan.batch_size}


def test_a_later_that_is_not_a_function_is_refused():
    with pytest.raises(ValueError, match="later must be a function of the trainer"):
        BatchFinder(later=10, objective="memory")
    with pytest.raises(ValueError, match=r"Did you mean last_resolution\?$"):
        BatchFinder(later=f"{__name__}:resolution", objective="memory")


@pytest.mark.parametrize("later", ["no_module", f"{__name__}:MIB"])
def test_an_error_about_later_names_it(later):
    with pytest.raises(ValueError, match=r"^later must "):
        BatchFinder(later=later, objective="memory")


def test_a_text_names_the_function():
    finder = BatchFinder(later=f"{__name__}:last_resolution", objective="memory")
    assert finder.later is last_resolution
    assert factory.parse_options(["later=a.b:c"]) == {"later": "a.b:c"}


def test_a_lambda_cannot_reach_new_processes():
    trainer = quiet_trainer(
        BatchFinder(later=lambda *_: None, objective="memory"),
        strategy="ddp_spawn",
        devices=2,
        max_steps=1,
    )
    with pytest.raises(Exception, match="pickle") as error:
        trainer.fit(BoringModel())
    assert "a lambda cannot reach them" in error.value.__notes__[0]


# --- frozen parameters that nothing is known about


class Adapted(Frozen):
    """A frozen backbone; the optimizer has all parameters, or those that are trained."""

    def __init__(self, device_memory, *, has_all):
        super().__init__(device_memory)
        self.has_all = has_all
        self.backbone.requires_grad_(False)

    def configure_optimizers(self):
        parameters = self.parameters()
        return torch.optim.Adam(p for p in parameters if p.requires_grad or self.has_all)


@pytest.mark.parametrize(
    ("has_all", "options", "is_noted"),
    [(True, {}, True), (False, {}, False), (True, {"later": lambda *_: None}, False)],
)
def test_frozen_parameters_of_an_optimizer_are_a_note(search, device, has_all, options, is_noted):
    plan = search(Adapted(device, has_all=has_all), options=options)
    assert plan.batch_size == FOUND
    note = "2 of 4 parameters are frozen. If they are unfrozen later, pass later=."
    assert (note in search_notes(plan)) == is_noted
