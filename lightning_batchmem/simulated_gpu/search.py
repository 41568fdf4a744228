"""The search of a training on the simulated GPU, in the process of the program."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_batchmem import check, comparison
from lightning_batchmem._lightning.strategies import (
    check_environment,
    check_one_rank,
    check_strategy,
    exchange_by,
    has_engine,
    strategy_text,
    trains_in_other_processes,
)
from lightning_batchmem._lightning.trainer_search import TrainerSearch
from lightning_batchmem._lightning.trainer_state import (
    callbacks_of,
    in_every_package,
    is_fast_dev_run,
)
from lightning_batchmem.batch_finder import BatchFinder
from lightning_batchmem.devices.out_of_memory import is_out_of_memory
from lightning_batchmem.find import SearchOnly
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.objectives import objective_of
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.rules import NOTHING_FITS
from lightning_batchmem.search.compiled import compiled_frames
from lightning_batchmem.search.kept_trials import KeptTrials, ended_in_trial, trials_path
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.search import NothingFitsError
from lightning_batchmem.simulated_gpu.gpus import MOST_DEVICES
from lightning_batchmem.simulated_gpu.ranks import (
    EqualRanks,
    GatheredWeights,
    found_world,
    notes_about_ranks,
)
from lightning_batchmem.state.saved_storages import SavedStorages

MEMORY_TEST = "memory_test"

# The process ends after its search, so nobody needs its weights and its data again. Small buffers
# may decide what a step does: counters, and places in a memory bank.
_LARGEST_SAVED_BYTES = 2**20

_FIRST_WITHOUT_DEVICE = 90_800
# Modules for which PyTorch takes cuDNN on a real GPU.
_CONVOLUTIONS = (
    *(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d),
    *(torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d),
)


class SimulatedSearch(SearchOnly):
    """A search that rehearses the project's own size too.

    Args:
        plan_path: a path beside which trials are kept, where an engine cannot be made again and a
            size that does not fit ends the process.
        **options: arguments of BatchFinder.
    """

    _is_simulated = True

    def __init__(self, *, plan_path: Path | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._plan_path = plan_path
        self._keeps_engine = plan_path is not None

    def _ranks_of(self, trainer: Trainer) -> Ranks:
        if trainer.world_size == 1:
            return super()._ranks_of(trainer)
        return EqualRanks(trainer.world_size, ends_together=self._keeps_engine)

    def _search_in(
        self,
        trainer: Trainer,
        options: SearchOptions,
        earlier: Plan | None = None,
        kept: KeptTrials | None = None,
    ) -> TrainerSearch:
        if self._plan_path is not None:
            path = trials_path(self._plan_path)
            kept = KeptTrials(self._run.ranks, path, strategy_text(trainer))
        return super()._search_in(trainer, options, earlier, kept)


def trainer_of(kind: str, target: str, arguments: Mapping[str, Any]) -> tuple[Trainer, Any, Any]:
    """The trainer, the module and the data of a function ``module:name`` of the project.

    Args:
        kind: ``"function"`` for a search, ``"memory_test"`` for the memory test.
        target: the name.
        arguments: arguments of the Trainer.
    """
    make = comparison.function_named(target)
    if kind == MEMORY_TEST:
        # The moment of a collection depends on other work. A search collects between its trials.
        gc.disable()
        return check.prepared(make, arguments, "gpu")
    return comparison.make_trainer(make, arguments)


def use_devices(given: dict[str, Any], request: Mapping[str, Any]) -> dict[str, int] | None:
    """Let the Trainer train on the simulated GPUs, also where it names others.

    Args:
        given: the arguments of the Trainer, in which ``devices`` and ``num_nodes`` change.
        request: what the process was started with.

    Returns:
        What the process has to be started with instead; ``None`` if it can go on.

    Raises:
        ValueError: if the command has other numbers.
    """
    devices = given.get("devices", "auto")
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    is_list = isinstance(devices, (list, tuple))
    count = str(len(devices) if is_list else devices)
    started = (request.get("devices") or 1, request.get("nodes") or 1)
    # Lightning itself refuses no device at all, and other words than "auto" and "-1".
    is_open = not count.isdecimal() or int(count) == 0
    nodes = given.get("num_nodes", 1)
    # A program that names its arguments may give the default.
    wanted = (started[0] if is_open else int(count), started[1] if nodes == 1 else nodes)
    if wanted != started:
        return _other_start(*wanted, request)
    plugins = given.get("plugins") or []
    for plugin in plugins if isinstance(plugins, list) and started != (1, 1) else []:
        check_environment(plugin)
    if is_list:
        given["devices"] = list(range(len(devices)))
    if started[1] > 1:
        given["num_nodes"] = started[1]
    return None


def _other_start(devices: int, nodes: int, request: Mapping[str, Any]) -> dict[str, int]:
    text = f"the Trainer has devices={devices} and num_nodes={nodes}"
    for name, number in (("devices", devices), ("nodes", nodes)):
        given = request.get(name)
        if given not in (None, number):
            raise ValueError(
                f"{text}, and --{name} or another Trainer of the program has {given}: leave"
                f" out --{name}, or let every Trainer take this number from the program's arguments"
            )
    if devices > MOST_DEVICES:
        raise ValueError(
            f"{text}, and a node has at most {MOST_DEVICES} simulated GPUs: train on more nodes,"
            f" such as devices={MOST_DEVICES} and num_nodes={-(-devices // MOST_DEVICES)}"
        )
    return {"devices": devices, "nodes": nodes}


def search(given: dict[str, Any], request: dict[str, Any], values: Any) -> dict[str, Any]:
    """Search instead of a training, and return the result for the parent.

    Args:
        given: the arguments of ``Trainer.fit``, with the trainer as ``self``.
        request: see :func:`~lightning_batchmem.simulated_gpu.launch.run`, whether cuDNN plans for
            the GPU, as ``simulates_cudnn``, and ``notes`` about the program.
        values: the values that are computed in this process.

    Raises:
        ValueError: for a training that would not run, or not on this GPU.
    """
    trainer = given["self"]
    plan_path = Path(request["kept_plan"]) if has_engine(trainer) else None
    _check_trainer(trainer, keeps_engine=plan_path is not None)
    _count_reads(trainer, values.reads)
    SavedStorages.largest_bytes = _LARGEST_SAVED_BYTES
    exchange_by(trainer, "gloo" if trainer.world_size == 1 else "nccl")
    notes = list(request.get("notes", ()))
    if given.get("ckpt_path") is not None:
        notes.append(f"ckpt_path={given['ckpt_path']!r} is left out: the search has new weights.")
    notes += notes_about_ranks(trainer)
    notes += _notes_about_cudnn(given["model"], is_simulated=request["simulates_cudnn"])
    gathered = GatheredWeights(lambda: trainer.strategy.model, trainer.world_size)
    if trainer.world_size > 1:
        torch.autograd.backward = gathered.backward
    is_memory_test = request["kind"] == MEMORY_TEST
    if is_memory_test:
        finder = check.finder_of(SearchOnly)
    else:
        finder = _finder(trainer, request["options"], notes, plan_path)
    try:
        plan = finder.search(
            trainer,
            given["model"],
            given.get("datamodule"),
            given.get("train_dataloaders"),
            given.get("val_dataloaders"),
        )
    except NothingFitsError as error:
        return {"nothing_fits": " ".join([*notes, str(error), *values.assumptions])}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if plan_path is not None and ended_in_trial(plan_path):
            return {"start_again": {}}
        # The rest of the text is about this process.
        reason = str(error).partition(" GPU ")[0]
        texts = [f"{NOTHING_FITS}: before the first step, {reason}", *values.assumptions]
        return {"nothing_fits": " ".join(texts)}
    if plan.project_recipe and "LBFGS" in plan.project_recipe.optimizer_names:
        notes.append(
            "A step of LBFGS ends after its first iteration on a simulated GPU, and needs more"
            " memory in the training."
        )
    if plan_path is None:
        # DeepSpeed keeps what its own settings allow.
        notes += gathered.notes
    notes += values.assumptions
    if is_memory_test:
        if compiled_frames():
            raise ValueError(
                "the memory of a compiled step depends on what the compiler has kept from earlier"
                " processes. Return the model without torch.compile."
            )
        memory = check.memory_of(plan, f"simulated {request['gpu']}")
        return {"memory": asdict(memory), "assumptions": notes}
    simulated = simulated_plan(plan, request["gpu"], notes)
    return {
        "plan": json.loads(simulated.to_json()),
        "world": found_world(trainer, gathered),
        "assumptions": notes,
        "multiple_of": finder.options.multiple_of or 1,
    }


def _count_reads(trainer: Trainer, reads: Any) -> None:
    """Count what a step reads; it begins where its batch is moved to the device."""
    strategy = trainer.strategy
    move = strategy.batch_to_device

    def moved(*arguments: Any, **keywords: Any) -> Any:
        reads.begin_step()
        return move(*arguments, **keywords)

    vars(strategy)["batch_to_device"] = moved


def _notes_about_cudnn(model: torch.nn.Module, *, is_simulated: bool) -> list[str]:
    """Which layers of the model run on other kernels than on a real GPU."""
    layers = []
    if not is_simulated and any(isinstance(part, _CONVOLUTIONS) for part in model.modules()):
        layers.append("convolutions")
    if any(isinstance(part, torch.nn.RNNBase) for part in model.modules()):
        layers.append("recurrent layers")
    if not layers:
        return []
    text = f"{' and '.join(layers).capitalize()} ran on PyTorch's own kernels and not on cuDNN's"
    if not is_simulated:
        # This function of torch has no type annotations.
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        major, rest = divmod(version or 0, 10_000)
        text += f" {major}.{rest // 100}"
        if (version or 0) < _FIRST_WITHOUT_DEVICE:
            text += " (9.8 is the first that can plan without a GPU)"
    return [f"{text}. They may need more or less memory."]


def simulated_plan(plan: Plan, gpu: str, notes: list[str]) -> Plan:
    """The plan of a search on a simulated GPU: it is not verified, and has no times."""
    trials = [replace(trial, step_seconds=None, samples_per_s=None) for trial in plan.trials]
    return replace(
        plan,
        chosen=replace(plan.chosen, is_verified=False, fastest_batch_size=None),
        simulated=True,
        device=f"simulated {gpu}",
        trials=tuple(trials),
    ).with_notes(*(Note("simulation", text) for text in notes))


def _check_trainer(trainer: Trainer, *, keeps_engine: bool) -> None:
    """Refuse a training that would run no step, or not on the simulated GPU."""
    if is_fast_dev_run(trainer):
        raise ValueError(
            "the Trainer has fast_dev_run, which runs a few batches of the project's own size"
        )
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if getattr(trainer, name) == 0:
            raise ValueError(f"the Trainer has {name}=0, so nothing is trained")
    device = trainer.strategy.root_device
    if device.type != "cuda":
        raise ValueError(
            f"the Trainer trains on {device}, so no GPU limits its batch size; run the program with"
            ' accelerator="gpu"'
        )
    if not hasattr(ctypes.CDLL(None), "cuda_stub_resize"):
        raise ValueError(
            "the library of the simulated GPU is not loaded: this system ignores LD_PRELOAD"
        )
    if trains_in_other_processes(trainer):
        raise ValueError(
            "the Trainer has a strategy that starts other processes; use one of a single device, or"
            ' strategy="ddp"'
        )
    if not keeps_engine:
        check_strategy(trainer)
    check_one_rank(trainer)


def _finder(
    trainer: Trainer, given_options: dict[str, Any], notes: list[str], plan_path: Path | None
) -> SimulatedSearch:
    """A finder with the options of the command line and of the project's own BatchFinder."""
    callbacks = callbacks_of(trainer)
    # Lightning's own finder would search too.
    others = in_every_package("callbacks.BatchSizeFinder")
    # mypy does not see that the trainer has this attribute.
    trainer.callbacks = [one for one in callbacks if not isinstance(one, others)]  # type: ignore[attr-defined]
    of_project = [one for one in callbacks if isinstance(one, BatchFinder)]
    options: dict[str, Any] = {"objective": "memory", "min_steps_per_epoch": None}
    if of_project:
        options = asdict(of_project[0].options)
        # An earlier plan is of another device.
        left_out = ", without its plan" if of_project[0]._given_plan is not None else ""
        notes.append(f"The options are those of the project's BatchFinder{left_out}.")
        if objective_of(of_project[0].options).needs_times:
            notes.append('objective="memory" is used instead: a simulated GPU has no times.')
            options["objective"] = "memory"
        options["later"] = of_project[0].later
    finder = SimulatedSearch(plan_path=plan_path, **{**options, **given_options})
    if of_project:
        finder.policy = of_project[0].policy
    return finder
