from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from lightning_batchmem._lightning.data_source import (
    DataSource,
    attach_loaders,
    combined_mode,
    discard_train_loader,
    in_structure,
    loader_batch_size,
    set_loader_batch_size,
    stage_source,
    train_source,
    validation_source,
)


def loader(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(16, 1)), batch_size=batch_size)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return sum(parameter.sum() for parameter in self.parameters())  # type: ignore[return-value]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> int:
        return 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithHooks(Module):
    def train_dataloader(self) -> Any:
        return {"a": loader(), "b": [loader(), loader()]}

    def val_dataloader(self) -> Any:
        return [loader(), loader()]

    def test_dataloader(self) -> Any:
        return loader()

    def predict_dataloader(self) -> Any:
        return CombinedLoader([loader()], "sequential")


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(2)


class Look(Callback):
    """Looks at the trainer when a run begins."""

    def __init__(self, look: Callable[[Trainer], None]) -> None:
        self._look = look
        self.looked = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer)
        self.looked = True

    on_validation_start = on_test_start = on_predict_start = on_fit_start


@pytest.fixture
def looking() -> Callable[[Callable[[Trainer], None]], Trainer]:
    def make(look: Callable[[Trainer], None]) -> Trainer:
        return Trainer(
            callbacks=[Look(look)],
            max_epochs=1,
            limit_train_batches=1,
            num_sanity_val_steps=0,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    return make


def looked(trainer: Trainer) -> bool:
    return all(one.looked for one in trainer.callbacks if isinstance(one, Look))  # type: ignore[attr-defined]


def test_hooks_are_requested_and_combined_as_in_lightning(looking: Any) -> None:
    def look(trainer: Trainer) -> None:
        if trainer.validating:
            return  # of the fit
        source = train_source(trainer)
        assert (source.passed, source.hook, source.stage) == (False, "train_dataloader", "train")
        assert not source.is_fit_validation
        combined = source.request()
        assert combined_mode(combined) == "max_size_cycle"
        assert [len(one.dataset) for one in combined.flattened] == [16] * 3
        assert in_structure(combined, [1, 2, 3]) == {"a": 1, "b": [2, 3]}
        source = validation_source(trainer)
        assert (source.passed, source.hook, source.stage) == (False, "val_dataloader", "val")
        assert source.is_fit_validation
        assert combined_mode(source.request()) == "sequential"

    trainer = looking(look)
    trainer.fit(WithHooks())
    assert looked(trainer)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_loop_of_the_running_stage(looking: Any, stage: str) -> None:
    prefix = "val" if stage == "validate" else stage
    passed = loader()
    sources: list[DataSource] = []
    trainer = looking(lambda trainer: sources.append(stage_source(trainer)))
    getattr(trainer, stage)(WithHooks())
    getattr(trainer, stage)(WithHooks(), dataloaders=passed)
    hook, direct = sources
    assert (hook.hook, hook.stage) == (direct.hook, direct.stage) == (f"{prefix}_dataloader", prefix)
    assert not hook.is_fit_validation
    assert direct.request().flattened == [passed]
    assert combined_mode(direct.request()) == "sequential"


def test_a_passed_combined_loader_is_not_copied(looking: Any) -> None:
    combined = CombinedLoader([loader(), loader()], "min_size")

    def look(trainer: Trainer) -> None:
        assert train_source(trainer).passed
        assert train_source(trainer).request() is combined
        assert combined_mode(combined) == "min_size"
        attach_loaders(trainer, combined, 7.0, None, [])
        assert trainer.num_training_batches == 7
        discard_train_loader(trainer)

    trainer = looking(look)
    trainer.fit(Module(), train_dataloaders=combined)
    assert looked(trainer)
    assert trainer.fit_loop._combined_loader is combined


@pytest.mark.parametrize(("given", "kind"), [([loader(), range(3)], "range"), ([[torch.zeros(1)]], "Tensor")])
def test_other_loaders_than_torchs_are_refused(looking: Any, given: Any, kind: str) -> None:
    trainer = looking(lambda trainer: train_source(trainer).request())
    with pytest.raises(ValueError, match=rf"loaders of train_dataloader must be torch DataLoaders .*, got {kind};"):
        trainer.fit(Module(), train_dataloaders=given)


class Renamed(DataLoader):
    """A subclass with arguments of its own."""

    def __init__(self, secret: int, dataset: Any, size: int) -> None:
        super().__init__(dataset, batch_size=size)
        self.secret = secret


def test_setting_the_size_of_a_loader_in_place() -> None:
    dataset = TensorDataset(torch.arange(10))
    loaders = [
        DataLoader(dataset, batch_size=2),
        Renamed(7, dataset, 2),
        DataLoader(dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), 2, drop_last=False)),
    ]
    for loader in loaders:
        set_loader_batch_size(loader, 4)
        assert loader_batch_size(loader) == 4
        assert [len(batch[0]) for batch in loader] == [4, 4, 2]
    assert loader_batch_size(DataLoader(dataset, batch_size=None)) is None
    assert loader_batch_size(DataLoader(dataset, batch_sampler=[[0], [1, 2]])) is None
