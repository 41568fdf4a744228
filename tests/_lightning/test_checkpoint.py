from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lightning_batchmem.batch_finder
from lightning_batchmem import BatchFinder
from lightning_batchmem._lightning.checkpoint import callback_states, restored_after_setup
from tests.lawful import MIB, Lawful, Sizes, law


def test_the_states_in_a_file_and_in_a_directory(tmp_path: Any) -> None:
    torch.save({"callbacks": {"One": {"a": 1}}, "state_dict": {}}, tmp_path / "one.ckpt")
    (tmp_path / "sharded.ckpt").mkdir()
    torch.save({"callbacks": {"Two": {"b": 2}}}, tmp_path / "sharded.ckpt" / "meta.pt")
    torch.save([1, 2], tmp_path / "other.pt")
    assert callback_states(tmp_path / "one.ckpt") == {"One": {"a": 1}}
    assert callback_states(tmp_path / "sharded.ckpt") == {"Two": {"b": 2}}
    assert callback_states(tmp_path / "other.pt") == {}
    with pytest.raises(OSError, match="missing"):
        callback_states(tmp_path / "missing.ckpt")


@pytest.mark.parametrize(("late", "expected"), [(True, "a.ckpt"), (False, None)])
def test_only_a_strategy_that_restores_late_has_to_be_helped(late: bool, expected: str | None) -> None:
    class Running:
        strategy = SimpleNamespace(restore_checkpoint_after_setup=late)

        def _run(self, ckpt_path: str) -> Any:
            return restored_after_setup(self)  # type: ignore[arg-type]

    found = Running()._run("a.ckpt")
    assert (None if found is None else str(found)) == expected
    assert restored_after_setup(Running()) is None  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_run_whose_strategy_restores_late_goes_on_with_its_size(
    fit: Any, fake_device: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_memory = fake_device(budget_bytes=200 * MIB)
    trainer = fit(Lawful(device_memory, law), BatchFinder(), device_memory)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    monkeypatch.setattr(
        "lightning.pytorch.strategies.SingleDeviceStrategy.restore_checkpoint_after_setup", True, raising=False
    )
    sizes, finder, module = Sizes(), BatchFinder(), Lawful(device_memory, law)
    monkeypatch.setattr(lightning_batchmem.batch_finder.BatchSizeSearch, "training", None)  # no search
    fit(module, finder, device_memory, sizes, max_steps=6, ckpt_path=tmp_path / "last.ckpt")
    assert sizes.seen == {finder.plan.batch_size} == {96}


def test_a_checkpoint_that_cannot_be_looked_into_is_said(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_batchmem.batch_finder, "restored_after_setup", lambda trainer: tmp_path / "no.ckpt")
    with pytest.warns(UserWarning, match="searches again"):
        BatchFinder()._look_into_checkpoint(
            SimpleNamespace(is_global_zero=True, strategy=SimpleNamespace(broadcast=lambda state: state))  # type: ignore[arg-type]
        )
