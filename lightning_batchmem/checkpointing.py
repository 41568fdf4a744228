"""Which modules to checkpoint: the blocks that keep the most activations for backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from torch import nn

# This private module exists in torch 2.5 to 2.14.
from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint_module

from lightning_batchmem.devices.module_memory import ModuleStorages
from lightning_batchmem.devices.moment_lines import moment_lines
from lightning_batchmem.module_probe import storages_of_steps
from lightning_batchmem.plan.records import PHASES

_SIZES = (2, 8)
# These classes group blocks.
_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Blocks:
    """Repeated modules of one class.

    Args:
        class_name: the name of their class.
        activations_bytes: name of each block -> bytes that it keeps for backward, the largest
            first. Modules with a block of the same class inside them are left out.
    """

    class_name: str
    activations_bytes: Mapping[str, int]

    @property
    def names(self) -> list[str]:
        """The names of the blocks, that with the largest activations first."""
        return list(self.activations_bytes)

    @property
    def saved_bytes(self) -> int:
        """The most that checkpointing can save: backward computes one block at a time again."""
        sizes = self.activations_bytes.values()
        return sum(sizes) - max(sizes)

    def text(self, number: int) -> str:
        """Return for example ``"4 of 6 Block"``, for the blocks that are checkpointed."""
        count = len(self.activations_bytes)
        if number == count:
            return f"{count} x {self.class_name}"
        return f"{number} of {count} {self.class_name}"


class MeasuredSteps(NamedTuple):
    """The live bytes of a training step at two sizes, divided among the modules.

    Attributes:
        small: the step at the smaller size.
        large: the step at the larger size.
    """

    small: ModuleStorages
    large: ModuleStorages

    def peak_bytes(self, batch_size: int) -> int:
        """Return the predicted peak of the live bytes at a size."""
        lines = [
            line for phase in PHASES for line in moment_lines(phase, self.small, self.large, _SIZES)
        ]
        return max(line.fixed_bytes + line.sample_bytes * batch_size for line in lines)


def measured_steps(
    trainer: Trainer, model: LightningModule, data: Any, options: Mapping[str, Any]
) -> MeasuredSteps:
    """Measure a training step at two sizes; model, data and Trainer are as before afterwards.

    Raises:
        ValueError: if the step cannot be measured.
    """
    return MeasuredSteps(*storages_of_steps(trainer, model, data, _SIZES, options=options))


def measured_blocks(
    trainer: Trainer, model: LightningModule, data: Any, options: Mapping[str, Any]
) -> Blocks:
    """Measure a step, and return the blocks of the class whose checkpointing saves most.

    Model, data and Trainer are as before afterwards.

    Raises:
        ValueError: if no class of blocks is repeated, or the step cannot be measured.
    """
    # A wrong model should fail before its steps run.
    _repeated_classes(model)
    (storages,) = storages_of_steps(trainer, model, data, _SIZES[:1], options=options)
    return best_blocks(model, storages.activations_by_module())


def best_blocks(model: nn.Module, activations_bytes: Mapping[str, int]) -> Blocks:
    """Return the blocks of the class whose checkpointing saves most.

    Args:
        model: the root of all modules.
        activations_bytes: name of a module -> bytes that it keeps for backward, without its
            submodules.

    Raises:
        ValueError: if no class of blocks is repeated.
    """
    all_blocks = []
    for kind, names in _repeated_classes(model).items():
        sizes = {
            name: sum(
                count
                for inner, count in activations_bytes.items()
                if inner == name or inner.startswith(f"{name}.")
            )
            for name in names
        }
        largest_first = sorted(sizes.items(), key=lambda item: -item[1])
        all_blocks.append(Blocks(kind.__name__, dict(largest_first)))
    # Of classes that save the same, the one with more blocks computes less again at once, and a
    # Sequential only groups blocks of another class.
    return max(
        all_blocks,
        key=lambda blocks: (
            blocks.saved_bytes,
            len(blocks.names),
            blocks.class_name != nn.Sequential.__name__,
        ),
    )


def checkpoint_classes(model: nn.Module, classes: Collection[type[nn.Module]]) -> None:
    """Checkpoint every module of these classes.

    Raises:
        ValueError: if there is none.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, tuple(classes))]
    if not names:
        kinds = ", ".join(kind.__name__ for kind in classes)
        raise ValueError(
            f"checkpoint must name classes of modules in the model, got {kinds}, which it does not"
            " have"
        )
    checkpoint_names(model, names)


def checkpoint_names(model: nn.Module, names: Iterable[str]) -> None:
    """Checkpoint the modules with these names: backward computes their activations again."""
    for name in names:
        checkpoint_module(model.get_submodule(name))


def _repeated_classes(model: nn.Module) -> dict[type[nn.Module], list[str]]:
    """The names of the blocks of each class of which the model has several.

    A block has submodules, and no other block of its class inside it.
    """
    names_of = defaultdict[type[nn.Module], list[str]](list)
    for name, module in model.named_modules():
        if not name or not any(module.children()) or isinstance(module, _LISTS):
            continue
        if not any(type(inner) is type(module) for inner in list(module.modules())[1:]):
            names_of[type(module)].append(name)
    repeated = {kind: names for kind, names in names_of.items() if len(names) > 1}
    if not repeated:
        raise ValueError(
            "checkpoint must name classes of blocks, got a model that has no block twice"
        )
    return repeated
