"""The search for the place of the batch size."""

import functools
import sys
from argparse import Namespace
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_batchmem._lightning import place_search
from lightning_batchmem._lightning.place_search import MOST_CANDIDATES
from lightning_batchmem.batches.loader_size import loader_batch_size
from tests.helpers.lawful import MIB, Lawful, found_size, law, loader
from tests.helpers.own_loaders import FixedLoader

FOUND = found_size(500 * MIB, multiple_of=1)
CONSTANT = 32


class Project(Lawful):
    """A project with some attributes; ``make`` makes its loaders from them."""

    def __init__(self, device_memory, make, **attributes):
        super().__init__(device_memory, law)
        del self.batch_size
        self.make = make
        self.requests = []
        vars(self).update(attributes)

    def train_dataloader(self):
        # The list itself is restored.
        REQUESTED.append({name: vars(self).get(name) for name in ("bs", "width", "samples")})
        return self.make(self)


REQUESTED = []


@pytest.fixture(autouse=True)
def nothing_was_requested():
    REQUESTED.clear()


def test_where_todays_name_is_followed_nothing_else_is_tried(search, device):
    module = Project(device, lambda self: loader(self.batch_size), batch_size=3, bs=3, width=3)
    plan = search(module)
    # The place is that of the options.
    assert (plan.batch_size, plan.place) == (FOUND, "")
    assert {request["bs"] for request in REQUESTED} == {3}
    assert "size set as batch_size" not in " ".join(str(plan).split())


def test_equal_numbers_are_tried_and_restored(search, device):
    module = Project(
        device, lambda self: loader(self.samples), width=CONSTANT, samples=CONSTANT, rank=CONSTANT
    )
    plan = search(module)
    assert (plan.batch_size, plan.place) == (FOUND, "samples")
    assert (module.width, module.samples, module.rank) == (CONSTANT, FOUND, CONSTANT)
    # The width was tried alone.
    assert {request["samples"] for request in REQUESTED if request["width"] != CONSTANT} == {
        CONSTANT
    }
    assert "size set as samples" in " ".join(str(plan).split())


def test_random_states_and_loaders_are_restored(search, device):
    kept = loader(CONSTANT)

    def make(self):
        self.requests.append(torch.rand(1).item())
        torch.rand(1)
        return kept if self.width == 1 else loader(self.bs)

    module = Project(device, make, bs=CONSTANT, width=CONSTANT)
    torch.manual_seed(5)
    expected = torch.rand(1).item()
    torch.manual_seed(5)
    search(module)
    # The request of Lightning itself is the only one that is left.
    assert module.requests == [expected]
    assert loader_batch_size(kept) == CONSTANT


def test_the_loader_most_loaders_follow(search, device):
    def make(self):
        return [loader(self.bs), loader(2 * self.bs), loader(self.width)]

    plan = search(Together(device, make, bs=CONSTANT, width=CONSTANT))
    assert plan.place == "bs"


class Together(Project):
    """Several loaders, of which the first one has the law."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)


class Interpolated(dict):
    """Texts in it refer to the attributes of another configuration, as in OmegaConf."""

    outer = None

    def __getitem__(self, name):
        value = super().__getitem__(name)
        return getattr(self.outer, value) if isinstance(value, str) else value


class WithoutLoader(Lawful):
    train_dataloader = None

    def __init__(self, device_memory):
        super().__init__(device_memory, law)
        del self.batch_size


def test_of_a_number_and_one_that_refers_to_it_the_outer_one_is_taken(search, device):
    config = SimpleNamespace(bs=CONSTANT, loader=Interpolated(bs="bs"))
    config.loader.outer = config
    plan = search(Project(device, lambda self: loader(self.config.loader["bs"]), config=config))
    assert plan.place == "config.bs"
    assert config.loader == {"bs": "bs"}


def test_of_two_numbers_that_decide_the_first_is_taken(search, device):
    def make(self):
        changed = [size for size in (self.bs, self.samples) if size != CONSTANT]
        return loader(changed[0] if changed else CONSTANT)

    module = Project(device, make, bs=CONSTANT, samples=CONSTANT)
    assert search(module).place == "bs"
    assert (module.bs, module.samples) == (FOUND, CONSTANT)


class Frozen(dict):
    def __setitem__(self, name, value):
        raise RuntimeError("Cannot change read-only config container")


def test_a_read_only_configuration_leaves_the_hook(search, device):
    config = Frozen(bs=CONSTANT)
    plan = search(Project(device, lambda self: loader(self.config["bs"]), config=config))
    assert (plan.batch_size, plan.place) == (FOUND, "train_dataloader()")
    assert config == {"bs": CONSTANT}


def test_an_error_of_the_hook_at_another_value_is_no_error(search, device):
    def make(self):
        # The width of a network is that of its rows.
        if self.width != CONSTANT:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        return loader(self.samples)

    plan = search(Project(device, make, width=CONSTANT, samples=CONSTANT))
    assert plan.place == "samples"


@pytest.mark.parametrize(
    "make",
    [
        # A size that is only lowered, a number of loaders, and a number that is not a multiple.
        lambda self: loader(min(CONSTANT, self.bs)),
        lambda self: loader(max(CONSTANT, self.bs)),
        lambda self: loader(CONSTANT + self.bs % 2),
    ],
)
def test_attributes_that_do_not_decide_alone(make, search, device):
    plan = search(Project(device, make, bs=CONSTANT))
    assert plan.place == "train_dataloader()"


def test_a_name_of_the_user_is_never_replaced(search, device):
    module = Project(device, lambda self: loader(self.bs), bs=CONSTANT, width=CONSTANT)
    message = (
        "train_dataloader must use `width`, got loaders of batch sizes 32 after it was set to .*"
        " Leave batch_arg_name out, so that BatchFinder looks for the place itself"
    )
    with pytest.raises(ValueError, match=message):
        search(module, options={"batch_arg_name": "width"})
    assert search(module, options={"batch_arg_name": "bs"}).batch_size == module.bs == FOUND


def test_a_refusal_says_what_was_tried(search, device):
    module = Project(
        device, lambda self: [loader(4), loader(8)], train_batch=4, width=8, num_workers=8
    )
    message = (
        r"must have one batch size, got 4, 8\. Make the one to change in .*\. The loaders"
        r" follow none of `train_batch`, `width`\."
    )
    with pytest.raises(ValueError, match=message):
        search(module)


class Rows(Dataset):
    """Has a number that equals the batch size, and is not part of what a search restores."""

    def __init__(self):
        self.window = CONSTANT

    def __len__(self):
        return 5000

    def __getitem__(self, index):
        return (torch.zeros(1),)


def test_numbers_of_objects_that_are_not_restored_are_never_set(search, device):
    rows = Rows()
    module = Project(device, lambda self: DataLoader(self.rows, batch_size=CONSTANT), rows=rows)
    assert search(module).place == "train_dataloader()"
    assert rows.window == CONSTANT


@pytest.mark.parametrize("value", [CONSTANT, 5, len])
def test_another_owner_may_use_the_name_for_something_else(value, search, device):
    class Data(LightningDataModule):
        def __init__(self):
            super().__init__()
            self.samples = CONSTANT

        def train_dataloader(self):
            return loader(self.samples)

    module = WithoutLoader(device)
    module.samples = value
    data = Data()
    assert search(module, datamodule=data).place == "samples"
    assert (module.samples, data.samples) == (value, FOUND)


def test_a_hook_that_leaves_the_script_at_another_value(search, device):
    def make(self):
        if self.width != CONSTANT:
            sys.exit("a width of 32 only")
        return loader(self.samples)

    plan = search(Project(device, make, width=CONSTANT, samples=CONSTANT))
    assert plan.place == "samples"


@pytest.mark.parametrize("name", ["batch_size", "bs"])
def test_a_loader_that_ignores_the_attribute_is_refused(name, search, device):
    def make(self):
        return FixedLoader(Rows(), batch_size=getattr(self, name))

    message = "the loader FixedLoader must make batches of its batch_size, .* has 4 samples after"
    with pytest.raises(ValueError, match=message):
        search(Project(device, make, **{name: 8}))


def test_small_constants_are_no_sizes_that_follow(search, device):
    for size in (1, 2, 3, 4, 6, 8):
        module = Project(device, lambda self, size=size: loader(size), batch_size=77)
        assert search(module).place == "train_dataloader()"
        assert module.batch_size == 77


# Attributes that may be the batch size of a project.


class Everything:
    """Ids of objects, all of which are restored."""

    def __contains__(self, key):
        return True


EVERYTHING = Everything()


def candidate_paths(roots, sizes, restored=EVERYTHING):
    return place_search.candidate_paths(roots, sizes, restored)


@dataclass
class Loading:
    micro_bs: int = 4


def test_names_of_a_batch_come_before_equal_numbers():
    root = SimpleNamespace(
        width=32, samples=32, val_batch=7, train_batch_size=32, opt=Namespace(bs=5), other=9
    )
    assert candidate_paths([root], [32]) == [
        "train_batch_size",
        "val_batch",
        "opt.bs",
        "width",
        "samples",
    ]


def test_objects_that_are_walked():
    class Slotted:
        __slots__ = ("batch", "unset")
        BATCH_OF_CLASS = 3

        def __init__(self):
            self.batch = 4

        @property
        def batch_of_property(self):
            raise AssertionError("a property may do work")

    root = SimpleNamespace(
        slotted=Slotted(),
        entries={"data": {"batch_size": 4, "not a name of an attribute": 4, 4: 4}},
        loading=Loading(),
        # These lead nowhere.
        deep={"a": {"b": {"batch_size": 4}}},
        listed=[SimpleNamespace(batch_size=4)],
        array=np.ones(4),
        tensor=torch.ones(4),
        function=functools.partial(int, 4),
    )
    root.itself = root
    assert set(candidate_paths([root], [4])) == {
        "slotted.batch",
        "slotted.BATCH_OF_CLASS",
        "entries.data.batch_size",
        "loading.micro_bs",
    }


@pytest.mark.parametrize(
    "name",
    ["rank", "batch_seed", "max_epochs", "fold", "num_workers", "n_jobs", "num_threads", "cpus"],
)
def test_numbers_that_are_never_set(name):
    assert candidate_paths([{name: 4}], [4]) == []


@pytest.mark.parametrize(
    ("name", "is_batch"),
    [
        ("bs", True),
        ("_bs", True),
        ("train_bs", True),
        ("mbs", True),
        ("bsz", True),
        ("bsize", True),
        ("BatchSize", True),
        ("n_obs", False),
        ("absolute", False),
        ("jobs_bs_x", False),
    ],
)
def test_names_of_a_batch(name, is_batch):
    # The value is no size of a loader, so only the name counts.
    assert candidate_paths([{name: 5}], [4]) == ([name] if is_batch else [])


@pytest.mark.parametrize("value", [True, 0, -4, 4.0, "4", None, torch.tensor(4)])
def test_values_that_are_no_sizes(value):
    assert candidate_paths([{"batch_size": value}], [4]) == []


def test_whole_numbers_of_numpy():
    assert candidate_paths([{"batch_size": np.int64(4)}], [4]) == ["batch_size"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = 4
        self.batch = 4


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"batch_size": 8, "width": 4})
        self.block = Block()
        self.layer = nn.Linear(4, 4)


def test_widths_of_layers_are_no_sizes():
    module = Net()
    assert candidate_paths([module, module.hparams], [4]) == ["block.batch", "batch_size", "width"]


def test_at_most_eight():
    root = {f"batch_{index}": index + 1 for index in range(20)}
    paths = candidate_paths([root], [15])
    assert len(paths) == MOST_CANDIDATES == 8
    assert paths[0] == "batch_14"


def test_words_of_a_vocabulary_hide_no_size():
    words = {f"word_{index}": index + 100 for index in range(1000)}
    late = {f"batch_{index}": index + 7000 for index in range(9)}
    assert candidate_paths([{**words, **late}, {"n": 4}], [4]) == ["n"]


def test_one_object_under_two_names():
    shared = Namespace(batch_size=4)
    assert candidate_paths([{"first": shared, "second": shared}], [4]) == ["first.batch_size"]


def test_an_attribute_that_raises():
    class Raises:
        def __init__(self):
            self.__dict__["batch_size"] = 4
            self.__dict__["width"] = 4

        def __getattribute__(self, name):
            if name == "batch_size":
                raise RuntimeError("of the user")
            return object.__getattribute__(self, name)

    assert candidate_paths([Raises()], [4]) == ["width"]


def test_objects_that_are_not_restored_are_left_alone():
    restored, other = SimpleNamespace(batch_size=4), SimpleNamespace(batch_size=4)
    root = {"restored": restored, "other": other}
    assert candidate_paths([root], [4], {id(restored)}) == ["restored.batch_size"]


class Closed(dict):
    def __iter__(self):
        raise RuntimeError("closed file")


class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("outside of context")


def test_objects_that_cannot_be_looked_at():
    root = {"closed": Closed(batch_size=4), "proxy": Proxy(), "batch_size": 4}
    assert candidate_paths([root], [4]) == ["batch_size"]
