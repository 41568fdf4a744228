"""A process that only searches: its loggers write nothing, and it ends after the plan.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import Trainer

from lightning_batchmem._lightning.apply import check_training, with_learning_rates
from lightning_batchmem._lightning.data_source import discard_train_loader
from lightning_batchmem._lightning.given_plan import changes_of_training, plan_of_file
from lightning_batchmem._lightning.muted import muted_callback, muted_logger
from lightning_batchmem._lightning.size_setting import BatchSizeSetting
from lightning_batchmem._lightning.trainer_search import TrainerSearch
from lightning_batchmem._lightning.trainer_state import (
    callbacks_of,
    in_every_package,
    is_fast_dev_run,
    trains_no_more,
)
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.printing import print_or_warn
from lightning_batchmem.search.earlier_plan import earlier_plan_not_used, write_plan


def mute_loggers() -> None:
    """Mute the loggers during each fit with a callback that ends the process.

    Lightning makes the experiments of all loggers before it calls a hook of a callback.
    """
    for calls in in_every_package("trainer.call"):
        _mute_fits_of(calls)


@cache
def _mute_fits_of(calls: Any) -> None:
    calls._call_and_handle_interrupt = _with_muted_loggers(calls._call_and_handle_interrupt)


def _with_muted_loggers(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_muted(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        with ExitStack() as muted:
            ends = any(getattr(one, "runs", "") == "search" for one in callbacks_of(trainer))
            # An evaluation before the training runs as it is.
            if ends and trainer.state.fn == "fit":
                for logger in trainer.loggers:
                    muted.enter_context(muted_logger(logger))
                for callback in callbacks_of(trainer):
                    # LightningCLI writes its configuration in `setup`.
                    if "SaveConfigCallback" in {kind.__name__ for kind in type(callback).__mro__}:
                        muted.enter_context(muted_callback(callback))
            return run(trainer, *arguments, **keywords)

    return run_muted


def _check_has_steps(trainer: Trainer) -> None:
    """Raise a ValueError where a training has no step to search with."""
    if is_fast_dev_run(trainer) or trains_no_more(trainer):
        raise ValueError(
            'then="exit" must be used with a training that has steps, got fast_dev_run, or no'
            " epochs or batches"
        )


def find_plan(
    search: TrainerSearch, make_setting: Callable[[], BatchSizeSetting], path: Path
) -> Plan:
    """Search without restoring anything, and write the plan, unless the file has one.

    Args:
        search: the search, which keeps its trials.
        make_setting: returns the place of the size.
        path: the file of the plan.

    Raises:
        NothingFitsError: if no size fits.
        OSError: if the file cannot be written.
        ValueError: if the training has no step, if the batch size of the project cannot be set, or
            if the file has something else.
    """
    trainer = search.trainer
    _check_has_steps(trainer)
    check_training(trainer, trainer.lightning_module, search.options)
    setting = make_setting()
    plan, notes = _plan_of_earlier_start(search, setting, path)
    if plan is None:
        discard_train_loader(trainer)
        plan = search.training(setting, None, None).with_notes(*notes)
        if trainer.is_global_zero:
            write_plan(path, plan)
        if search.kept is not None:
            search.kept.remove()
    # A scaled rate belongs to optimizers that the training will make.
    return plan if plan.learning_rate is not None else with_learning_rates(trainer, plan)


def _plan_of_earlier_start(
    search: TrainerSearch, setting: BatchSizeSetting, path: Path
) -> tuple[Plan | None, list[Note]]:
    """The plan in the file if it is one of this training, or a note why not."""
    ranks = search.ranks
    if not ranks.exchange(path.exists())[0]:
        return None, []
    plan = plan_of_file(path, ranks)
    parameters = ranks.exchange(search.parameters)[0]
    setting = setting.at(plan.place)
    changes = changes_of_training(search, plan, search.room.limit_bytes(), parameters, setting)
    if not plan.verified:
        changes.append("it was not verified")
    if changes:
        return None, [earlier_plan_not_used(*changes)]
    if search.trainer.is_global_zero:
        print_or_warn(
            f"BatchFinder does not search, because {path} has a plan of this training. Delete it to"
            " search again."
        )
    return plan, []


def end_process(trainer: Trainer, path: Path, *, is_by_variable: bool) -> NoReturn:
    """End this process after a search, with the exit code 0.

    Args:
        trainer: the Trainer.
        path: the file with the plan.
        is_by_variable: whether the script does not know the package.
    """
    if trainer.is_global_zero:
        advice = 'replace then="exit" by apply=True'
        if is_by_variable:
            advice = f"start your command with LIGHTNING_BATCHMEM=apply:plan={path}"
        print_or_warn(
            f"BatchFinder ends this process: the plan is in {path}, and nothing after Trainer.fit"
            f" runs. To train at this size, {advice}"
        )
    raise SystemExit(0)
