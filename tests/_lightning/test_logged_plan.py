"""A plan in loggers: TensorBoard's is real, the others have the signatures of real ones."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_batchmem import MemoryProfiler, Note, Plan
from lightning_batchmem._lightning.logged_plan import log_plan
from tests.helpers.profiled import MIB, Net, Planned, Recorder, Validated, data, trainer_for

PLAN = Planned().plan
# These names are public: people look for them.
TEXT = "batch_finder/plan"
FIGURE = "batch_finder/search"


def check_figure(figure):
    """Raise an error unless W&B, MLflow and Comet would take the figure."""
    assert isinstance(figure, Figure)
    # Source: `is_matplotlib_typename` in wandb 0.31.
    assert type(figure).__module__.startswith("matplotlib.")


class MLFlowLogger(Recorder):
    """Source of the signatures: mlflow 3.17."""

    run_id = "1"

    def __init__(self, error=None):
        super().__init__()
        self.shown = {}
        self.error = error
        self.client = SimpleNamespace(log_text=self.log_text, log_figure=self.log_figure)

    @property
    def experiment(self):
        return self.client

    def log_text(self, run_id, text, artifact_file):
        if self.error:
            raise self.error
        self.shown[artifact_file] = (run_id, text)

    def log_figure(self, run_id, figure, artifact_file, *, save_kwargs=None):
        check_figure(figure)
        self.shown[artifact_file] = (run_id, "figure")


class OfProject(MLFlowLogger):
    pass


class WandbLogger(Recorder):
    """Source of the signatures: lightning 2.6."""

    def __init__(self):
        super().__init__()
        self.shown = {}

    def log_metrics(self, metrics, step=None):
        self.shown.update({key: (step, value) for key, value in metrics.items()})

    def log_image(self, key, images, step=None, **kwargs):
        assert isinstance(images, list)
        for figure in images:
            check_figure(figure)
        self.log_metrics({key: "figure"}, step)


class CometLogger(Recorder):
    """Source of the signatures: comet_ml 3.58."""

    def __init__(self):
        super().__init__()
        self.shown = {}
        self.client = SimpleNamespace(log_text=self.log_text, log_figure=self.log_figure)

    @property
    def experiment(self):
        return self.client

    def log_text(self, text, step=None, metadata=None):
        self.shown[metadata["name"]] = (step, text)

    def log_figure(self, figure_name=None, figure=None, overwrite=False, step=None):
        check_figure(figure)
        self.shown[figure_name] = (step, "figure")


def events_of(logger):
    events = EventAccumulator(str(logger.log_dir))
    events.Reload()
    return events


def test_tensorboard_gets_the_plan_and_the_figure_once(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="tb")
    trainer = trainer_for(tmp_path, MemoryProfiler(), Planned(), logger=logger)
    trainer.validate(Validated(), data(), verbose=False)
    trainer.fit(Validated(), data())
    trainer.validate(Validated(), data(), verbose=False)
    events = events_of(logger)
    (text,) = events.Tensors(f"{TEXT}/text_summary")
    assert text.tensor_proto.string_val[0].decode() == f"```\n{PLAN}\n```"
    (image,) = events.Images(FIGURE)
    assert (image.width, image.height) == (640, 480)
    assert (text.step, image.step) == (0, 0)


@pytest.mark.parametrize("logger", [MLFlowLogger(), OfProject()])
def test_mlflow_gets_files(logger):
    log_plan(PLAN, [logger], 7)
    assert logger.shown == {f"{TEXT}.txt": ("1", str(PLAN)), f"{FIGURE}.png": ("1", "figure")}


def test_wandb_gets_html_with_aligned_columns(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Html=lambda text: ("html", text)))
    logger = WandbLogger()
    plan = PLAN.with_notes(Note("training", "4 -> 8"))
    log_plan(plan, [logger], 7)
    text = f"<pre>{str(plan).replace('>', '&gt;')}</pre>"
    assert logger.shown == {TEXT: (7, ("html", text)), FIGURE: (7, "figure")}


def test_comet_gets_both():
    logger = CometLogger()
    log_plan(PLAN, [logger], 7)
    assert logger.shown == {TEXT: (7, str(PLAN)), FIGURE: (7, "figure")}


@pytest.mark.parametrize("reason", ["no matplotlib", "no size was measured"])
def test_without_a_figure_there_is_the_text(monkeypatch, reason):
    plan = PLAN
    if reason == "no matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    else:
        plan = replace(PLAN, trials=())
    logger = MLFlowLogger()
    log_plan(plan, [logger], 0)
    assert set(logger.shown) == {f"{TEXT}.txt"}


def test_a_logger_that_raises_keeps_its_metrics_and_ends_nothing(tmp_path, device_memory):
    broken, other = MLFlowLogger(PermissionError("no artifacts")), MLFlowLogger()
    trainer = trainer_for(tmp_path, MemoryProfiler(), Planned(), logger=[broken, other])
    message = "^MLFlowLogger gets no plan of the BatchFinder: PermissionError: no artifacts$"
    with pytest.warns(UserWarning, match=message):
        trainer.fit(Net(), data())
    assert (len(broken.ours), len(other.ours)) == (6, 6)
    assert (len(broken.shown), len(other.shown)) == (0, 2)


def test_what_a_logger_takes_for_the_plan_is_no_peak_of_the_run(tmp_path, device_memory):
    class Large(MLFlowLogger):
        def log_text(self, run_id, text, artifact_file):
            device_memory.use(500 * MIB)
            device_memory.free()
            super().log_text(run_id, text, artifact_file)

    logger = Large()
    profiler = MemoryProfiler()
    trainer_for(tmp_path, profiler, Planned(), logger=logger).fit(Net(), data())
    assert len(logger.shown) == 2
    assert profiler.run_peak_bytes == MIB


@pytest.mark.parametrize(
    ("profiler", "logger", "options"),
    [
        (MemoryProfiler, CSVLogger("."), {}),
        (MemoryProfiler, MLFlowLogger(), {"fast_dev_run": 2}),
        (MemoryProfiler, MLFlowLogger(), {"log_every_n_steps": 0}),
        # A logger of the project may not expect it.
        (MemoryProfiler.optional, MLFlowLogger(), {}),
    ],
)
@pytest.mark.filterwarnings("ignore:MLFlowLogger gets no metrics")
def test_nothing_is_drawn_for_others(tmp_path, monkeypatch, profiler, logger, options):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Plan, "plot", lambda plan: pytest.fail("drawn"))
    trainer_for(tmp_path, profiler(), Planned(), logger=logger, **options).fit(Net(), data())
    assert getattr(logger, "shown", {}) == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_sends_the_plan(tmp_path, monkeypatch, rank):
    monkeypatch.setattr(Trainer, "is_global_zero", rank == 0)
    logger = MLFlowLogger()
    trainer_for(tmp_path, MemoryProfiler(), Planned(), logger=logger).fit(Net(), data())
    assert len(logger.shown) == (2 if rank == 0 else 0)
