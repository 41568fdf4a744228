"""Request, attach and discard the dataloaders of a stage.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from lightning.pytorch import Trainer

# _DataLoaderSource is private in lightning 2.5.0 to 2.6.6.
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_batchmem._lightning.trainer_state import lightning_name
from lightning_batchmem.batches.loaders import BudgetLoader, LoaderInfo, StageLoaders


def validation_loop(trainer: Trainer) -> Any:
    """The ``_EvaluationLoop`` of either Lightning package that validates during ``fit``."""
    return trainer.fit_loop.epoch_loop.val_loop


def stage_loop(trainer: Trainer) -> Any:
    """The loop of ``fit``, ``validate``, ``test`` or ``predict``, whichever runs."""
    # _active_loop is private in lightning 2.5.0 to 2.6.6.
    return trainer._active_loop


@dataclass(frozen=True)
class DataSource:
    """Origin of the loaders of one stage: a hook, or an argument of a method such as ``fit``."""

    trainer: Trainer
    source: _DataLoaderSource
    # Lightning combines several loaders in this mode, unless they are in a CombinedLoader already.
    default_mode: Literal["max_size_cycle", "sequential"]
    # Attributes that the hook has set while the loaders were requested.
    _set_by_hook: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def passed(self) -> bool:
        return not self.source.is_module()

    @property
    def owner(self) -> Any:
        """The module or datamodule whose hook it is."""
        return self.source.instance

    @property
    def hook(self) -> str:
        return self.source.name

    @property
    def stage(self) -> str:
        """The name of the stage in hooks and in ``limit_*_batches``.

        It is ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.
        """
        return self.hook.removesuffix("_dataloader")

    @property
    def is_empty(self) -> bool:
        """Whether there is an empty list in place of loaders."""
        return all(isinstance(loader, list | tuple | dict) for loader in self._combined().flattened)

    def passed_loaders(self) -> list[DataLoader[Any]]:
        loaders = self._combined().flattened if self.passed else []
        return [loader for loader in loaders if isinstance(loader, DataLoader)]

    def request(self) -> CombinedLoader:
        """The loaders of the hook or the argument, combined as in Lightning's ``setup_data``."""
        before = dict(self._attributes)
        combined = self._combined()
        for name, value in self._attributes.items():
            if name not in before or before[name] is not value:
                self._set_by_hook[name] = value
        for loader in combined.flattened:
            if not isinstance(loader, DataLoader):
                raise ValueError(
                    f"the loaders of {self.hook} must be torch DataLoaders for BatchFinder, got"
                    f" {type(loader).__name__}. Return a torch DataLoader of single samples from"
                    " the hook, or pass one to fit; where a library makes the loaders, use"
                    " MemoryProfiler alone, and set the batch size by hand."
                )
        return combined

    def set_attributes_of_hook(self) -> None:
        """Set what the hook has set on its owner, after the owner was restored.

        Steps may read it, such as a data set that is made in the hook. A number may be the one of
        another batch size.
        """
        self._attributes.update(self._set_by_hook)

    @property
    def _attributes(self) -> dict[str, Any]:
        """The attributes of the owner of a hook."""
        return {} if self.passed else vars(self.owner)

    def _combined(self) -> CombinedLoader:
        request = lightning_name(
            self.trainer, "trainer.connectors.data_connector._request_dataloader"
        )
        combined_class = lightning_name(self.trainer, "utilities.CombinedLoader")
        requested: Any = request(self.source)
        if not isinstance(requested, combined_class):
            requested = combined_class(requested, self.default_mode)
        return cast("CombinedLoader", requested)


def replicas_of(trainer: Trainer, loader: DataLoader[Any]) -> int:
    """Number of ranks among which Lightning divides the samples of ``loader``."""
    # _requires_distributed_sampler is private in lightning 2.5.0 to 2.6.6.
    if not trainer._data_connector._requires_distributed_sampler(loader):
        return 1
    return int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))


def made_for_ranks(trainer: Trainer, loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader as Lightning makes it again for this rank; the loader itself on a single one."""
    # _prepare_dataloader is private in lightning 2.5.0 to 2.6.6.
    made = trainer._data_connector._prepare_dataloader(loader, False, RunningStage.TRAINING)
    return cast("DataLoader[Any]", made)


def train_source(trainer: Trainer) -> DataSource:
    return DataSource(trainer, trainer.fit_loop._data_source, "max_size_cycle")


def validation_source(trainer: Trainer) -> DataSource:
    return DataSource(trainer, validation_loop(trainer)._data_source, "sequential")


def stage_source(trainer: Trainer) -> DataSource:
    return DataSource(trainer, stage_loop(trainer)._data_source, "sequential")


def combined_mode(combined: CombinedLoader) -> str:
    # _mode is private in lightning 2.5.0 to 2.6.6.
    return combined._mode


def stage_loaders(
    combined: CombinedLoader, sized: Sequence[LoaderInfo | BudgetLoader], hook: str
) -> StageLoaders:
    """The loaders of a stage, one by one and as Lightning combines them."""
    # _spec is private in lightning 2.5.0 to 2.6.6.
    return StageLoaders(combined, tuple(sized), combined_mode(combined), combined._spec, hook)


def attach_loaders(
    trainer: Trainer, training: StageLoaders, validation: StageLoaders | None, batch_size: int
) -> None:
    """Attach loaders and their numbers of batches to the trainer, where hooks may read them.

    No worker is started.
    """
    for stage in (training, validation):
        if stage is not None:
            stage.set_sizes(batch_size)
    trainer.fit_loop._combined_loader = training.combined
    trainer.fit_loop.max_batches = training.batches(batch_size)
    val_loop = validation_loop(trainer)
    if validation is not None:
        val_loop._combined_loader = validation.combined
        val_loop._max_batches = [loader.batches(batch_size) for loader in validation.sized]
    elif trainer.enable_validation:
        # This builds the validation loaders but no iterator, so no worker is started.
        val_loop.setup_data()


def has_train_loader(trainer: Trainer) -> bool:
    return trainer.fit_loop._combined_loader is not None


def discard_train_loader(trainer: Trainer) -> None:
    """Discard the training loader and its workers, so that Lightning requests the loader again."""
    fit_loop = trainer.fit_loop
    if fit_loop._data_fetcher is not None:
        fit_loop._data_fetcher.teardown()
    fit_loop._data_fetcher = None
    fit_loop._combined_loader = None
