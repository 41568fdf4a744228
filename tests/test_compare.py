"""compare: several variants of one model, each in a new process where that can import it."""

import sys
import types
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import (
    Comparison,
    Line,
    MemoryModel,
    Plan,
    Trial,
    Variant,
    compare,
    comparison,
)
from lightning_batchmem.plan.records import MIB

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x):
        return self.layers(x)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.batch_size = 2
        self.blocks = nn.Sequential(Block(), Block(), Block())

    def training_step(self, batch, batch_idx):
        return self.blocks(batch[0]).square().mean()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(100, 8)), batch_size=self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plan_of(size, intercept_mib, slope_mib, step_seconds):
    trials = (
        Trial(2, "ok", {}, step_seconds=9.0),
        Trial(size, "ok", {}, "rehearsal", step_seconds=step_seconds),
    )
    memory = MemoryModel(
        {
            "forward": Line(intercept_mib * MIB, slope_mib * MIB, 2, size),
            "backward": Line(1, 1, 2, 4),
        }
    )
    return Plan(size, "max_batch_size", True, 10**9, None, None, trials, memory, None)


RESULT = Comparison(
    (
        Variant("plain", plan_of(100, 1000, 4, 2.0)),
        Variant("half", plan_of(250, 1100, 2, 2.5)),
        Variant("a|b", None, "ValueError: no"),
    ),
    ("A note.",),
)


def test_the_table():
    assert [one.batch_size for one in RESULT.variants] == [100, 250, None]
    assert [one.samples_per_second for one in RESULT.variants] == [50.0, 100.0, None]
    assert RESULT.fastest is RESULT.variants[1]
    assert str(RESULT).splitlines() == [
        "variant        fixed MiB  MiB per sample  largest size      samples/s      limited by",
        "-" * 85,
        "  plain          1,000.0           4.000           100           50.0  max batch size",
        "   half  1,100.0 (1.10x)   2.000 (0.50x)   250 (2.50x)  100.0 (2.00x)  max batch size",
        "    a|b                -               -             -              -          failed",
        "fastest under the limit: half",
        "a|b failed: ValueError: no",
        "A note.",
    ]
    assert RESULT.to_markdown().splitlines()[2:] == [
        "| plain | 1,000.0 | 4.000 | 100 | 50.0 | max batch size |",
        "| half | 1,100.0 (1.10x) | 2.000 (0.50x) | 250 (2.50x) | 100.0 (2.00x) | max batch size |",
        r"| a\|b | - | - | - | - | failed |",
        "",
        "- fastest under the limit: half",
        "- a|b failed: ValueError: no",
        "- A note.",
    ]
    assert str(Comparison(())).startswith("variant")
    assert Comparison((RESULT.variants[2],)).fastest is None


SCRIPT = """
import os, sys
from lightning_batchmem import compare
from tests.test_compare import Net
with open("runs", "a") as file:
    file.write(__name__ + " " + os.environ.get("LIGHTNING_BATCHMEM", "-") + "\\n")
class Mine(Net):
    pass
def make():
    return Mine(), None
def kill(model):
    os.kill(os.getpid(), 9)
"""
UNGUARDED = """
try:
    comparison = compare(make, VARIANTS, base={"accelerator": "cpu"}, max_batch_size=8)
except Exception:
    sys.exit("compare raised an error that the script catches")
"""
ALL_VARIANTS = "{'plain': {}, 'wrong': {'precision': 'no'}, 'killed': {'transform': kill}}"
NOT_IMPORTABLE = (
    "The variants ran in this process, one after another, because a new one cannot import them: "
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script as the main module, here rather than in one more process.

    The fixture's function returns rows, notes and the runs of the script.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_BATCHMEM", "nonsense")
    monkeypatch.syspath_prepend(Path(__file__).parents[1])

    def run(text, file="script.py"):
        main = types.ModuleType("__main__")
        main.__package__ = None
        if file:
            main.__file__ = str(tmp_path / file)
            Path(main.__file__).write_text(SCRIPT + text)
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec(SCRIPT + text, vars(main))
        rows = [(one.name, one.batch_size, one.error) for one in main.comparison.variants]
        return rows, main.comparison.notes, Path("runs").read_text().splitlines()

    return run


def test_a_script_without_a_guard_runs_each_variant_in_a_new_process(run):
    rows, notes, runs = run(UNGUARDED.replace("VARIANTS", ALL_VARIANTS))
    assert rows[0] == ("plain", 8, "")
    assert rows[1][:2] == ("wrong", None)
    assert rows[1][2].startswith("ValueError: Precision 'no' is invalid.")
    error = "its process ended with exit code -9, killed perhaps because the host's memory was full"
    assert rows[2] == ("killed", None, error)
    assert notes == ()
    # The script ran once for each variant, without the variable.
    assert runs == ["__main__ nonsense", *["__mp_main__ -"] * 3]


@pytest.mark.parametrize(
    ("start", "file", "why", "runs"),
    [
        ("", None, "they are defined in a notebook or an interactive session.", []),
        ("if __name__ != '__main__': del make", "script.py", "SystemExit: ", ["__mp_main__ -"]),
    ],
)
def test_what_a_new_process_cannot_import_runs_in_this_one(
    run, monkeypatch, start, file, why, runs
):
    monkeypatch.setenv("LIGHTNING_BATCHMEM", "")
    rows, (note,), found = run(start + UNGUARDED.replace("VARIANTS", "{'plain': {}}"), file)
    assert rows == [("plain", 8, "")]
    assert note.startswith(NOT_IMPORTABLE + why)
    assert found == ["__main__ ", *runs]


def test_a_variant_changes_the_model(monkeypatch):
    """In this process, since a lambda cannot be imported elsewhere."""
    seen = {}

    def search(trainer, model, train_dataloaders, **options):
        model = getattr(model, "_orig_mod", model)
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        hooks = [len(block._forward_pre_hooks) for block in blocks]
        name = type(model).__name__
        seen[str(len(seen))] = (trainer.precision, hooks, name, model.batch_size, options)
        return plan_of(8, 1, 1, 1.0)

    monkeypatch.setattr(comparison, "find_batch_size", search)

    def larger(model):
        model.batch_size = 3

    other = type("Other", (Net,), {})
    compare(lambda: (Net(), None), base={"accelerator": "cpu"}, max_batch_size=8)
    compare(
        lambda: (Net(), None),
        {"t": {"transform": larger}, "o": {"transform": lambda model: other()}},
    )
    compiled = compare(lambda: (Net(), None), {"c": {"checkpoint": {nn.Linear}, "compile": True}})
    assert compiled.variants[0].error == ""
    assert list(seen.values()) == [
        ("32-true", [0, 0, 0], "Net", 2, {"max_batch_size": 8}),
        ("bf16-mixed", [0, 0, 0], "Net", 2, {"max_batch_size": 8}),
        ("32-true", [1, 1, 1], "Net", 2, {"max_batch_size": 8}),
        ("bf16-mixed", [1, 1, 1], "Net", 2, {"max_batch_size": 8}),
        ("32-true", [0, 0, 0], "Net", 3, {}),
        ("32-true", [0, 0, 0], "Other", 2, {}),
        ("32-true", [0, 0, 0], "Net", 2, {}),
    ]


@pytest.mark.parametrize(
    ("make", "variants", "error"),
    [
        (lambda: Net(), {"x": {}}, "ValueError: make must return (model, data), got Net"),
        (
            lambda: (Net(), None),
            {"x": {"checkpoint": {nn.Conv2d}}},
            "ValueError: checkpoint must name classes of modules in the model, got Conv2d, which it"
            " does not have",
        ),
        (
            lambda: (nn.Sequential(nn.Linear(1, 1)), None),
            {"x": {"checkpoint": True}},
            "ValueError: checkpoint must name classes of blocks, got a model that has no block"
            " twice",
        ),
    ],
)
def test_a_variant_that_fails_has_its_reason(make, variants, error):
    (row,) = compare(make, variants).variants
    assert (row.plan, row.error) == (None, error)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="devices must be one device, got 2 on 1 nodes in 'x'"):
        compare(lambda: (Net(), None), {"x": {"devices": 2}})
    with pytest.raises(ValueError, match="max_batch_size must be a whole number"):
        compare(lambda: (Net(), None), {}, max_batch_size=0)


def test_the_most_repeated_block():
    # The result is neither the Sequential in each block, nor the class of a layer.
    assert comparison._most_repeated(Net()) is Block
    plain = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
    assert comparison._most_repeated(plain) is nn.Sequential
