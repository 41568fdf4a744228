"""A run that only searches writes a plan and nothing else, and ends its process."""

import inspect
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning
import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

import lightning_batchmem.pytorch_lightning
from lightning_batchmem import BatchFinder, Plan, batch_finder, find_batch_size
from lightning_batchmem.search.kept_trials import ENDED
from tests.helpers.lawful import FAST, MIB, Lawful, found_size, law, loader, quiet_trainer
from tests.helpers.plans import search_notes

ROOT = Path(__file__).parents[2]
FOUND = found_size(500 * MIB, multiple_of=1)
# Lightning 2.5.0 does not have it.
HAS_IT = "save_on_exception" in inspect.signature(ModelCheckpoint).parameters
AT_ERRORS = {"save_on_exception": True} if HAS_IT else {}
OPTIONS = {"objective": "memory", "multiple_of": 1, "min_steps_per_epoch": None}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plans" / "plan.json"


@pytest.fixture
def find(fit, device, path):
    """Start a run that only searches; returns its plan."""

    def run(module=None, *callbacks, options=None, **arguments):
        finder = BatchFinder(**OPTIONS, **(options or {}), plan=path, then="exit")
        with pytest.raises(SystemExit) as end:
            fit(module or Lawful(device, law), finder, device, *callbacks, **arguments)
        assert end.value.code == 0
        return Plan.from_json(path.read_text())

    return run


class Logged(Lawful):
    """Logs in every step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.logger.experiment.add_scalar("own", 1.0, batch_idx)
        return loss


class Watched(Callback):
    """Writes down the hooks of a training that it gets."""

    def __init__(self):
        self.hooks = []

    def on_train_start(self, trainer, pl_module):
        self.hooks.append("on_train_start")

    def on_exception(self, trainer, pl_module, exception):
        self.hooks.append("on_exception")


def test_the_plan_is_that_of_a_search_in_the_training(find, search, device, path, capsys):
    plan = find()
    assert (plan.batch_size, plan.verified, plan.limited_by) == (FOUND, True, "memory")
    assert plan.strategy == "SingleDeviceStrategy, 32-true"
    of_training = search(Lawful(device, law))
    assert [t.batch_size for t in plan.trials] == [t.batch_size for t in of_training.trials]
    # The trials are not needed any more.
    assert os.listdir(path.parent) == ["plan.json"]
    assert (
        f"BatchFinder ends this process: the plan is in {path}, and nothing after Trainer.fit runs."
        ' To train at this size, replace then="exit" by apply=True'
    ) in capsys.readouterr().out


def test_loggers_and_checkpoints_write_nothing(find, device, tmp_path, path):
    watched = Watched()
    loggers = [TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv")]
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, **AT_ERRORS)
    find(Logged(device, law), saver, watched, logger=loggers, enable_checkpointing=True)
    assert watched.hooks == []
    assert os.listdir(tmp_path) == ["plans"]


def test_the_configuration_of_a_command_line_is_not_written(find, tmp_path):
    saver = SaveConfigCallback(LightningArgumentParser(), Namespace(), overwrite=True)
    find(None, saver, default_root_dir=tmp_path)
    assert os.listdir(tmp_path) == ["plans"]


def test_loggers_write_again_in_a_notebook_that_goes_on(find, device, tmp_path):
    find(logger=CSVLogger(tmp_path))
    logger = CSVLogger(tmp_path, version=1)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.save()
    assert "1.0" in (tmp_path / "lightning_logs" / "version_1" / "metrics.csv").read_text()


def test_an_error_in_a_step_ends_the_run_and_nothing_is_saved(fit, device, path, tmp_path):
    class Fails(Lawful):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) == 8:
                raise IndexError("of the user")
            return super().training_step(batch, batch_idx)

    watched = Watched()
    saver = ModelCheckpoint(tmp_path / "saved", **AT_ERRORS)
    finder = BatchFinder.optional(**OPTIONS, plan=path, then="exit")
    module = Fails(device, law)
    with pytest.raises(IndexError, match="of the user"):
        fit(module, finder, device, saver, watched, enable_checkpointing=True)
    assert (watched.hooks, set(module.sizes)) == ([], {2})
    assert not (tmp_path / "saved").exists()
    # The trials before the error are kept, and the error is not one of them.
    content = json.loads((path.parent / "plan.json.trials").read_text())
    assert ([t["batch_size"] for t in content["trials"]], content["running"]) == ([2], None)


@pytest.mark.parametrize("arguments", [{"fast_dev_run": True}, {"max_epochs": 0}, {"max_steps": 0}])
def test_a_training_without_steps_is_an_error(fit, device, path, arguments):
    finder = BatchFinder.optional(**OPTIONS, plan=path, then="exit")
    with pytest.raises(ValueError, match='then="exit" must be used with a training that has steps'):
        fit(Lawful(device, law), finder, device, **arguments)
    assert not path.exists()


def test_a_strategy_that_cannot_be_searched_is_an_error_under_the_variable_too(
    fit, device, path, monkeypatch
):
    def refuse(trainer, *, restores):
        assert not restores
        raise ValueError("of the check")

    monkeypatch.setattr(batch_finder, "check_strategy", refuse)
    module = Lawful(device, law)
    finder = BatchFinder.optional(**OPTIONS, plan=path, then="exit")
    with pytest.raises(ValueError, match="of the check"):
        fit(module, finder, device)
    assert module.sizes == []


@pytest.mark.parametrize("option", [{"then": "exit"}, {"apply": True}])
def test_a_search_without_a_training_needs_no_other_run(device, option, tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    with pytest.raises(ValueError, match="then and apply must be left out for find_batch_size"):
        find_batch_size(trainer, Lawful(device, law), plan=str(tmp_path / "plan.json"), **option)


def test_an_evaluation_before_the_training_runs_as_it_is(find, fit, device, path, tmp_path):
    class Judged(Lawful):
        def test_step(self, batch, batch_idx):
            self.log("seen", float(len(batch[0])))

        test_dataloader = Lawful.train_dataloader

    finder = BatchFinder(**OPTIONS, plan=path, then="exit")
    module = Judged(device, law)
    trainer = fit(module, BatchFinder(**OPTIONS), device, max_epochs=0, max_steps=-1)
    trainer.callbacks = [finder]
    trainer.loggers = [CSVLogger(tmp_path)]
    trainer.test(module, verbose=False)
    assert module.batch_size == 3
    assert trainer.callback_metrics["seen"] < 3.01
    assert list(tmp_path.rglob("metrics.csv"))
    assert not path.exists()


def test_a_plan_that_is_there_is_not_searched_again(find, device, path, capsys):
    first = find()
    module = Lawful(device, law)
    assert find(module) == first
    assert module.sizes == []
    assert (
        f"BatchFinder does not search, because {path} has a plan of this training. Delete it to"
        " search again."
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"device": "another GPU"}, "the device was another GPU and is CPU"),
        ({"limit_bytes": 200 * MIB}, "the limit was 200.0 MiB and is 475.0 MiB"),
        ({"parameters": "7 in 3 tensors"}, "the number of parameters was 7 in 3 tensors and is 2"),
        ({"strategy": "DDPStrategy, 32-true"}, "the strategy was DDPStrategy, 32-true and is"),
    ],
)
def test_a_plan_of_another_training_is_replaced(find, path, change, text):
    first = find()
    path.write_text(json.dumps({**json.loads(first.to_json()), **change}))
    again = find()
    assert (again.batch_size, again.device) == (FOUND, first.device)
    (note,) = [note for note in search_notes(again) if note.startswith("The earlier plan was not")]
    assert text in note


def test_a_plan_for_another_size_of_the_project_is_replaced(find, device, path):
    find()
    module = Lawful(device, law)
    module.batch_size = 5
    again = find(module)
    assert again.project_batch_size == 5
    (note,) = [note for note in search_notes(again) if note.startswith("The earlier plan was not")]
    assert "the batch size of the project was 3 and is 5" in note


@pytest.mark.parametrize("text", ["{}", "[", "my notes"])
def test_another_file_stays_as_it_is(fit, device, path, text):
    path.parent.mkdir()
    path.write_text(text)
    finder = BatchFinder.optional(**OPTIONS, plan=path, then="exit")
    with pytest.raises(ValueError, match=r"the plan in .*plan\.json cannot be read \("):
        fit(Lawful(device, law), finder, device)
    assert path.read_text() == text


def test_a_directory_that_cannot_be_written_is_an_error_before_any_step(fit, device, tmp_path):
    (tmp_path / "plans").write_text("")
    module = Lawful(device, law)
    finder = BatchFinder(**OPTIONS, plan=tmp_path / "plans" / "plan.json", then="exit")
    with pytest.raises(ValueError, match=r"cannot be written .* Name another file") as caught:
        fit(module, finder, device)
    assert module.sizes == []
    # It is no error of a step, about which a note would have advice.
    assert not hasattr(caught.value, "__notes__")


class OfStandalone(pytorch_lightning.LightningModule):
    """The same module in the other package."""

    training_step = Lawful.training_step
    configure_optimizers = Lawful.configure_optimizers
    train_dataloader = Lawful.train_dataloader

    def __init__(self, device_memory):
        super().__init__()
        other = Lawful(device_memory, law)
        self.batch_size, self.sizes, self.layer, self.use = 3, [], other.layer, other.use


def test_the_other_package(device, path):
    finder = lightning_batchmem.pytorch_lightning.BatchFinder(**OPTIONS, plan=path, then="exit")
    finder.device_memory = lambda _: device
    finder.policy = FAST
    logger = pytorch_lightning.loggers.CSVLogger(path.parent)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = pytorch_lightning.Trainer(
        callbacks=[finder], logger=logger, accelerator="cpu", max_epochs=1, **quiet
    )
    with pytest.raises(SystemExit):
        trainer.fit(OfStandalone(device))
    assert Plan.from_json(path.read_text()).batch_size == FOUND
    assert os.listdir(path.parent) == ["plan.json"]


class Configured(Lawful):
    """Has its size in an object of its own, which no restored step would put back."""

    def __init__(self, device):
        super().__init__(device, law, batch_size=SimpleNamespace())
        self.config = Configuration()

    def train_dataloader(self):
        return loader(self.config.loader_size)


class Configuration:
    loader_size = 24


def test_the_size_of_the_project_is_that_before_its_place_was_looked_for(find, device):
    module = Configured(device)
    plan = find(module)
    assert (plan.batch_size, plan.place) == (FOUND, "config.loader_size")
    assert plan.project_batch_size == 24


def test_hooks_that_wrap_a_layer_run_once(find, device):
    class Wraps(Lawful):
        def on_fit_start(self):
            self.layer = torch.nn.Sequential(self.layer)

        def on_train_start(self):
            self.layer = torch.nn.Sequential(self.layer)

    module = Wraps(device, law)
    find(module)
    assert len(list(module.layer.modules())) == 3


def test_workers_of_loaders_end(find, device):
    class WithWorkers(Lawful):
        def train_dataloader(self):
            data = TensorDataset(torch.zeros(5000, 1))
            return DataLoader(
                data, batch_size=self.batch_size, num_workers=1, persistent_workers=True
            )

    find(WithWorkers(device, law))
    assert multiprocessing.active_children() == []


SCRIPT = """
import os, signal, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from {package} import LightningModule, Trainer

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.batch_size = 4
        self.layer = torch.nn.Linear(8, 8)
    def training_step(self, batch, batch_idx):
        if os.environ.get("ENDS") and len(batch[0]) >= int(os.environ["ENDS"]):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = self.layer(batch[0]).mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(200, 8)), batch_size=self.batch_size)

module = Module()
trainer = Trainer(max_epochs=1, accelerator="cpu", enable_progress_bar=False)
trainer.fit(module)
print("trained at", module.batch_size)
"""


def start(folder, word, package="lightning.pytorch", **environment):
    """Run the script in a process, as a user does."""
    (folder / "train.py").write_text(SCRIPT.format(package=package))
    return subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LIGHTNING_BATCHMEM": word, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_both_words_in_a_script_that_does_not_know_the_package(tmp_path, package):
    word = "find:objective=memory,max_batch_size=12,plan=plan.json,then=exit"
    found = start(tmp_path, word, package)
    assert found.returncode == 0, found.stderr
    assert "LIGHTNING_BATCHMEM=apply:plan=plan.json" in found.stdout
    assert "trained" not in found.stdout
    assert sorted(os.listdir(tmp_path)) == ["plan.json", "train.py"]
    trained = start(tmp_path, "apply:plan=plan.json", package)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.endswith("trained at 12\n")
    assert "the size of the plan in plan.json" in trained.stdout


def test_four_starts_of_a_training_that_is_killed(tmp_path):
    word = "find:objective=memory,max_batch_size=64,plan=plan.json,then=exit"
    codes = [start(tmp_path, word, ENDS="20").returncode for _ in range(4)]
    assert codes[0] == -9
    assert codes[-1] == 0, codes
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert 8 <= plan.batch_size < 20
    ended = [trial.batch_size for trial in plan.trials if trial.error == ENDED]
    assert ended
    assert min(ended) >= 20
    assert any("counts as out of memory" in note for note in search_notes(plan))
