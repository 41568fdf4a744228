"""A checkpoint holds the plan, and a resumed run continues with it."""

import inspect
import json

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from lightning_batchmem import BatchFinder
from tests.helpers.lawful import MIB, SAMPLES, Lawful, Sizes, found_size, law, saved_plan_of

BUDGET = 500 * MIB
FOUND = found_size(BUDGET)
SMALLER = found_size(300 * MIB)

# The resumed runs do not have the ModelCheckpoint that saved the checkpoint.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`, callbacks used"
)

_saved = []


@pytest.fixture
def checkpoint(fit, device, tmp_path):
    """A copy of the checkpoint of a run that searched."""
    if not _saved:
        _saved.append(save(fit, device, tmp_path, BatchFinder(objective="memory")).read_bytes())
    path = tmp_path / "searched.ckpt"
    path.write_bytes(_saved[0])
    return path


def save(fit, device, folder, callback):
    saver = ModelCheckpoint(folder, filename="last", save_on_train_epoch_end=True)
    arguments = {"max_epochs": 1, "max_steps": -1, "enable_checkpointing": True}
    fit(Lawful(device, law, 300), callback, device, saver, **arguments)
    return folder / "last.ckpt"


def resume(fit, device, checkpoint, finder, **arguments):
    module = Lawful(device, law)
    trainer = fit(
        module, finder, device, ckpt_path=checkpoint, max_epochs=2, max_steps=-1, **arguments
    )
    return module, trainer


def test_a_resumed_run_continues_with_the_plain_plan_of_the_checkpoint_without_a_search(
    fit, device, checkpoint
):
    saved = torch.load(checkpoint, weights_only=True)["callbacks"]["BatchFinder"]
    assert json.loads(json.dumps(saved)) == saved
    finder = BatchFinder(objective="memory")
    module, _ = resume(fit, device, checkpoint, finder)
    assert finder.plan is not None
    assert finder.plan.batch_size == module.batch_size == saved["plan"]["batch_size"] == FOUND
    # The resumed run has no step but those of the second epoch.
    assert module.sizes == [FOUND] * (SAMPLES // FOUND) + [SAMPLES % FOUND]
    device.budget = 300 * MIB
    # This run does not resume, and so it searches, also at the size that the module has now.
    fit(module, finder, device)
    assert SMALLER <= module.batch_size <= 1.02 * SMALLER


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_checkpoint_is_resumed_with_and_without_objects(fit, device, checkpoint, weights_only):
    if "weights_only" not in inspect.signature(Trainer.fit).parameters:
        pytest.skip("this version of Lightning does not have it")
    finder = BatchFinder(objective="memory")
    module, _ = resume(fit, device, checkpoint, finder, weights_only=weights_only)
    assert finder.plan is not None
    assert finder.plan.batch_size == module.batch_size == FOUND
    assert set(module.sizes) == {FOUND, SAMPLES % FOUND}


@pytest.mark.parametrize(
    ("trainer", "budget_mib", "changed"),
    [
        (
            {"accumulate_grad_batches": 3},
            300,
            "the limit was 475.0 MiB and is 285.0 MiB. search_on_resume=True searches",
        ),
        ({}, 1000, "the limit was 475.0 MiB and is 950.0 MiB"),
    ],
)
def test_another_limit_is_a_warning(fit, device, checkpoint, trainer, budget_mib, changed):
    device.budget = 10**4 * MIB
    # Steps above this budget do not fail, because the device can provide more.
    device.available_bytes = lambda: budget_mib * MIB
    message = f"continues with batch size {FOUND} of the checkpoint, although {changed}"
    with pytest.warns(UserWarning, match=message):
        module, run = resume(fit, device, checkpoint, BatchFinder(objective="memory"), **trainer)
    assert module.batch_size == FOUND
    assert run.accumulate_grad_batches == trainer.get("accumulate_grad_batches", 1)


@pytest.mark.parametrize(
    ("memory_limit", "enforced_mib"), [(None, 1000), (0.9, 900), (600 * MIB, 600)]
)
def test_the_limit_of_the_resumed_run_is_enforced(
    fit, device, checkpoint, memory_limit, enforced_mib
):
    """The plan in the checkpoint has a limit of 475 MiB."""
    device.enforces_limits = True
    device.budget = 1000 * MIB
    budgets = []
    note = LambdaCallback(on_train_batch_start=lambda *_: budgets.append(device.budget))
    finder = BatchFinder(memory_limit=memory_limit, objective="memory")
    with pytest.warns(UserWarning, match="the limit was 475.0 MiB"):
        fit(
            Lawful(device, law),
            finder,
            device,
            note,
            ckpt_path=checkpoint,
            max_epochs=2,
            max_steps=-1,
        )
    assert {budget / MIB for budget in budgets} == {enforced_mib}
    assert device.budget == 1000 * MIB


def test_another_number_of_ranks_keeps_the_target(fit, device, tmp_path):
    options = {"target_batch_size": 64, "max_batch_size": 16}
    checkpoint = save(fit, device, tmp_path, BatchFinder(**options, objective="memory"))
    saved = torch.load(checkpoint, weights_only=True)
    plan = saved["callbacks"]["BatchFinder"]["plan"]
    assert (plan["batch_size"], plan["recipe"]["accumulate_grad_batches"]) == (16, 4)
    # On two ranks, two batches of each make 64 samples.
    plan["recipe"] |= {"ranks": 2, "accumulate_grad_batches": 2}
    torch.save(saved, checkpoint)
    finder = BatchFinder(**options, objective="memory")
    _, trainer = resume(fit, device, checkpoint, finder)
    assert trainer.accumulate_grad_batches == finder.plan.accumulate_grad_batches == 4
    assert (finder.plan.ranks, finder.plan.effective_batch_size) == (1, 64)


def test_a_search_on_request_and_without_a_plan(fit, device, checkpoint, tmp_path):
    module, _ = resume(
        fit, device, save(fit, device, tmp_path / "other", Sizes()), BatchFinder(objective="memory")
    )
    assert module.batch_size == FOUND
    device.budget = 300 * MIB
    module, _ = resume(
        fit, device, checkpoint, BatchFinder(search_on_resume=True, objective="memory")
    )
    assert module.batch_size == SMALLER


@pytest.mark.parametrize(
    ("budget_mib", "device_name", "changed"),
    [
        (500, "host", None),
        (495, "host", None),
        (300, "host", "the limit was 475.0 MiB and is 285.0 MiB"),
        (600, "host", "the limit was 475.0 MiB and is 570.0 MiB"),
        (500, "abacus", "the device was abacus and is CPU"),
    ],
)
def test_a_search_only_where_device_or_limit_changed(
    fit, device, checkpoint, caplog, budget_mib, device_name, changed
):
    saved = torch.load(checkpoint, weights_only=True)
    saved["callbacks"]["BatchFinder"]["plan"]["device"] = device_name
    torch.save(saved, checkpoint)
    device.budget = budget_mib * MIB
    # Another argument is no reason for a search.
    finder = BatchFinder(search_on_resume="if_changed", min_steps_per_epoch=9, objective="memory")
    with caplog.at_level("INFO", "lightning.pytorch"):
        module, _ = resume(fit, device, checkpoint, finder)
    lines = [record.message for record in caplog.records if "searches again" in record.message]
    assert lines == ([] if changed is None else [f"BatchFinder searches again: {changed}"])
    assert module.batch_size == (FOUND if changed is None else found_size(budget_mib * MIB))


@pytest.mark.parametrize("value", ["changed", 1])
def test_a_wrong_value_is_an_error(value):
    with pytest.raises(
        ValueError, match='search_on_resume must be True, False or "if_changed", got'
    ):
        BatchFinder(search_on_resume=value, objective="memory")


def test_a_strategy_that_restores_late_searches_again_with_a_warning(
    fit, device, checkpoint, monkeypatch
):
    late = "lightning.pytorch.strategies.SingleDeviceStrategy.restore_checkpoint_after_setup"
    monkeypatch.setattr(late, True, raising=False)
    device.budget = 300 * MIB
    message = rf"searched again and uses batch size {SMALLER}, .* \(batch size {FOUND}\) after"
    with pytest.warns(UserWarning, match=message):
        module, _ = resume(fit, device, checkpoint, BatchFinder(objective="memory"))
    assert module.batch_size == SMALLER


def test_a_project_without_a_place_for_the_size(fit, device, checkpoint):
    with pytest.raises(
        ValueError,
        match=r"must name an attribute of the module, .* got 'size'\. Leave batch_arg_name out",
    ):
        resume(fit, device, checkpoint, BatchFinder(batch_arg_name="size", objective="memory"))


@pytest.mark.parametrize(
    "damaged",
    [None, [], {}, {"batch_size": 64}, saved_plan_of(0), {"batch_size": {1}}],
)
def test_a_damaged_plan_in_a_checkpoint_is_an_error(fit, device, checkpoint, damaged):
    saved = torch.load(checkpoint, weights_only=True)
    saved["callbacks"]["BatchFinder"]["plan"] = damaged
    torch.save(saved, checkpoint)
    with pytest.raises(ValueError, match="the plan of BatchFinder in the checkpoint cannot be rea"):
        resume(fit, device, checkpoint, BatchFinder(objective="memory"))
    finder = BatchFinder(search_on_resume=True, objective="memory")
    module, _ = resume(fit, device, checkpoint, finder)
    assert module.batch_size == FOUND
