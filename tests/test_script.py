"""Scripts that search in processes of their own, until there is a plan."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_batchmem import script
from lightning_batchmem.__main__ import main
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.script import Script, search_by

TRAIN = """
import os, signal, sys
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

class Net(LightningModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        DIES
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(1000, 8)), batch_size=self.batch_size)

net = Net(int(sys.argv[1]))
Trainer(max_epochs=1, accelerator="cpu", enable_progress_bar=False, logger=False,
        enable_checkpointing=False).fit(net)
print("trained with", net.batch_size)
"""
OPTIONS = {"objective": "memory", "max_batch_size": 96}


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(script.__file__).parents[1]))

    def write(dies="pass"):
        Path("train.py").write_text(TRAIN.replace("DIES", dies))
        return Script.of_command(["train.py", "16"])

    return write


def test_a_script_searches_and_then_trains_with_the_plan(train, capfd):
    train()
    words = ["--objective", "memory", "--max_batch_size", "96", "--out", "plan.json"]
    assert main(["find", *words, "train.py", "16"]) == 0
    found = capfd.readouterr()
    assert "batch size 96" in found.out
    assert "apply:plan=plan.json" in found.out
    assert "trained" not in found.out
    assert not Path("plan.json.trials").exists()
    environment = {**os.environ, "LIGHTNING_BATCHMEM": "apply:plan=plan.json"}
    command = [sys.executable, "train.py", "16"]
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "trained with 96" in text.stdout
    assert "why       96 samples: the size of the plan in plan.json" in text.stdout


@pytest.mark.slow
def test_a_search_goes_on_behind_a_size_that_ended_the_process(train, capfd):
    dies = "len(batch[0]) > 50 and os.kill(os.getpid(), signal.SIGKILL)"
    search_by(train(dies), Path("plan.json"), OPTIONS)
    assert (
        "train.py was ended by SIGKILL in a trial, and is started again" in capfd.readouterr().err
    )
    plan = Plan.from_json(Path("plan.json").read_text())
    assert 16 < plan.batch_size <= 50
    assert any("Earlier starts ended at size" in str(note) for note in plan.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dies", "message"),
    [
        ("raise LookupError('of the project')", "train.py ended with exit code 1, and there is no"),
        ("os._exit(0)", "train.py ended without a call of Trainer.fit"),
    ],
)
def test_an_error_of_the_script_is_not_tried_again(train, dies, message, capfd):
    with pytest.raises(ValueError, match=message):
        search_by(train(dies), Path("plan.json"), OPTIONS)
    assert "started again" not in capfd.readouterr().err


def test_a_script_that_always_ends_is_started_four_times(train, monkeypatch, capfd):
    script_that_dies = train("os.kill(os.getpid(), signal.SIGKILL)")
    starts = []
    run = subprocess.run

    def counted(*arguments, **keywords):
        starts.append(arguments)
        return run(*arguments, **keywords)

    monkeypatch.setattr(script.subprocess, "run", counted)
    with pytest.raises(ValueError, match=r"and there is no plan in plan\.json"):
        search_by(script_that_dies, Path("plan.json"), OPTIONS)
    assert 1 < len(starts) <= script.MOST_STARTS
    assert signal.SIGKILL.name in capfd.readouterr().err
