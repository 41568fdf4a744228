"""LightningCLI: the example in examples/cli, and what it takes of every argument of both callbacks."""

from __future__ import annotations

import csv
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_batchmem
from lightning_batchmem import BatchFinder, MemoryProfiler

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "cli"
SIZE_IN_THE_YAML = 16

pytestmark = [
    # Lightning's own calls of jsonargparse, which deprecates them: set_config_read_mode (jsonargparse 4.39, lightning
    # 2.5.0), add_instantiator, instantiate_classes and skip_none (4.49, lightning 2.6.6). The first is preceded by a
    # general word on such warnings.
    pytest.mark.filterwarnings(r"ignore:\s*By default only one JsonargparseDeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:\s*set_config_read_mode was deprecated in v4\.39"),
    pytest.mark.filterwarnings(r"ignore:\s*``ArgumentParser\.add_instantiator`` was deprecated in v4\.49"),
    pytest.mark.filterwarnings(r"ignore:\s*``instantiate_classes`` was deprecated in v4\.49"),
    pytest.mark.filterwarnings(r"ignore:\s*skip_none parameter was deprecated in v4\.49"),
]


def run_example(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    package = Path(lightning_batchmem.__file__).parents[1]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "prefix"), [("examples/cli", ""), (".", "examples/cli/")])
def test_the_example_runs_from_its_folder_and_from_the_root(tmp_path: Path, folder: str, prefix: str) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "cli", ignore=shutil.ignore_patterns("logs", "__pycache__"))
    done = run_example(tmp_path / folder, f"{prefix}main.py", "fit", "--config", f"{prefix}config.yaml")
    assert done.returncode == 0, done.stderr
    said = re.search(r"^batch size (\d+), limited by", done.stdout, re.MULTILINE)
    assert said, done.stdout
    found = int(said[1])
    assert found % 8 == 0
    assert found != SIZE_IN_THE_YAML
    assert "Memory of a training step" in done.stdout

    logs = tmp_path / folder / "logs" / "cli" / "version_0"
    with (logs / "memory_per_batch.csv").open() as file:
        assert max(int(row["batch_size"]) for row in csv.DictReader(file)) == found
    assert yaml.safe_load((logs / "hparams.yaml").read_text())["batch_size"] == found
    (checkpoint,) = (logs / "checkpoints").glob("*.ckpt")
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["datamodule_hyper_parameters"]["batch_size"] == found
    # what the comments of the example warn of
    assert yaml.safe_load((logs / "config.yaml").read_text())["data"]["batch_size"] == SIZE_IN_THE_YAML


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns when it gets arguments while pytest has some too."""
    monkeypatch.setattr(sys, "argv", sys.argv[:1])


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The example's main.py, where the types of its arguments can be looked up."""
    spec = importlib.util.spec_from_file_location("cli_example", EXAMPLE / "main.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("argument", "value"),
    [("objective", 3), ("objective", "speed"), ("max_batch_size", "many"), ("max_batch_sise", 64), ("csv", "perhaps")],
)
def test_what_is_wrong_in_the_yaml_is_named(
    example: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, value: Any
) -> None:
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    profiler, finder = (callback["init_args"] for callback in config["trainer"]["callbacks"])
    (profiler if argument == "csv" else finder)[argument] = value
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as refused:
        example.LightningCLI(example.Classifier, example.Digits, args=["fit", "--config", str(path)])
    assert refused.value.code == 2
    error = capsys.readouterr().err.partition("error:")[2]
    before_the_whole_value = error.partition("Given value: [")[0]
    assert argument in before_the_whole_value


def test_a_bound_that_makes_no_sense_is_our_own_error(
    example: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # seed_everything writes it; pytest takes it away again
    arguments = ["fit", "--config", str(EXAMPLE / "config.yaml"), "--trainer.callbacks.max_batch_size=0"]
    with pytest.raises(ValueError, match="max_batch_size must be a whole number of at least 1, got 0"):
        example.LightningCLI(example.Classifier, example.Digits, args=arguments)


# every argument ------------------------------------------------------------------------------------------------------

CANDIDATES: list[Any] = [True, 3, 1.5, "many", "20GiB", "builtins.len", [1], {"a": 1}]
"""Without null, which jsonargparse lets through whatever the type (4.39 to 4.53)."""

ARGUMENTS = [
    pytest.param(callback, name, id=f"{callback.__name__}-{name}")
    for callback in (BatchFinder, MemoryProfiler)
    for name in inspect.signature(callback).parameters
]


def takes(hint: Any, value: Any) -> bool:
    """Whether an annotation allows a value of a YAML."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(takes(one, value) for one in get_args(hint))
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(hint))
    if hint is Callable or origin is Callable:
        return value == "builtins.len"
    kinds: dict[Any, tuple[type, ...]] = {float: (int, float), types.NoneType: (types.NoneType,)}
    assert hint in (int, float, str, bool, types.NoneType), f"unknown to this test: {hint}"
    return type(value) in kinds.get(hint, (hint,))


def parse(callback: type, **arguments: Any) -> Any:
    """The arguments of a callback as LightningCLI reads them from a YAML."""
    from lightning.pytorch.cli import LightningArgumentParser

    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(callback, "callback")  # type: ignore[arg-type]
    return parser.parse_string(yaml.safe_dump({"callback": arguments})).callback


def parse_and_check(callback: type, name: str, value: Any) -> None:
    parsed = parse(callback, **{name: value})[name]
    if "Callable" in str(get_type_hints(callback.__init__)[name]):
        callback(**{name: parsed})  # jsonargparse 4.39 lets through what cannot be called; the callback does not


@pytest.mark.parametrize(("callback", "name"), ARGUMENTS)
def test_every_argument_is_typed_and_has_a_default_of_its_type(callback: type, name: str) -> None:
    parameter = inspect.signature(callback).parameters[name]
    hint = get_type_hints(callback.__init__)[name]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert takes(hint, parameter.default)
    assert parse(callback)[name] == parameter.default
    documented = inspect.getdoc(callback) or ""
    assert re.search(rf"^    (\w+, )*{name}(, \w+)*: ", documented, re.MULTILINE)  # what `--help` shows


@pytest.mark.parametrize(("callback", "name"), ARGUMENTS)
@pytest.mark.parametrize("value", CANDIDATES, ids=repr)
def test_every_argument_takes_what_its_type_says_and_nothing_else(callback: type, name: str, value: Any) -> None:
    from jsonargparse import ArgumentError

    hint = get_type_hints(callback.__init__)[name]
    if takes(hint, value):
        assert parse(callback, **{name: value})[name] in (value, len)  # a function is named by its path
        return
    with pytest.raises((ArgumentError, ValueError)) as error:
        parse_and_check(callback, name, value)
    assert name in str(error.value)


@pytest.mark.parametrize(("callback", "name"), ARGUMENTS)
def test_every_word_of_an_argument_is_taken(callback: type, name: str) -> None:
    hint = get_type_hints(callback.__init__)[name]
    words = [word for one in [hint, *get_args(hint)] if get_origin(one) is Literal for word in get_args(one)]
    for word in words:
        assert parse(callback, **{name: word})[name] == word
    assert bool(words) == ("Literal" in str(hint))


# where the size lives ------------------------------------------------------------------------------------------------


def loader(batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(24, 1)), batch_size=batch_size)


class Unsized(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: set[int] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.add(len(batch[0]))
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sized(Unsized):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()


class WithLoader(Sized):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.hparams["batch_size"])


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.hparams["batch_size"])


@pytest.mark.parametrize("setting", ["model", "data", "linked"])
def test_the_size_is_set_wherever_the_init_arguments_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    class Linked(LightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.link_arguments("data.batch_size", "model.batch_size")

    monkeypatch.chdir(tmp_path)
    config = {
        "seed_everything": False,
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "enable_progress_bar": False,
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs", "name": "cli"}},
            "callbacks": {
                "class_path": "lightning_batchmem.BatchFinder",
                "init_args": {"min_batch_size": 8, "max_batch_size": 8},
            },
        },
        "model" if setting == "model" else "data": {"batch_size": 4},
    }
    Path("asked.yaml").write_text(yaml.safe_dump(config))
    make = Linked if setting == "linked" else LightningCLI
    classes = {"model": (WithLoader,), "data": (Unsized, Data), "linked": (Sized, Data)}[setting]
    cli = make(*classes, args=["fit", "--config", "asked.yaml"])

    assert cli.trainer.train_dataloader.batch_size == 8
    assert 8 in cli.model.seen
    logs = tmp_path / "logs" / "cli" / "version_0"
    (checkpoint,) = (logs / "checkpoints").glob("*.ckpt")
    saved = torch.load(checkpoint, weights_only=True)
    holders = {"model": ["hyper_parameters"], "data": ["datamodule_hyper_parameters"]}
    for key in holders.get(setting, ["hyper_parameters", "datamodule_hyper_parameters"]):
        assert saved[key]["batch_size"] == 8
    assert yaml.safe_load((logs / "hparams.yaml").read_text())["batch_size"] == 8
    kept = yaml.safe_load((logs / "config.yaml").read_text())
    assert kept["model" if setting == "model" else "data"]["batch_size"] == 4
