"""Examples for Optuna and Ray, in processes of their own; trials of a sweep search once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ecosystem.twice import MARKS, MISSING

REPOSITORY = Path(__file__).parents[2]
REASON = "64 samples: the size of an earlier plan, which passed a rehearsal on this device."
pytestmark = MARKS


def run(folder, *arguments):
    """The output of a program, and its errors, after it has ended without one."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        # Ray writes a file to the home directory.
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_optuna_prunes_a_trial_out_of_memory_and_frees_its_tensors(tmp_path):
    pytest.importorskip("optuna", reason=MISSING)
    output, log = run(tmp_path, "-m", "tests.helpers.failing_sweep", "optuna_sweep")
    # A trial that ends in its search has no training.
    assert re.findall(r"^training: (.*)$", output, re.MULTILINE) == [f"64, 64, {REASON}"] * 3
    tensors = re.findall(r"^run (\d): (\d+) of (\d+) tensors alive$", output, re.MULTILINE)
    assert [run for run, _, _ in tensors] == ["0", "1", "2", "3", "4"]
    # Those of the search before the sweep are parts of a Trainer that waits for its collection.
    assert [alive for _, alive, _ in tensors[2:]] == ["0"] * 3
    assert all(int(count) > 0 for _, _, count in tensors[1:])
    ends = re.findall(r"Trial (\d) (finished|pruned\. [A-Z]\w+ \w+)", log)
    assert ends == [
        ("0", "finished"),
        ("1", "pruned. CUDA out"),
        ("2", "pruned. Nothing fits"),
        ("3", "finished"),
    ]
    assert re.search(r"^accuracy 0\.\d+ with \{'learning_rate': ", output, re.MULTILINE)


@pytest.mark.parametrize("name", ["ray_train", "ray_tune"])
def test_ray_runs_two_workers_with_one_size(name, tmp_path):
    pytest.importorskip("ray", reason=MISSING)
    output, _ = run(tmp_path, str(REPOSITORY / "examples" / f"{name}.py"))
    if name == "ray_train":
        pattern = r"^accuracy 0\.\d+, with the batch sizes \[64, 64\] of the workers$"
        assert re.search(pattern, output, re.MULTILINE), output
    else:
        assert output.count(f"trial: {REASON}\n") == 2, output
        assert re.search(r"^accuracy 0\.\d+ with 0\.\d+$", output, re.MULTILINE), output


def test_optuna_runs_the_recipe_with_one_search(tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna", reason=MISSING)
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / "docs" / "recipes.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    (last,) = (number for number, block in enumerate(blocks) if "def objective" in block)
    recipe = {"__name__": "recipe"}
    for block in blocks[: last + 1]:
        exec(block, recipe)
    reasons = []
    fit = recipe["Trainer"].fit

    def recorded_fit(trainer, *arguments):
        fit(trainer, *arguments)
        reasons.append(trainer.callbacks[0].plan.reason)

    monkeypatch.setattr(recipe["Trainer"], "fit", recorded_fit)
    optuna.create_study().optimize(recipe["objective"], n_trials=2)
    # The sweep above it in the page has written the plan.
    assert reasons == [REASON, REASON]


TASK = """
import hydra
from hydra.utils import instantiate


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def train(config):
    callbacks = [instantiate(callback) for callback in config.callbacks.values()]
    trainer = instantiate(config.trainer, callbacks=callbacks)
    trainer.fit(instantiate(config.model), datamodule=instantiate(config.data))
    print("job:", trainer.callbacks[0].plan.reason)


train()
"""
PROJECT = """
data: {_target_: examples.quickstart.Digits}
model: {_target_: examples.quickstart.Classifier, channels: 4, learning_rate: 0.003}
trainer:
  _target_: lightning.pytorch.Trainer
  max_steps: 10
  limit_val_batches: 1
  logger: {_target_: lightning.pytorch.loggers.CSVLogger, save_dir: logs}
"""


def test_the_second_job_of_hydra_uses_the_plan_of_the_first(tmp_path):
    pytest.importorskip("hydra", reason=MISSING)
    page = (REPOSITORY / "docs" / "recipes.md").read_text()
    (callbacks,) = re.findall(r"<!-- hydra -->\n```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "config.yaml").write_text(PROJECT + callbacks)
    (tmp_path / "train.py").write_text(TASK)
    output, _ = run(tmp_path, "train.py", "--multirun", "model.learning_rate=0.001,0.01")
    jobs = re.findall(r"^job: (.*)$", output, re.MULTILINE)
    assert jobs == ["64 samples: max_batch_size is 64.", REASON]
