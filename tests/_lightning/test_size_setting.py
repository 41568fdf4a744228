from contextlib import nullcontext
from operator import methodcaller

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from lightning_batchmem._lightning.data_source import train_source, validation_source
from lightning_batchmem._lightning.size_setting import batch_size_setting
from lightning_batchmem.batches.loader_size import (
    keep_sizes,
    loader_batch_size,
)
from lightning_batchmem.batches.probe_batches import ProbeBatches
from tests.helpers.lawful import loader, quiet_trainer

DATASET = TensorDataset(torch.arange(10))


class Nameless(LightningModule):
    """Has no attribute for the size."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.trained = []

    def training_step(self, batch, batch_idx):
        self.trained.append(batch)
        return self.layer.weight.sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0): ...

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Module(Nameless):
    batch_size = 32


class WithHooks(Module):
    """``train`` and ``val`` make loaders of a batch size."""

    def __init__(self, train, val=loader):
        super().__init__()
        self.train_loaders = train
        self.val_loaders = val

    def train_dataloader(self):
        return self.train_loaders(self.batch_size)

    def val_dataloader(self):
        return self.val_loaders(self.batch_size)


def in_fit(look, module, *, source=train_source, name="batch_size", **data):
    """Return the result of ``look`` at the start of a real fit, which then trains a batch."""
    seen = []

    def on_fit_start(trainer, pl_module):
        setting = batch_size_setting(trainer, pl_module, source(trainer), name, is_budget=False)
        seen.append(look(setting))

    trainer = quiet_trainer(
        LambdaCallback(on_fit_start=on_fit_start), max_steps=1, limit_val_batches=0
    )
    trainer.fit(module, **data)
    return seen[0]


def train_loaders(module, batch_size, **data):
    def look(setting):
        restore = keep_sizes(setting.source.passed_loaders())
        loaders = setting.loaders_for(batch_size)
        restore()
        return loaders

    return in_fit(look, module, **data)


def sizes_at(loaders, batch_size):
    return [info.size_at(batch_size) for info in loaders.sized]


# Tests of loaders that follow the size.


def several_loaders(size):
    return {"same": loader(size), "more": [loader(4 * size), loader(5)]}


@pytest.mark.parametrize(
    ("make", "asked", "at_three", "at_ten", "batches"),
    [(loader, [3], [3], [10], 500), (several_loaders, [3, 6], [3, 12, 5], [10, 40, 5], 1000)],
)
def test_loaders_that_follow_the_size(make, asked, at_three, at_ten, batches):
    sizes = []

    def make_and_record(size):
        sizes.append(size)
        return make(size)

    module = WithHooks(make_and_record)
    loaders = train_loaders(module, 3)
    # The last call is that of Lightning itself.
    assert sizes == [*asked, 3]
    assert module.batch_size == 3
    assert [loader_batch_size(info.loader) for info in loaders.sized] == at_three
    assert loaders.follows
    assert loaders.hook == "train_dataloader"
    assert sizes_at(loaders, 10) == at_ten
    assert loaders.batches(10) == batches


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda size: loader(32),
            r"train_dataloader must use `batch_size`, got loaders of batch sizes 32 after it was"
            r" set to 3\. Leave batch_arg_name out, so that BatchFinder looks for the place",
        ),
        (
            lambda size: [loader(4), loader(5)],
            r"must use `batch_size`, got loaders of batch sizes 4, 5 after",
        ),
        (
            lambda size: [loader(size + 1), loader(size)],
            r"fixed batch size, or `batch_size` times a number, got 4, 3 after .* and 7, 6 at 6",
        ),
        (
            lambda size: [loader(size)] * size,
            r"must give each loader a fixed .* got 3, 3, 3 after .* and 6, 6, 6, 6, 6, 6 at 6",
        ),
        (
            lambda size: [loader(size)] * max(1, 5 - size),
            r"must give each loader a fixed .* got 3, 3 after .* and 6 at 6",
        ),
        (
            lambda size: [loader(size), loader(None)],
            r"of train_dataloader must have a batch size .* got batch_size=None",
        ),
        (
            lambda size: DataLoader(DATASET, batch_sampler=[[0], [1, 2]]),
            r"must have .* got the batch sampler list",
        ),
    ],
)
def test_loaders_that_do_not_follow(make, message):
    with pytest.raises(ValueError, match=message):
        train_loaders(WithHooks(make), 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda size: [loader(size), loader(5), loader(4 * size)], None),
        (
            lambda size: loader(min(size, 16)),
            "got loaders of batch sizes 16 instead of 40 after it was set to 40",
        ),
        (
            lambda size: [loader(size), loader(min(2 * size, 16))],
            "batch sizes 40, 16 instead of 40, 80",
        ),
        (lambda size: [loader(size)] * (1 + size // 40), "batch sizes 40, 40 instead of 40"),
    ],
)
def test_loaders_are_compared_at_the_chosen_size(make, message):
    refused = pytest.raises(
        ValueError, match=f"train_dataloader must follow `batch_size` at every size, .*{message}"
    )
    with nullcontext() if message is None else refused:
        in_fit(lambda setting: setting.check_loaders(40, setting.loaders_for(3)), WithHooks(make))


@pytest.mark.parametrize(
    ("make", "at_nine"),
    [
        (lambda size: loader(size), [9]),
        (lambda size: loader(2 * size), [18]),
        (lambda size: [loader(size), loader(7)], [9, 7]),
        (lambda size: loader(5), None),
        # The fixed size is the one at which the loaders are requested.
        (lambda size: loader(3), None),
        (lambda size: [loader(5), loader(7)], None),
    ],
)
def test_validation_loaders_may_have_fixed_sizes(make, at_nine):
    loaders = in_fit(
        methodcaller("loaders_for", 3, may_be_fixed=True),
        WithHooks(loader, make),
        source=validation_source,
    )
    assert loaders.follows == (at_nine is not None)
    fixed_sizes = [loader_batch_size(info.loader) for info in loaders.sized]
    assert sizes_at(loaders, 9) == (at_nine or fixed_sizes)


# Tests of passed loaders.


def test_sizes_of_passed_loaders_are_set_and_restored():
    module = Nameless()
    loaders = train_loaders(module, 3, train_dataloaders=[loader(4), {"b": loader(4)}])
    assert loaders.follows
    assert sizes_at(loaders, 7) == [7, 7]
    assert [loader_batch_size(info.loader) for info in loaders.sized] == [4, 4]
    assert len(module.trained[0][0][0]) == len(module.trained[0][1]["b"][0]) == 4


def test_passed_loaders_of_different_sizes_are_refused_unchanged():
    passed = [loader(4), loader(8), loader(4)]
    message = (
        r"must have one batch size, got 4, 8\. Make the one to change in train_dataloader from"
    )
    with pytest.raises(ValueError, match=message):
        train_loaders(Module(), 3, train_dataloaders=passed)
    assert [loader_batch_size(loader) for loader in passed] == [4, 8, 4]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_other_attributes_of_a_passed_loader_are_unchanged():
    class Special(DataLoader):
        """A subclass with other arguments, which Lightning could not build anew."""

        def __init__(self, secret, **arguments):
            super().__init__(
                torch.zeros(10, 1), batch_size=4, drop_last=True, pin_memory=True, **arguments
            )
            self.secret = secret

    given = {"sampler": range(9, 2, -1), "generator": torch.Generator(), "collate_fn": torch.cat}
    passed = Special(7, **given)
    trained = Module()
    before = dict(vars(passed))
    random = given["generator"].get_state()

    def look(setting):
        restore = keep_sizes(setting.source.passed_loaders())
        loaders = setting.loaders_for(2)
        ProbeBatches(loaders)
        assert loaders.batches(2) == 3
        restore()
        assert vars(passed) == before
        assert torch.equal(given["generator"].get_state(), random)
        setting.write(3)

    in_fit(look, trained, train_dataloaders=passed)
    assert {name: getattr(passed, name) for name in given} == given
    assert (passed.secret, passed.drop_last, passed.pin_memory) == (7, True, True)
    assert (len(passed), len(trained.trained[0])) == (2, 3)


@pytest.mark.parametrize(
    ("given", "kind"), [([loader(1), range(3)], "range"), ([[torch.zeros(1)]], "Tensor")]
)
def test_other_loaders_than_torchs_are_refused(given, kind):
    message = (
        rf"loaders of train_dataloader must be torch DataLoaders .*, got {kind}\. .*"
        "use MemoryProfiler alone, and set the batch size by hand"
    )
    with pytest.raises(ValueError, match=message):
        train_loaders(Nameless(), 3, train_dataloaders=given)


# Tests of sizes in other places.


class InDict(LightningDataModule):
    """The size in a dict, as torch_geometric's LightningDataset has it."""

    def __init__(self):
        super().__init__()
        self.kwargs = {"batch_size": 32, "num_workers": 0}

    def train_dataloader(self):
        return DataLoader(DATASET, **self.kwargs)


class ReadOnly(dict[str, int]):
    """A configuration that refuses changes with an error of its library, as OmegaConf's does."""

    def __setitem__(self, name, value):
        raise RuntimeError("Cannot change read-only config container")


def test_a_read_only_configuration_is_named():
    data = InDict()
    data.kwargs = ReadOnly(data.kwargs)

    def look(setting):
        message = (
            r"`kwargs.batch_size` must be an attribute that can be set, got RuntimeError: Cannot"
            r" change read-only"
        )
        with pytest.raises(ValueError, match=message):
            setting.write(4)

    in_fit(look, Nameless(), name="kwargs.batch_size", datamodule=data)


def test_an_attribute_that_does_not_exist():
    message = (
        r"batch_arg_name must name an attribute of the module, the datamodule or their hparams, got"
        r" 'batch_size'\. Leave batch_arg_name out"
    )
    with pytest.raises(ValueError, match=message):
        train_loaders(Nameless(), 3, datamodule=InDict())


class ReadsBatches(Dataset):
    """Reads a list of indices at once."""

    def __init__(self, kind):
        self.values = torch.arange(60.0)
        self.kind = kind
        self.read = []

    def __len__(self):
        return 60

    def __getitem__(self, indices):
        self.read.append(len(indices))
        values = self.values[indices]
        kinds = {
            "dict": {"x": values, "y": values.numpy(), "name": "a"},
            "list": values.tolist(),
            "tensor": values,
        }
        return kinds[self.kind]


@pytest.mark.parametrize("kind", ["dict", "list", "tensor"])
@pytest.mark.parametrize("is_passed", [False, True])
def test_a_batch_sampler_as_sampler(kind, is_passed):
    dataset = ReadsBatches(kind)

    def make(size):
        sampler = BatchSampler(SequentialSampler(dataset), size, drop_last=True)
        return DataLoader(dataset, sampler=sampler, batch_size=None)

    def look(setting):
        loaders = setting.loaders_for(3)
        assert (loaders.batches(7), sizes_at(loaders, 7)) == (8, [7])
        batch, _ = ProbeBatches(loaders).batch(7)
        setting.write(4)
        return batch

    if is_passed:
        module = Module()
        batch = in_fit(look, module, train_dataloaders=make(5))
    else:
        module = WithHooks(make)
        batch = in_fit(look, module)
    assert type(batch) is type(module.trained[0])
    values = batch["x"] if kind == "dict" else batch
    assert len(values) == 7
    if kind == "dict":
        assert (batch["x"].shape, batch["y"].shape, batch["name"]) == ((7,), (7,), "a")
    # Nothing was read in this process before the training.
    assert set(dataset.read) == {4}
