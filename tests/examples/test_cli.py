"""LightningCLI: the example in examples/cli, and the arguments of both callbacks."""

import inspect
import re
import runpy
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml

from lightning_batchmem import BatchFinder, MemoryProfiler
from tests.helpers.profiled import rows

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "cli"
SIZE_IN_THE_YAML = 16

pytestmark = [
    # Lightning itself uses names that jsonargparse deprecates: set_config_read_mode (jsonargparse
    # 4.39, lightning 2.5.0), add_instantiator, instantiate_classes and skip_none (jsonargparse
    # 4.49, lightning 2.6.6). A general warning comes before the first of them.
    pytest.mark.filterwarnings(r"ignore:\s*By default only one JsonargparseDeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:\s*set_config_read_mode was deprecated in v4\.39"),
    pytest.mark.filterwarnings(
        r"ignore:\s*``ArgumentParser\.add_instantiator`` was deprecated in v4\.49"
    ),
    pytest.mark.filterwarnings(r"ignore:\s*``instantiate_classes`` was deprecated in v4\.49"),
    pytest.mark.filterwarnings(r"ignore:\s*skip_none parameter was deprecated in v4\.49"),
]


# Earlier tests leave holes in the heap, so a peak may be above the plan.
@pytest.mark.filterwarnings("ignore:MemoryProfiler. The peak in step")
@pytest.mark.parametrize(("folder", "prefix"), [("examples/cli", ""), (".", "examples/cli/")])
def test_the_example_runs_from_its_folder_and_from_the_root(
    tmp_path, monkeypatch, capsys, folder, prefix
):
    shutil.copytree(
        EXAMPLE, tmp_path / "examples" / "cli", ignore=shutil.ignore_patterns("logs", "__pycache__")
    )
    monkeypatch.chdir(tmp_path / folder)
    # seed_everything writes this variable, and monkeypatch restores it after the test.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    shorter = ["--model.channels=4", "--trainer.max_epochs=1"]
    monkeypatch.setattr(
        sys, "argv", [f"{prefix}main.py", "fit", "--config", f"{prefix}config.yaml", *shorter]
    )
    runpy.run_path(f"{prefix}main.py", run_name="__main__")
    done = capsys.readouterr().out
    printed = re.search(r"^BatchFinder: batch size (\d+), limited by", done, re.MULTILINE)
    assert printed, done
    found = int(printed[1])
    assert found % 8 == 0
    assert found != SIZE_IN_THE_YAML
    assert "Memory of a training step" in done

    logs = tmp_path / folder / "logs" / "cli" / "version_0"
    assert max(int(row["batch_size"]) for row in rows(logs / "memory_per_batch.csv")) == found
    assert yaml.safe_load((logs / "hparams.yaml").read_text())["batch_size"] == found
    (checkpoint,) = (logs / "checkpoints").glob("*.ckpt")
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["datamodule_hyper_parameters"]["batch_size"] == found
    # The saved configuration keeps the size of the YAML, as the comments of the example warn.
    config = yaml.safe_load((logs / "config.yaml").read_text())
    assert config["data"]["batch_size"] == SIZE_IN_THE_YAML


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch):
    """LightningCLI warns when it gets arguments while pytest has some too."""
    monkeypatch.setattr(sys, "argv", sys.argv[:1])


@pytest.mark.parametrize(
    ("argument", "value"), [("objective", "speed"), ("max_batch_sise", 64), ("csv", "perhaps")]
)
def test_errors_in_the_yaml_name_the_argument(tmp_path, monkeypatch, capsys, argument, value):
    example = types.ModuleType("cli_example")
    # The types of the arguments are looked up in the module of the class.
    monkeypatch.setitem(sys.modules, example.__name__, example)
    exec((EXAMPLE / "main.py").read_text(), vars(example))
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    profiler, finder = (callback["init_args"] for callback in config["trainer"]["callbacks"])
    changed = profiler if argument == "csv" else finder
    changed[argument] = value
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as refused:
        example.LightningCLI(
            example.Classifier, example.Digits, args=["fit", "--config", str(path)]
        )
    assert refused.value.code == 2
    error = capsys.readouterr().err.partition("error:")[2]
    before_the_whole_value = error.partition("Given value: [")[0]
    assert argument in before_the_whole_value


def parse(callback, **arguments):
    """The arguments of a callback as LightningCLI reads them from a YAML."""
    from lightning.pytorch.cli import LightningArgumentParser

    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(callback, "callback")
    return parser.parse_string(yaml.safe_dump({"callback": arguments})).callback


@pytest.mark.parametrize("callback", [BatchFinder, MemoryProfiler])
def test_every_argument_is_documented_and_has_its_default(callback):
    parsed = parse(callback)
    documented = inspect.getdoc(callback) or ""
    for name, parameter in inspect.signature(callback).parameters.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parsed[name] == parameter.default
        # `--help` shows this text.
        assert re.search(rf"^    (\w+, )*{name}(, \w+)*: ", documented, re.MULTILINE), name


# BatchFinder has other arguments of the same types.
VALUES = {
    "objective": (["memory", "throughput"], ["many", 3]),
    "memory_limit": ([3, 0.5, 2e9, "20GiB"], [[1]]),
    "max_batch_size": ([3, None], [1.5, "many"]),
    "batch_arg_name": (["size"], [3]),
    "worst_case": (["typical", "longest"], [3, "many"]),
    "lr_scaling": (["linear", "sqrt", None], ["many"]),
    "search_on_resume": ([True, "if_changed"], ["many"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_an_argument(name):
    from jsonargparse import ArgumentError

    right, wrong = VALUES[name]
    for value in right:
        expected = len if value == "builtins.len" else value
        assert parse(BatchFinder, **{name: value})[name] == expected
    for value in wrong:
        with pytest.raises((ArgumentError, ValueError), match=name):
            # Version 4.39 of jsonargparse accepts values that cannot be called.
            BatchFinder(**parse(BatchFinder, **{name: value}), objective="memory")
