"""The quickstart, in a process of its own, because its limit includes the interpreter."""

import math
import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_batchmem import Plan
from lightning_batchmem.profile.summary import Summary

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


def test_the_quickstart_trains_at_the_size_of_its_plan(tmp_path):
    done = subprocess.run(
        [sys.executable, str(QUICKSTART)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "lightning_logs" / "version_0"
    plan = Plan.from_json((folder / "batch_plan.json").read_text())
    assert plan.short_text() in done.stdout
    assert plan.project_batch_size == 16
    assert 16 <= plan.batch_size <= 24
    summary = Summary.from_json((folder / "memory_summary.json").read_text())
    # Four epochs of 1,438 images. The process may have its peak in the last batch of one, which is
    # smaller.
    assert summary.steps == plan.recipe.num_steps == 4 * math.ceil(1438 / plan.batch_size)
    assert summary.alerts == ()
    assert "Memory of a training step" in done.stdout
    events = EventAccumulator(str(folder))
    events.Reload()
    assert events.Scalars("val/accuracy")[-1].value >= 0.9
