"""The plan of another run, which a training takes without a search."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from lightning.pytorch import LightningModule

from lightning_batchmem._lightning.apply import apply_before_optimizers
from lightning_batchmem._lightning.data_source import train_source
from lightning_batchmem._lightning.optimizer_steps import learning_rate_attribute
from lightning_batchmem._lightning.size_setting import BatchSizeSetting, batch_size_setting
from lightning_batchmem._lightning.strategies import strategy_text
from lightning_batchmem._lightning.trainer_search import TrainerSearch
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.search.earlier_plan import (
    changed,
    changes_since,
    load_plan,
    parameters_made_text,
)
from lightning_batchmem.search.ranks import Ranks


def plan_of_file(given: Plan | str | Path, ranks: Ranks) -> Plan:
    """The plan, which the first rank reads; its reason says where it comes from.

    Raises:
        ValueError: if there is none, or it is of an evaluation.
    """
    source = "the plan in the code" if isinstance(given, Plan) else f"the plan in {given}"
    plan = None
    problem = ""
    if ranks.rank == 0:
        try:
            plan = load_plan(given)
        except (OSError, ValueError) as error:
            problem = f"cannot be read ({error})"
        else:
            if plan.effective_batch_size is None:
                problem = "is one of an evaluation"
    plan, problem = ranks.exchange((plan, problem))[0]
    if plan is None or problem:
        raise ValueError(
            f'{source} {problem}. Name another file, or search again with then="exit", which writes'
            " one that does not exist."
        )
    why = f"the size of {source}, found at another start."
    # Speeds, the time of the search, the number of steps and the rates are those of another run.
    before = plan.project_recipe
    if before is not None:
        rates = before.learning_rates if plan.learning_rate else ()
        before = replace(before, num_steps=None, learning_rates=rates)
    return replace(
        plan,
        chosen=replace(plan.chosen, why=why, speeds=()),
        recipe=replace(plan.recipe, num_steps=None),
        project_recipe=before,
        notes=tuple(note for note in plan.notes if note.kind != "cost"),
    )


def changes_of_training(
    search: TrainerSearch,
    plan: Plan,
    limit_bytes: int,
    parameters: str,
    setting: BatchSizeSetting,
) -> list[str]:
    """A clause on all ranks for each difference from the training of a plan.

    Args:
        search: knows the Trainer, the device and the ranks.
        plan: the plan.
        limit_bytes: what this process may take now.
        parameters: the number of parameters; empty where they are made later.
        setting: the place of the plan's size in the project.
    """
    trainer = search.trainer
    changes = changes_since(plan, search.device, limit_bytes)
    strategy = strategy_text(trainer)
    largest_size = search.options.max_batch_size or plan.batch_size
    if plan.batch_size > largest_size:
        changes.append(f"it has batch size {plan.batch_size}, and max_batch_size is {largest_size}")
    accumulated = trainer.accumulate_grad_batches
    of_plan = plan.project_recipe
    own_size = plan.project_batch_size
    # A size that a hook has cannot be read before its loader is made. An earlier fit of this
    # process, or you, may have set the size and the accumulation of the plan.
    if own_size and setting.project_size not in (None, own_size, plan.batch_size):
        changes.append(changed("batch size of the project", own_size, setting.project_size))
    if of_plan is not None:
        of_project = of_plan.accumulate_grad_batches
        if accumulated not in (of_project, plan.accumulate_grad_batches):
            changes.append(changed("accumulation of the project", of_project, accumulated))
    for name, before, now in (
        ("number of ranks", plan.ranks, trainer.world_size),
        ("strategy", plan.strategy or strategy, strategy),
        ("number of parameters", plan.parameters if parameters else "", parameters),
    ):
        if before != now:
            changes.append(changed(name, before, now))
    return next((of_rank for of_rank in search.ranks.exchange(changes) if of_rank), [])


def apply_given_plan(
    search: TrainerSearch,
    module: LightningModule,
    given: Plan | str | Path,
    undo: ExitStack,
    without_plan: ExitStack,
) -> tuple[Plan, BatchSizeSetting]:
    """Set what a plan has, before loaders, engine and optimizers exist.

    Args:
        search: knows the device, its limit, and the arguments of the finder.
        module: the module.
        given: the plan, or its file.
        undo: what is undone at the end of the run.
        without_plan: what is called after an error, to train at the size of the project.

    Returns:
        The plan, and the place of its size.

    Raises:
        ValueError: if the plan is of another training, or its size cannot be set.
    """
    plan = plan_of_file(given, search.ranks)
    setting = setting_of_plan(search, module, plan)
    limit_bytes = search.room.limit_bytes()
    # The free memory of a machine varies, and matters where the size does not fit any more.
    if limit_bytes >= (plan.held_peak_bytes or plan.limit_bytes):
        limit_bytes = plan.limit_bytes
    # Those that are made later, in configure_model, are not known yet.
    parameters = parameters_made_text(module)
    changes = changes_of_training(search, plan, limit_bytes, parameters, setting)
    if changes:
        raise ValueError(
            f"the plan must be one of this training, but {', and '.join(changes)}. Search again"
            ' with then="exit".'
        )
    without_plan.callback(setting.place.restorer())
    apply_before_optimizers(setting, plan, undo)
    return plan, setting


def setting_of_plan(search: TrainerSearch, module: LightningModule, plan: Plan) -> BatchSizeSetting:
    """The place of the size that the plan names.

    Raises:
        ValueError: if the project does not have it.
    """
    trainer = search.trainer
    # Where a hook has the size, no attribute does.
    name = search.options.batch_arg_name if plan.place[-2:] in ("", "()") else plan.place
    is_budget = plan.budget_name is not None
    setting = batch_size_setting(trainer, module, train_source(trainer), name, is_budget=is_budget)
    setting = setting.at(plan.place)
    if not setting.place.exists:
        raise ValueError(
            f"the plan sets `{setting.name}`, which neither the module nor the datamodule has"
        )
    if plan.learning_rate is not None and not learning_rate_attribute(setting).exists:
        raise ValueError(
            "the plan sets the learning rate, but the module has neither `lr` nor `learning_rate`"
        )
    return setting
