"""The contract: a run with BatchFinder is, bit for bit, the run with its size hard-coded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric

from lightning_batchmem import BatchFinder, MemoryProfiler
from tests.helpers.contract_cases import CASES, NEWER, SIZE, Case, Net, Noisy
from tests.helpers.kept_state import KEPT, PARTS
from tests.helpers.lawful import FAST
from tests.helpers.outcomes import Recorder, assert_same, left_by, outcome_of, trainer_of
from tests.helpers.size_places import PLACES

# These cases differ most in the code of the package that they run. The others are slow.
QUICK = {
    "sgd_momentum",
    "manual_two_optimizers",
    "several_loaders_of_several_sizes",
    "validation_of_fixed_sizes",
    "weights_swapped_by_hooks_of_validation",
    "target_batch_size",
    "accumulation_and_clipping",
    "bf16_mixed",
    "hparams_of_module_and_datamodule",
    "stream",
    "a_step_that_reads_callbacks_and_the_logger",
    "layers_that_are_unfrozen_in_two_steps",
    "a_later_state",
    "a_callback_whose_state_begins_in_training",
    "entangled_attributes",
    "batch_sampler_as_sampler",
    "parts_that_own_something",
    "budget",
}
# These cases have the steps of the package's own numbers, and the others only some of each kind.
ALL_STEPS = {
    "sgd_momentum",
    "manual_two_optimizers",
    "weights_swapped_by_hooks_of_validation",
    "accumulation_and_clipping",
}
assert ALL_STEPS < QUICK < CASES.keys()


# A search that reads samples in this process may leave more traces than one with a worker.
# test_find.py has searches with a worker.
@pytest.mark.usefixtures("reads_here")
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
@pytest.mark.filterwarnings("ignore:The 'file' of Lines cannot be copied")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES],
)
def test_no_trace(name: str, tmp_path: Path) -> None:
    finder = BatchFinder(**{"objective": "memory", "max_batch_size": SIZE, **CASES[name].finder})
    if name not in ALL_STEPS:
        finder.policy = FAST
    searched = outcome_of(tmp_path / "searched", CASES[name], CASES[name].start, finder)
    hard_coded = outcome_of(tmp_path / "hard", CASES[name], SIZE, None)
    assert finder.plan is not None
    assert (finder.plan.batch_size, finder.plan.limited_by) == (SIZE, CASES[name].limited_by)
    assert finder.plan.verified
    for key, value in hard_coded.items():
        assert_same(searched[key], value, key)


@pytest.mark.parametrize(
    "name",
    [
        "data_set_in_shared_memory",
        "collate_that_counts_in_shared_memory",
        "data_set_that_reads_on_in_a_file",
        "parts_that_own_something",
    ],
)
def test_no_trace_of_a_worker(name: str, tmp_path: Path) -> None:
    finder = BatchFinder(max_batch_size=SIZE, objective="memory")
    finder.policy = FAST
    searched = outcome_of(tmp_path / "searched", CASES[name], 3, finder)
    hard_coded = outcome_of(tmp_path / "hard", CASES[name], SIZE, None)
    assert finder.plan is not None
    assert finder.plan.batch_size == SIZE
    assert_same(searched, hard_coded, name)


@pytest.mark.usefixtures("reads_here")
@pytest.mark.parametrize("name", PLACES)
def test_no_trace_at_any_place_of_the_size(name: str, tmp_path: Path) -> None:
    case, place = PLACES[name]
    finder = BatchFinder(max_batch_size=SIZE, objective="memory")
    finder.policy = FAST
    searched = outcome_of(tmp_path / "searched", case, case.start, finder)
    hard_coded = outcome_of(tmp_path / "hard", case, SIZE, None)
    assert finder.plan is not None
    assert (finder.plan.batch_size, finder.plan.place) == (SIZE, place)
    assert_same(searched, hard_coded, name)


# Cases whose size, accumulation and learning rate are set in ways that differ before the loaders.
APPLIED = {
    **{
        name: CASES[name]
        for name in (
            "sgd_momentum",
            "datamodule_hparams",
            "loaders_passed_in_a_list",
            "recipe_in_fewer_batches",
            "scaled_learning_rate",
            "budget_of_loaders_that_were_passed",
        )
    },
    "constant_in_a_hook": PLACES["constant_in_a_hook"][0],
    "derived_in_setup": PLACES["derived_in_setup"][0],
}


@pytest.mark.usefixtures("reads_here")
@pytest.mark.parametrize("name", APPLIED)
def test_no_trace_of_a_plan_of_another_run(name: str, tmp_path: Path) -> None:
    case = APPLIED[name]
    path = tmp_path / "plan.json"
    options = {"objective": "memory", "max_batch_size": SIZE, **case.finder}
    finder = BatchFinder(**options, plan=path, then="exit")
    finder.policy = FAST
    with pytest.raises(SystemExit):
        outcome_of(tmp_path / "found", case, case.start, finder)
    assert not list((tmp_path / "found").rglob("*"))
    applied = outcome_of(tmp_path / "applied", case, case.start, BatchFinder(plan=path, apply=True))
    hard_coded = outcome_of(tmp_path / "hard", case, SIZE, None)
    for key, value in hard_coded.items():
        assert_same(applied[key], value, key)


# What the profiler adds to a run.
OF_PROFILER = {"files", "texts"}


@pytest.mark.usefixtures("reads_here")
@pytest.mark.parametrize("name", NEWER)
def test_no_trace_with_newer_arguments_of_lightning(name: str, tmp_path: Path) -> None:
    exists, case = NEWER[name]
    if not exists:
        pytest.skip("this version of Lightning does not have it")
    finder = BatchFinder(max_batch_size=SIZE, objective="memory")
    finder.policy = FAST
    profiler = MemoryProfiler()
    searched = outcome_of(tmp_path / "searched", case, case.start, finder)
    profiled = outcome_of(tmp_path / "profiled", case, SIZE, None, profiler)
    hard_coded = outcome_of(tmp_path / "hard", case, SIZE, None)
    assert finder.plan is not None
    assert (finder.plan.batch_size, finder.plan.limited_by) == (SIZE, case.limited_by)
    assert_same(searched, hard_coded, name)
    assert profiler.summary is not None
    assert profiler.summary.steps > 0
    for key in hard_coded.keys() - OF_PROFILER:
        assert_same(profiled[key], hard_coded[key], key)


@pytest.mark.usefixtures("reads_here")
@pytest.mark.parametrize("where", KEPT)
def test_no_trace_in_what_objects_keep(where: str, tmp_path: Path) -> None:
    finder = BatchFinder(max_batch_size=SIZE, objective="memory")
    finder.policy = FAST
    searched = outcome_of(tmp_path / "searched", KEPT[where], 3, finder)
    hard_coded = outcome_of(tmp_path / "hard", KEPT[where], SIZE, None)
    assert_same(searched, hard_coded, where)


@pytest.mark.usefixtures("reads_here")
@pytest.mark.parametrize("part", PARTS)
def test_no_trace_in_parts_of_the_trainer_that_the_user_wrote(part: str, tmp_path: Path) -> None:
    finder = BatchFinder(max_batch_size=SIZE, objective="memory")
    finder.policy = FAST
    case, make = PARTS[part]
    searched = outcome_of(tmp_path / "searched", case, 3, finder, **make())
    hard_coded = outcome_of(tmp_path / "hard", case, SIZE, None, **make())
    assert_same(searched, hard_coded, part)


class Judged(Net):
    """Evaluation steps that draw, count, log and keep."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.kept = CatMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self.layers(x + 0.01 * torch.rand(1))
        self.kept.update(scores)
        self.accuracy(scores, y)
        self.history.append(len(y))
        self.log("accuracy", self.accuracy)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.history.append(len(batch[1]))
        return self.layers(batch[0]) + torch.rand(1)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noisy(True), batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


def evaluation_of(
    folder: Path, stage: str, size: int, finder: BatchFinder | None
) -> dict[str, Any]:
    recorder = Recorder()
    trainer = trainer_of(folder, recorder, finder)
    module = Judged(size)
    returned = getattr(trainer, stage)(module, **({} if stage == "predict" else {"verbose": False}))
    return {"returned": returned, **left_by(trainer, module, recorder, folder)}


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.filterwarnings(
    "ignore:The variance of predictions",
    "ignore:Metric `CatMetric` will save all",
    "ignore:the metric 'kept'",
)
def test_no_trace_of_a_search_before_an_evaluation(stage: str, tmp_path: Path) -> None:
    finder = BatchFinder(max_batch_size=SIZE, objective="memory")
    searched = evaluation_of(tmp_path / "searched", stage, 3, finder)
    hard_coded = evaluation_of(tmp_path / "hard", stage, SIZE, None)
    assert finder.plan is not None
    assert finder.plan.batch_size == SIZE
    assert_same(searched, hard_coded, stage)


def resumed_of(
    folder: Path, lr: float, size: int, accumulate: int, finders: list[BatchFinder]
) -> dict[str, Any]:
    """One epoch, and two more in another Trainer that goes on from its checkpoint."""
    for epochs, finder in zip((1, 3), finders or [None, None], strict=True):
        recorder = Recorder()
        saver = ModelCheckpoint(folder / str(epochs), filename="last")
        arguments = {"max_epochs": epochs, "accumulate_grad_batches": accumulate, "logger": False}
        trainer = trainer_of(folder, recorder, finder, saver, **arguments)
        module = Net(size, lr=lr)
        trainer.fit(module, ckpt_path=None if epochs == 1 else folder / "1" / "last.ckpt")
    return left_by(trainer, module, recorder, folder)


@pytest.mark.filterwarnings("ignore:The dirpath has changed from")
def test_no_trace_in_a_resumed_run(tmp_path: Path) -> None:
    arguments = {"max_batch_size": SIZE, "target_batch_size": 16, "lr_scaling": "linear"}
    finders = [
        BatchFinder(**arguments, objective="memory"),
        BatchFinder(**arguments, objective="memory"),
    ]
    searched = resumed_of(tmp_path / "searched", 0.01, 4, 1, finders)
    hard_coded = resumed_of(tmp_path / "hard", 0.04, SIZE, 2, [])
    assert finders[1].plan == finders[0].plan
    assert_same(searched, hard_coded, "resumed")


class SetsAttributes(Net):
    """Sets attributes in the hooks of its loaders, and reads them in its steps."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.rows = None

    def train_dataloader(self) -> DataLoader[Any]:
        self.rows = Noisy()
        self.loader = DataLoader(self.rows, batch_size=self.batch_size, shuffle=True)
        return self.loader

    def val_dataloader(self) -> DataLoader[Any]:
        self.judged = Noisy()
        return DataLoader(self.judged, batch_size=self.batch_size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.history.append(len(self.loader) * len(self.rows))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.history.append(len(self.judged))
        super().validation_step(batch, batch_idx)


@pytest.mark.usefixtures("reads_here")
def test_steps_may_read_what_the_hooks_of_the_loaders_set(tmp_path: Path) -> None:
    finder = BatchFinder(max_batch_size=SIZE, objective="memory")
    searched = outcome_of(tmp_path / "searched", Case(SetsAttributes), 3, finder)
    hard_coded = outcome_of(tmp_path / "hard", Case(SetsAttributes), SIZE, None)
    assert_same(searched, hard_coded, "attributes")
