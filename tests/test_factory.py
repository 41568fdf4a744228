"""Callbacks from LIGHTNING_BATCHMEM, through the entry points of the installed distribution."""

import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import lightning.pytorch as lightning_pytorch
import pytest
import torch

from lightning_batchmem import BatchFinder, MemoryProfiler, Plan, batch_finder, factory
from tests.helpers.contract_cases import Case, Net, Noisy, Plain, shuffled
from tests.helpers.lawful import quiet_trainer
from tests.helpers.outcomes import assert_same, outcome_of

pl = pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
GROUPS = PROJECT["project"]["entry-points"]

WITHOUT = """
import sys
from importlib.metadata import EntryPoint
for value in sys.argv[1:]:
    assert EntryPoint("batchmem", value, "group").load()() == []
heavy = {"torch", "lightning", "pytorch_lightning", "rich", "numpy", "psutil"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_without_the_variable_nothing_is_imported(monkeypatch):
    monkeypatch.delenv(factory.VARIABLE, raising=False)
    assert sorted(GROUPS) == [
        "lightning.pytorch.callbacks_factory",
        "pytorch_lightning.callbacks_factory",
    ]
    values = [value for group in GROUPS.values() for value in group.values()]
    assert len(values) == 2
    subprocess.run([sys.executable, "-c", WITHOUT, *values], check=True, timeout=60)


def run(package, folder, *callbacks):
    """A training with the callbacks that the entry point of ``package`` returns.

    Its function is called directly, because the wheel may not be installed here.
    """
    name = "callbacks_of_pytorch_lightning" if package is pl else "callbacks"
    added = getattr(factory, name)()
    assert all(isinstance(callback, package.Callback) for callback in added)
    options = {"accelerator": "cpu", "default_root_dir": folder, "logger": False, "max_steps": 2}
    trainer = package.Trainer(
        callbacks=[*callbacks, *added],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )

    class Net(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.batch_size = 3

        def training_step(self, batch, batch_idx):
            return self.layer(batch).square().mean()

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.ones(100, 4), batch_size=self.batch_size)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    module = Net()
    trainer.fit(module)
    return trainer, module


def kinds(trainer):
    names = [type(callback).__name__ for callback in trainer.callbacks]
    return [name for name in names if name in ("BatchFinder", "MemoryProfiler")]


@pytest.mark.parametrize("package", [lightning_pytorch, pl], ids=["lightning", "pytorch_lightning"])
def test_find_with_options(package, tmp_path, monkeypatch):
    monkeypatch.setenv(
        factory.VARIABLE, "find:max_batch_size=16, memory_limit=4GiB,objective=throughput"
    )
    trainer, module = run(package, tmp_path)
    assert kinds(trainer) == ["BatchFinder", "MemoryProfiler"]
    assert all(isinstance(callback, package.Callback) for callback in trainer.callbacks)
    assert module.batch_size <= 16
    assert list(tmp_path.rglob("batch_plan.json"))
    saved = torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=True)["callbacks"]
    assert saved["BatchFinder"]["plan"]["batch_size"] == module.batch_size
    trainer.fit(module)
    # A second run does not add the callbacks again.
    assert kinds(trainer) == ["BatchFinder", "MemoryProfiler"]


def test_profile(tmp_path, monkeypatch):
    monkeypatch.setenv(factory.VARIABLE, "profile:csv=False")
    trainer, module = run(lightning_pytorch, tmp_path)
    assert (kinds(trainer), module.batch_size) == (["MemoryProfiler"], 3)
    assert not list(tmp_path.rglob("*.csv"))


def test_callbacks_of_the_script_stay(tmp_path, monkeypatch):
    monkeypatch.setenv(factory.VARIABLE, "find:max_batch_size=16")
    finder = BatchFinder(max_batch_size=8, objective="memory")
    trainer, module = run(lightning_pytorch, tmp_path, finder)
    assert kinds(trainer) == ["BatchFinder", "MemoryProfiler"]
    assert (finder in trainer.callbacks, module.batch_size) == (True, 8)
    monkeypatch.setenv(factory.VARIABLE, "profile")
    profiler = MemoryProfiler(csv=False)
    trainer, _ = run(lightning_pytorch, tmp_path, profiler)
    added = [callback for callback in trainer.callbacks if isinstance(callback, MemoryProfiler)]
    assert added == [profiler]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "find max_batch_size=8",
            'LIGHTNING_BATCHMEM must be one of "profile", "find", "apply", perhaps with options as'
            " in find:max_batch_size=64, got 'find max_batch_size=8'",
        ),
        (
            "find:max_size=3",
            "=find: BatchFinder has no argument max_size. Did you mean max_batch_size[?]",
        ),
        ("find:memory_limit", "BATCHMEM=find: options must be NAME=VALUE, got 'memory_limit'"),
        (
            "find:max_batch_size=0",
            "BATCHMEM=find: max_batch_size must be a whole number of at least 1, got 0",
        ),
        ("apply", "BATCHMEM=apply: apply=True must come with a plan"),
        ("find:verbose=maybe", "verbose must be True or False, got 'maybe'"),
        ("profile:csv=no", "csv must be True or False, got 'no'"),
        ("profile:memory_limit=3", "=profile: MemoryProfiler has no argument memory_limit. It has"),
    ],
)
def test_a_wrong_value(value, message, monkeypatch):
    monkeypatch.setenv(factory.VARIABLE, value)
    with pytest.raises(ValueError, match=message):
        factory.callbacks()


def test_text_that_python_cannot_read_as_a_literal_is_text():
    assert factory.parse_value("{[]: 1}") == "{[]: 1}"
    nested = 100_000 * "("
    assert factory.parse_value(nested) == nested
    assert factory.parse_value("-" * 100_000 + "1").startswith("--")


class TwoSizes(Plain):
    """No attribute has the sizes, and no search can set both of them."""

    def train_dataloader(self):
        return [shuffled(4), shuffled(8)]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)


class Ready(Plain):
    """Batches that the data set has made already."""

    def train_dataloader(self):
        data = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(
            [(x, torch.arange(4) % 3) for x in data], batch_size=None
        )


class Lazy(Net):
    """Its parameters are made by the first batch, which the search would have to run."""

    def __init__(self, batch_size):
        super().__init__(batch_size)
        self.layers[0] = torch.nn.LazyLinear(16)


class FailsAtLargeSizes(Net):
    """An error of the user that no batch of the project's own size reaches."""

    def training_step(self, batch, batch_idx):
        if len(batch[1]) > 4:
            raise IndexError("of the user")
        return super().training_step(batch, batch_idx)


class Changing(TwoSizes):
    """Changes what it can while the search requests its loaders."""

    def train_dataloader(self):
        self.history.append(torch.rand(1).item())
        return super().train_dataloader()


REFUSED = {
    "two sizes": (TwoSizes, "loaders whose size is set after they were made must have one batch"),
    "batches that are ready": (Ready, "loaders of train_dataloader must have a batch size that"),
    "parameters that are not there": (partial(Lazy, 4), "every parameter must be initialized"),
    "an error of the user": (partial(FailsAtLargeSizes, 4), "of the user"),
    "a hook that changes things": (Changing, "must have one batch size, got 4, 8"),
}


@pytest.mark.usefixtures("reads_here")
@pytest.mark.filterwarnings(
    "ignore:The total number of parameters detected may be inaccurate",
    "ignore:Trying to infer the `batch_size` from an ambiguous collection",
    "ignore:MemoryProfiler cannot count the samples",
)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_never_ends_a_training(kind, tmp_path, monkeypatch):
    make, message = REFUSED[kind]
    case = Case(lambda size: make())
    without = outcome_of(tmp_path / "without", case, 4, None)
    monkeypatch.setenv(factory.VARIABLE, "find:max_batch_size=16")
    (adder,) = factory.callbacks()
    text = f"BatchFinder leaves the batch size of the project as it is: .*{message}"
    with pytest.warns(UserWarning, match=text):
        refused = outcome_of(tmp_path / "with", case, 4, None, adder)
    # The other callback of the variable logs metrics of its own.
    for key in ("weights", "buffers", "attributes", "optimizers", "random", "gradients", "flags"):
        assert_same(refused[key], without[key], key)
    # In code it stays an error.
    with pytest.raises((ValueError, IndexError), match=message):
        outcome_of(tmp_path / "code", case, 4, BatchFinder(max_batch_size=16, objective="memory"))


@pytest.mark.usefixtures("reads_here")
def test_a_strategy_that_cannot_be_searched(tmp_path, monkeypatch):
    def refuse(trainer, *, restores):
        raise ValueError("strategy must be that of a single device")

    monkeypatch.setattr(batch_finder, "check_strategy", refuse)
    monkeypatch.setenv(factory.VARIABLE, "find")
    with pytest.warns(UserWarning, match=r"as it is: .*strategy must be that of a single device"):
        _, module = run(lightning_pytorch, tmp_path)
    assert module.batch_size == 3


@pytest.mark.usefixtures("reads_here")
@pytest.mark.parametrize("kind", ["check", "step"])
def test_a_refusal_never_ends_an_evaluation(kind, tmp_path, monkeypatch):
    class Evaluated(Net):
        def test_step(self, batch, batch_idx):
            if kind == "step" and len(batch[1]) > 4:
                raise IndexError("of the user")
            self.history.append(len(batch[1]))

        def test_dataloader(self):
            return torch.utils.data.DataLoader(Noisy(), batch_size=self.batch_size)

    def refuse(trainer, *, restores):
        raise ValueError("of the check")

    if kind == "check":
        monkeypatch.setattr(batch_finder, "check_strategy", refuse)
    monkeypatch.setenv(factory.VARIABLE, "find")
    module = Evaluated(4)
    trainer = quiet_trainer(*factory.callbacks(), default_root_dir=tmp_path)
    with pytest.warns(
        UserWarning, match=r"BatchFinder leaves the batch size .* of the (check|user)"
    ):
        trainer.test(module, verbose=False)
    assert set(module.history) == {4}


@pytest.mark.parametrize("value", ["find:plan=plan.json,then=exit", "apply:plan=plan.json"])
def test_two_runs_are_for_a_script_without_a_finder(value, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_BATCHMEM", value)
    callbacks = [BatchFinder(), *factory.callbacks()]
    trainer = quiet_trainer(*callbacks, default_root_dir=tmp_path, max_epochs=1)
    with pytest.raises(ValueError, match=r"with its own BatchFinder: pass plan=.* or apply=True"):
        trainer.fit(Net(3))


def test_a_trainer_that_runs_again_keeps_the_finder_that_was_added(tmp_path, monkeypatch):
    plan = tmp_path / "plan.json"
    monkeypatch.setenv(factory.VARIABLE, f"find:plan={plan},then=exit,max_batch_size=8")
    with pytest.raises(SystemExit):
        run(lightning_pytorch, tmp_path)
    monkeypatch.setenv(factory.VARIABLE, f"apply:plan={plan}")
    trainer, module = run(lightning_pytorch, tmp_path)
    assert module.batch_size == Plan.from_json(plan.read_text()).batch_size
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(module)
    assert (trainer.global_step, kinds(trainer)) == (3, ["BatchFinder"])
