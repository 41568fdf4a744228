"""The search of one variant: make the model, change it, and find its batch size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_batchmem._lightning.packages import lightning_name
from lightning_batchmem.checkpointing import (
    best_blocks,
    checkpoint_classes,
    checkpoint_names,
    measured_blocks,
    measured_steps,
)
from lightning_batchmem.find import find_batch_size
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import SearchPolicy

Make = Callable[[], tuple[Any, Any]]

_BASE = {"devices": 1, "max_epochs": 1, "logger": False}
# A search that only shows the limit ends at this size.
_SMALL_SIZE = 8


class Found(NamedTuple):
    """The result of a search.

    Attributes:
        plan: its plan.
        checkpointed: the blocks that the search chose to checkpoint; empty for none.
    """

    plan: Plan
    checkpointed: str


class Made(NamedTuple):
    """A model with its Trainer.

    Attributes:
        trainer: the Trainer.
        model: the model, changed as the arguments require.
        data: a datamodule, training loaders or ``None``.
        checkpointed: the blocks that were chosen and checkpointed; empty for none.
    """

    trainer: Trainer
    model: LightningModule
    data: Any
    checkpointed: str


def make_and_find(make: Make, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Found:
    """Make the model and its Trainer, change the model as the arguments require, and search."""
    if arguments.get("checkpoint") == "auto":
        return _find_with_fewest_blocks(make, arguments, options)
    trainer, model, data, checkpointed = make_trainer(make, arguments, options)
    plan = find_batch_size(trainer, model, train_dataloaders=data, **options)
    return Found(plan, checkpointed)


def make_trainer(
    make: Make, arguments: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> Made:
    """Make the model and its Trainer, and change the model as the arguments require.

    A step that has to be measured for this uses the options of BatchFinder.
    """
    trainer_arguments = {**_BASE, **arguments}
    checkpoint = trainer_arguments.pop("checkpoint", None)
    is_compiled = trainer_arguments.pop("compile", None)
    transform = trainer_arguments.pop("transform", None)
    if "fit" in trainer_arguments:
        raise ValueError(f'fit needs checkpoint="auto", got checkpoint={checkpoint!r}')
    if isinstance(checkpoint, str):
        raise ValueError(f"checkpoint must be True or classes of modules, got {checkpoint!r}")
    made = make()
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"make must return (model, data), got {type(made).__name__}")
    model, data = made
    if transform is not None:
        model = transform(model) or model
    trainer_class = lightning_name(model, "trainer.Trainer")
    try:
        trainer = trainer_class(**trainer_arguments)
    # The two packages of Lightning have their own exceptions for wrong arguments.
    except Exception as error:
        raise ValueError(str(error)) from error
    checkpointed = ""
    if checkpoint is True:
        blocks = measured_blocks(trainer, model, data, options or {})
        checkpoint_names(model, blocks.names)
        checkpointed = blocks.text(len(blocks.names))
    elif checkpoint:
        checkpoint_classes(model, checkpoint)
    if is_compiled:
        model = torch.compile(model)
    return Made(trainer, model, data, checkpointed)


def _find_with_fewest_blocks(
    make: Make, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> Found:
    """Checkpoint the fewest blocks with which a batch size fits, the largest blocks first.

    Whether the size fits is computed from two small steps; the last search verifies it. Where that
    one ends below the size, more blocks are checkpointed.
    """
    settings = {name: arguments[name] for name in arguments if name not in ("checkpoint", "fit")}
    fit = arguments.get("fit")
    if not isinstance(fit, int) or fit < 1:
        raise ValueError(
            f'checkpoint="auto" needs fit=N, the batch size that is to fit, got fit={fit!r}'
        )
    largest_allowed = options.get("max_batch_size")
    if largest_allowed is not None and largest_allowed < fit:
        raise ValueError(f"max_batch_size must be at least fit={fit}, got {largest_allowed}")
    is_compiled = settings.pop("compile", False)
    trainer, model, data, _ = make_trainer(make, settings)
    without_blocks = measured_steps(trainer, model, data, options)
    blocks = best_blocks(model, without_blocks.small.activations_by_module())
    num_blocks = len(blocks.names)
    small_plan = find_batch_size(
        trainer, model, train_dataloaders=data, **_options_of_small_search(options, fit)
    )
    # A search begins with a size that needs at most this share.
    usable_bytes = SearchPolicy().candidate_share * small_plan.limit_bytes
    small_trial = max(
        (trial for trial in small_plan.trials if trial.outcome == "ok"),
        key=lambda trial: trial.batch_size,
    )

    def made_with(num_checkpointed: int) -> Made:
        made = make_trainer(make, settings)
        checkpoint_names(made.model, blocks.names[:num_checkpointed])
        return made

    def is_predicted_to_fit(num_checkpointed: int) -> bool:
        steps = without_blocks
        if num_checkpointed > 0:
            made = made_with(num_checkpointed)
            steps = measured_steps(made.trainer, made.model, made.data, options)
        more_bytes = steps.peak_bytes(fit) - without_blocks.peak_bytes(small_trial.batch_size)
        return small_trial.needed_bytes + more_bytes <= usable_bytes

    def search_with(num_checkpointed: int) -> Plan:
        made = made_with(num_checkpointed)
        module = made.model
        if is_compiled:
            # torch.compile returns the module in a wrapper, which is no LightningModule to mypy.
            module = torch.compile(module)  # type: ignore[assignment]
        all_options = {**options, "max_batch_size": fit}
        return find_batch_size(made.trainer, module, train_dataloaders=made.data, **all_options)

    # With all blocks the size may not fit either, and the search has its own answer then.
    num_checkpointed = bisect_left(range(num_blocks), True, key=is_predicted_to_fit)
    plan = search_with(num_checkpointed)
    while plan.batch_size < fit and plan.limited_by == "memory" and num_checkpointed < num_blocks:
        num_checkpointed += max(1, (num_blocks - num_checkpointed) // 2)
        plan = search_with(num_checkpointed)
    return Found(plan, blocks.text(num_checkpointed))


def _options_of_small_search(options: Mapping[str, Any], fit: int) -> dict[str, Any]:
    """The options of a search that only shows the limit, and what is held beyond live bytes."""
    # Small sizes would contradict these options.
    for_large_sizes = ("multiple_of", "min_batch_size", "target_batch_size", "plan")
    kept = {name: value for name, value in options.items() if name not in for_large_sizes}
    return {**kept, "max_batch_size": min(fit, _SMALL_SIZE)}


def check_one_device(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError unless these arguments of the Trainer are those of one device."""
    devices = arguments.get("devices", 1)
    nodes = arguments.get("num_nodes", 1)
    is_one_device = devices in (1, "1") or (isinstance(devices, list) and len(devices) == 1)
    if not is_one_device or nodes != 1:
        raise ValueError(
            f"devices must be one device, got {devices!r} on {nodes} nodes in {name!r}"
        )
