"""A hook whose loaders get a batch size that is a constant in the user's code."""

import copy
import pickle

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from lightning_batchmem import BatchFinder
from lightning_batchmem._lightning.places import SizedHook
from tests.helpers.lawful import MIB, Lawful, Sizes, found_size, law, loader

FOUND = found_size(500 * MIB, multiple_of=1)
CONSTANT = 32


class Constant(Lawful):
    """The size is a number in the code of the hook."""

    def __init__(self, device_memory=None):
        super().__init__(device_memory, law)
        del self.batch_size

    def train_dataloader(self):
        return loader(CONSTANT)


class Saved(LightningModule):
    def train_dataloader(self):
        return loader(CONSTANT)


class Plain:
    """A hook without a Trainer, which can be pickled."""

    def train_dataloader(self):
        return [loader(CONSTANT), {"other": loader(CONSTANT)}]


def sized(owner, size=5):
    vars(owner)["train_dataloader"] = SizedHook(owner, "train_dataloader", size, None)
    return owner


def sizes_of(owner):
    first, others = owner.train_dataloader()
    return first.batch_size, others["other"].batch_size


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_the_owner_has_a_hook_of_its_own(copied):
    owner = sized(Plain())
    other = copied(owner)
    assert sizes_of(owner) == sizes_of(other) == (5, 5)
    assert other.train_dataloader.owner is other
    other.train_dataloader.batch_size = 7
    assert (sizes_of(owner), sizes_of(other)) == ((5, 5), (7, 7))


def test_a_hook_that_the_owner_has_as_an_attribute():
    owner = Plain()
    owner.train_dataloader = own = lambda: CombinedLoader([loader(CONSTANT)])
    vars(owner)["train_dataloader"] = SizedHook(owner, "train_dataloader", 5, own)
    assert owner.train_dataloader().flattened[0].batch_size == 5


def test_other_loaders_than_torchs_stay():
    owner = Plain()
    owner.train_dataloader = own = lambda: [[1, 2], loader(CONSTANT)]
    assert SizedHook(owner, "train_dataloader", 5, own)()[1].batch_size == 5


def test_lightning_sees_the_users_hook(search, device):
    module = Constant(device)
    plan = search(module)
    assert (plan.batch_size, plan.place) == (FOUND, "train_dataloader()")
    assert is_overridden("train_dataloader", module)
    assert module.train_dataloader().batch_size == FOUND
    text = " ".join(str(plan).split())
    assert "size set on the loader of train_dataloader; write it into your code to keep it" in text


def test_a_datamodule(search, device):
    class Data(LightningDataModule):
        def train_dataloader(self):
            return loader(CONSTANT)

    class WithoutLoader(Constant):
        train_dataloader = None

    data = Data()
    plan = search(WithoutLoader(device), datamodule=data)
    assert plan.place == "train_dataloader()"
    assert data.train_dataloader().batch_size == plan.batch_size


def test_a_second_fit_replaces_the_size(fit, device):
    module = Constant(device)
    found = []
    for budget_mib in (500, 300):
        device.budget = budget_mib * 2**20
        sizes = Sizes()
        finder = BatchFinder(multiple_of=1, objective="memory")
        fit(module, finder, device, sizes)
        assert finder.plan.place == "train_dataloader()"
        hook = vars(module)["train_dataloader"]
        assert hook.replaces is None
        assert sizes.seen == {hook.batch_size}
        found.append(hook.batch_size)
    assert found[0] > found[1] > CONSTANT


def test_the_learning_rate_is_scaled_from_the_constant(search, device):
    class Rated(Constant):
        lr = 0.1

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    module = Rated(device)
    plan = search(module, options={"lr_scaling": "linear", "max_batch_size": 2 * CONSTANT})
    assert plan.learning_rate == module.lr == pytest.approx(0.2)


@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
@pytest.mark.parametrize("is_found", [True, False])
def test_a_resumed_run_sets_the_hook_again(is_found, fit, device, tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=1)
    fit(
        Constant(device),
        BatchFinder(multiple_of=1, objective="memory"),
        device,
        saver,
        enable_checkpointing=True,
    )
    # The project may have an attribute by now.
    module = Constant(device) if is_found else Lawful(device, law)
    sizes = Sizes()
    finder = BatchFinder(objective="memory")
    resumed = {"max_steps": 5, "ckpt_path": tmp_path / "last.ckpt", "enable_checkpointing": True}
    fit(module, finder, device, sizes, saver, **resumed)
    assert finder.plan.batch_size == max(sizes.seen) > CONSTANT


def test_a_search_that_fails_leaves_no_hook(search, device):
    module = Constant(device)
    device.budget = 90 * 2**20
    with pytest.raises(RuntimeError, match="Nothing fits"):
        search(module)
    assert "train_dataloader" not in vars(module)
    assert module.train_dataloader().batch_size == CONSTANT


@pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
@pytest.mark.parametrize("first", [True, False])
def test_a_resumed_run_whose_loader_is_passed_now(first, fit, device, tmp_path):
    """The place of the checkpoint, a hook or an attribute, does not decide any more."""
    saver = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=1)
    module = Constant(device)
    if not first:
        module.bs = CONSTANT
        module.train_dataloader = lambda: loader(module.bs)
    fit(
        module,
        BatchFinder(multiple_of=1, objective="memory"),
        device,
        saver,
        enable_checkpointing=True,
    )
    module = Constant(device)
    module.bs = CONSTANT
    resumed = {"ckpt_path": tmp_path / "last.ckpt", "enable_checkpointing": True}
    for steps, data in ((5, {"train_dataloaders": loader(CONSTANT)}), (7, {})):
        sizes = Sizes()
        finder = BatchFinder(objective="memory")
        fit(module, finder, device, sizes, saver, max_steps=steps, **resumed, **data)
        assert finder.plan.batch_size == max(sizes.seen) > CONSTANT


def test_the_size_of_a_passed_loader_is_that_of_the_project(search, device):
    """The attribute may be one that nothing reads."""
    module = Lawful(device, law, batch_size=64)
    plan = search(module, options={"objective": "recipe"}, train_dataloaders=loader(CONSTANT))
    assert plan.project_batch_size == CONSTANT
    assert plan.batch_size == module.batch_size == CONSTANT


OF_ALL = loader(CONSTANT)


def test_a_search_that_fails_restores_a_global_loader(search, device):
    class OfGlobal(Constant):
        def train_dataloader(self):
            return OF_ALL

    device.budget = 90 * MIB
    with pytest.raises(RuntimeError, match="Nothing fits"):
        search(OfGlobal(device))
    assert OF_ALL.batch_size == CONSTANT
    device.budget = 500 * MIB
    assert search(OfGlobal(device)).batch_size == OF_ALL.batch_size == FOUND


def test_loaders_of_several_sizes_are_refused(search, device):
    class Several(Constant):
        def train_dataloader(self):
            return [loader(4), loader(8)]

    message = (
        r"loaders whose size is set after they were made must have one batch size, got 4, 8\. Make"
        r" the one to change in train_dataloader from an attribute, such as `self.batch_size`"
    )
    with pytest.raises(ValueError, match=message):
        search(Several(device))


@pytest.mark.parametrize("size", [1, 2])
def test_a_data_set_that_forms_the_batches_itself_is_refused(size, search, device):
    """Cellarium's loaders have batch size 1, and concatenate the batches of the data set."""

    class Formed(Constant):
        def train_dataloader(self):
            return DataLoader(torch.zeros(400, 6, 1), batch_size=size, collate_fn=join)

    if size == 1:
        with pytest.raises(
            ValueError, match="a batch of one sample has 6 rows: the data set forms"
        ):
            search(Formed(device))
    else:
        # Such a project batches the samples of its data set itself.
        assert search(Formed(device)).place == "train_dataloader()"


def join(samples):
    return [torch.cat(samples)]


def test_loaders_whose_batches_are_ready_are_refused(search, device):
    class Ready(Constant):
        def train_dataloader(self):
            return DataLoader(torch.zeros(10, 4, 1), batch_size=None)

    with pytest.raises(ValueError, match="must have a batch size that can be set, got batch_size="):
        search(Ready(device))


def test_a_whole_module_can_be_saved(tmp_path):
    """torch.save of a module pickles its attributes."""
    torch.save(sized(Saved(), 64), tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    assert loaded.train_dataloader().batch_size == 64
