"""Metrics, the plan and its figure in the loggers of W&B and MLflow."""

import html
import warnings

import pytest
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from lightning_batchmem import BatchFinder, MemoryProfiler
from tests.ecosystem.twice import MARKS, MISSING
from tests.helpers.profiled import METRICS, Net, data, trainer_for

pytestmark = MARKS
PNG = b"\x89PNG"
# The utilization of the CPU needs some time between two readings, so it may be missing.
KEYS = METRICS - {"speed/cpu_utilization_pct"}


def fit(logger, tmp_path):
    callbacks = [MemoryProfiler(), BatchFinder(max_batch_size=8, objective="memory")]
    trainer = trainer_for(tmp_path, *callbacks, logger=logger, max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Net(), data(48))
    ours = ("MemoryProfiler", "no plan of the BatchFinder")
    messages = [str(one.message) for one in caught]
    assert [text for text in messages if any(word in text for word in ours)] == []
    return str(trainer.callbacks[0].plan)


def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason=MISSING)
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="memory", save_dir=str(tmp_path), offline=True)
    plan = fit(logger, tmp_path)
    summary = logger.experiment.summary
    assert set(summary.keys()) >= KEYS
    assert summary["speed/batch_size"] == 8
    logger.experiment.finish()
    (text,) = tmp_path.rglob("media/html/batch_finder/plan*.html")
    assert html.escape(plan) in text.read_text()
    (figure,) = tmp_path.rglob("media/images/batch_finder/search*.png")
    assert figure.read_bytes().startswith(PNG)


def test_mlflow(tmp_path):
    pytest.importorskip("mlflow", reason=MISSING)
    logger = MLFlowLogger(
        tracking_uri=f"sqlite:///{tmp_path}/runs.db",
        artifact_location=(tmp_path / "artifacts").as_uri(),
    )
    plan = fit(logger, tmp_path)
    client = logger.experiment
    assert set(client.get_run(logger.run_id).data.metrics) >= KEYS
    sizes = [
        metric.value for metric in client.get_metric_history(logger.run_id, "speed/batch_size")
    ]
    assert sizes == [8.0]
    (text,) = tmp_path.rglob("artifacts/batch_finder/plan.txt")
    assert text.read_text() == plan
    (figure,) = tmp_path.rglob("artifacts/batch_finder/search.png")
    assert figure.read_bytes().startswith(PNG)
