"""Libraries whose Trainer is the one of ``pytorch_lightning``."""

import numpy as np
import pytest

from tests.ecosystem.twice import MARKS, MISSING, train_twice

pytest.importorskip("pytorch_lightning", reason=MISSING)

from lightning_batchmem.pytorch_lightning import BatchFinder, MemoryProfiler

pytestmark = MARKS
WAVE = np.sin(np.arange(2000, dtype=np.float32) / 7)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    # The libraries write to the current folder.
    monkeypatch.chdir(tmp_path)


def test_darts():
    darts = pytest.importorskip("darts", reason=MISSING)
    models = pytest.importorskip("darts.models", reason=MISSING)

    def train(size, callbacks):
        network = {"num_stacks": 2, "num_blocks": 1, "layer_widths": 16, "random_state": 0}
        options = {"accelerator": "cpu", "callbacks": callbacks, "enable_progress_bar": False}
        model = models.NBEATSModel(
            24, 4, n_epochs=2, batch_size=size, pl_trainer_kwargs=options, **network
        )
        model.fit(darts.TimeSeries.from_values(WAVE[:400]))
        return model.model

    train_twice(train, BatchFinder, MemoryProfiler)


def test_neuralforecast():
    pandas = pytest.importorskip("pandas", reason=MISSING)
    neuralforecast = pytest.importorskip("neuralforecast", reason=MISSING)
    models = pytest.importorskip("neuralforecast.models", reason=MISSING)
    days = pandas.date_range("2020-01-01", periods=50)
    data = pandas.DataFrame(
        {"unique_id": np.repeat(np.arange(40), 50), "ds": np.tile(days, 40), "y": WAVE}
    )

    def train(size, callbacks):
        options = {
            "accelerator": "cpu",
            "callbacks": callbacks,
            "enable_progress_bar": False,
            "logger": False,
        }
        model = models.NHITS(
            4, 12, max_steps=6, batch_size=size, mlp_units=[[16, 16]] * 3, **options
        )
        forecast = neuralforecast.NeuralForecast([model], freq="D")
        forecast.fit(data)
        return forecast.models[0]

    train_twice(train, BatchFinder, MemoryProfiler)


def test_pytorch_tabular():
    pandas = pytest.importorskip("pandas", reason=MISSING)
    tabular = pytest.importorskip("pytorch_tabular", reason=MISSING)
    config = pytest.importorskip("pytorch_tabular.config", reason=MISSING)
    models = pytest.importorskip("pytorch_tabular.models", reason=MISSING)
    data = pandas.DataFrame(
        {"a": WAVE[:400], "b": np.arange(400) % 3, "y": (WAVE[:400] > 0).astype(int)}
    )

    def train(size, callbacks):
        options = {
            "accelerator": "cpu",
            "progress_bar": "none",
            "early_stopping": None,
            "checkpoints": None,
        }
        model = tabular.TabularModel(
            data_config=config.DataConfig(
                target=["y"], continuous_cols=["a"], categorical_cols=["b"]
            ),
            model_config=models.CategoryEmbeddingModelConfig(task="classification", layers="16-16"),
            optimizer_config=config.OptimizerConfig(),
            trainer_config=config.TrainerConfig(
                batch_size=size, max_epochs=2, load_best=False, **options
            ),
            verbose=False,
        )
        model.fit(train=data, callbacks=callbacks)
        return model.model

    train_twice(train, BatchFinder, MemoryProfiler)
