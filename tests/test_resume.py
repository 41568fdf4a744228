"""The plan travels in the checkpoint, and a resumed run goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_batchmem import BatchFinder
from tests.lawful import MIB, Lawful, Sizes, law

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used")  # the saver


@pytest.fixture
def checkpoint(fit: Any, fake_device: Any, tmp_path: Path) -> Path:
    """Of a run that searched: 400 samples under 500 MiB."""
    device_memory = fake_device(budget_bytes=500 * MIB)
    saver = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    fit(
        Lawful(device_memory, law),
        BatchFinder(),
        device_memory,
        saver,
        max_epochs=1,
        max_steps=-1,
        enable_checkpointing=True,
    )
    return tmp_path / "last.ckpt"


def resume(fit: Any, device_memory: Any, checkpoint: Path, finder: BatchFinder) -> tuple[Lawful, Sizes]:
    module, sizes = Lawful(device_memory, law), Sizes()
    fit(module, finder, device_memory, sizes, ckpt_path=checkpoint, max_epochs=2, max_steps=-1)
    return module, sizes


def test_the_plan_in_the_checkpoint_is_plain(checkpoint: Path) -> None:
    saved = torch.load(checkpoint, weights_only=True)["callbacks"]["BatchFinder"]

    def check(value: object) -> None:
        assert type(value) in (dict, list, str, int, float, bool, type(None)), value
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            check(inner)

    check(saved)
    assert saved["plan"]["batch_size"] == 400


def test_a_resumed_run_goes_on_with_the_plan_and_probes_nothing(fit: Any, fake_device: Any, checkpoint: Path) -> None:
    finder = BatchFinder()
    module, sizes = resume(fit, fake_device(budget_bytes=500 * MIB), checkpoint, finder)
    assert finder.plan is not None
    assert finder.plan.batch_size == module.batch_size == 400
    assert sizes.seen == {400, 200}  # 5000 samples: the last batch is short
    assert module.sizes == [400] * 12 + [200]  # no step but those of the second epoch


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (300, r"although it held 499.0 MiB and the limit is 300.0 MiB; search_on_resume=True searches again"),
        (1000, r"although the limit was 500.0 MiB and is 1,000.0 MiB"),
    ],
)
def test_another_limit_is_said(fit: Any, fake_device: Any, checkpoint: Path, budget: int, said: str) -> None:
    device_memory = fake_device(budget_bytes=budget * MIB)
    device_memory.budget = 10**4 * MIB  # what the device really has
    device_memory.budget_bytes = lambda: budget * MIB
    with pytest.warns(UserWarning, match=said):
        module, _ = resume(fit, device_memory, checkpoint, BatchFinder())
    assert module.batch_size == 400


def test_a_size_above_what_is_allowed_now_is_said(fit: Any, fake_device: Any, checkpoint: Path) -> None:
    with pytest.warns(
        UserWarning, match="batch size 400, although max_batch_size was None and is 100; search_on_resume"
    ):
        resume(fit, fake_device(budget_bytes=500 * MIB), checkpoint, BatchFinder(max_batch_size=100))


def test_another_device_is_said(fit: Any, fake_device: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_batchmem.batch_finder.device_name", lambda device: "abacus")
    with pytest.warns(UserWarning, match="although it was found on host and this is abacus"):
        resume(fit, fake_device(budget_bytes=500 * MIB), checkpoint, BatchFinder())


def test_a_search_is_made_on_request(fit: Any, fake_device: Any, checkpoint: Path) -> None:
    finder = BatchFinder(search_on_resume=True)
    module, sizes = resume(fit, fake_device(budget_bytes=300 * MIB), checkpoint, finder)
    assert module.batch_size == 200
    assert sizes.seen == {200}


def test_a_fit_that_does_not_resume_searches(fit: Any, fake_device: Any, checkpoint: Path) -> None:
    finder = BatchFinder()
    resume(fit, fake_device(budget_bytes=500 * MIB), checkpoint, finder)
    device_memory = fake_device(budget_bytes=300 * MIB)
    module = Lawful(device_memory, law)
    fit(module, finder, device_memory)
    assert module.batch_size == 200


def test_a_checkpoint_without_a_plan_is_searched_for(fit: Any, fake_device: Any, tmp_path: Path) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    module, saver = Lawful(device_memory, law), ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    fit(module, Sizes(), device_memory, saver, max_epochs=1, max_steps=-1, enable_checkpointing=True)
    module, _ = resume(fit, device_memory, tmp_path / "last.ckpt", BatchFinder())
    assert module.batch_size == 400


def test_other_wishes_are_said_and_the_trainers_accumulation_is_kept(
    fit: Any, fake_device: Any, checkpoint: Path
) -> None:
    module = Lawful(fake_device(budget_bytes=500 * MIB), law)
    with pytest.warns(UserWarning, match="although multiple_of was None and is 4"):
        trainer = fit(
            module,
            BatchFinder(multiple_of=4),
            fake_device(budget_bytes=500 * MIB),
            ckpt_path=checkpoint,
            max_epochs=2,
            max_steps=-1,
            accumulate_grad_batches=3,
        )
    assert trainer.accumulate_grad_batches == 3
    assert module.batch_size == 400


def test_a_project_that_cannot_take_the_size_is_said(fit: Any, fake_device: Any, checkpoint: Path) -> None:
    device_memory = fake_device(budget_bytes=500 * MIB)
    with pytest.raises(ValueError, match="got 'size', which none of them has"):
        resume(fit, device_memory, checkpoint, BatchFinder(batch_arg_name="size"))
