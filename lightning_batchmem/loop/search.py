"""The search of a training loop: a loop comes in, becomes a program, and its plan goes out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module, ModuleList
from torch.optim import Optimizer

from lightning_batchmem.devices import device_memory_for, device_name
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.devices.foreign_values import add_note, begin_run, value_or_none
from lightning_batchmem.devices.optimizers import StepHooks
from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.devices.tensors import tensors_in
from lightning_batchmem.loop.training_loop import TrainingLoop
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.printing import print_or_warn
from lightning_batchmem.search.compiled import each_size_static
from lightning_batchmem.search.earlier_plan import parameters_text, write_missing_plan
from lightning_batchmem.search.limits import MemoryRoom
from lightning_batchmem.search.program import Program, Steps
from lightning_batchmem.search.progress import SearchProgress
from lightning_batchmem.search.search import BatchSizeSearch
from lightning_batchmem.state.snapshot import Snapshot, freeze


def plan_of_loop(
    loop: TrainingLoop,
    options: SearchOptions,
    given_plan: Plan | str | Path | None,
    *,
    verbose: bool,
) -> Plan:
    """Search on all ranks, restore everything, and print the plan on the first rank.

    Raises:
        NothingFitsError: if no size fits.
        ValueError: if the device has no peak counter.
    """
    begin_run()
    ranks = loop.ranks
    # A step of the user may fail on one rank alone.
    with ranks.fail_together():
        device_memory = device_memory_for(loop.device)
        if device_memory is None:
            raise ValueError(
                f"find_batch_size_of_loop cannot search, because {loop.device.type} or its"
                " allocator counts no peak memory. Set the batch size by hand."
            )
        plan = _searched(loop, device_memory, options, given_plan)
    if ranks.rank == 0:
        print_or_warn(str(plan) if verbose else plan.short_text())
        write_missing_plan(given_plan, plan)
    return plan


def _searched(
    loop: TrainingLoop,
    device_memory: DeviceMemory,
    options: SearchOptions,
    given_plan: Plan | str | Path | None,
) -> Plan:
    ranks = loop.ranks
    policy = SearchPolicy()
    room = MemoryRoom(
        device_memory, options.memory_limit, policy.rehearsal.limit_share, ranks.on_this_host()
    )
    if room.warning and ranks.rank == 0:
        warnings.warn(room.warning, stacklevel=2)
    program = LoopProgram(loop, device_memory, options.multiple_of or 1)
    with (
        SearchProgress(enabled=ranks.rank == 0) as progress,
        program.entered(),
        each_size_static(),
    ):
        search = BatchSizeSearch(
            program,
            room,
            options,
            policy,
            ranks,
            progress,
            device=device_name(loop.device),
            parameters=parameters_text(program.module),
        )
        try:
            return search.run(given_plan)
        # A user's step may raise any error, which is raised again with the size.
        except Exception as error:
            if size := program.training.batch_size:
                add_note(error, f"This error occurred in the search, at batch size {size}.")
            raise


@contextmanager
def marked_phases(phases: PhasePeaks, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Mark the phases of the steps in the body; :meth:`.PhasePeaks.watch` marks their ends.

    Backward begins at a call of ``torch.autograd.backward``, which ``Tensor.backward`` calls too.
    Hooks of modules would break the graph of a compiled one, so there are none. An optimizer step
    that is compiled is not marked.

    Backward lasts until the next optimizer steps, so clipping is part of it. An optimizer that gets
    a closure steps after the backward pass in it.
    """
    backward = torch.autograd.backward
    # These optimizers are in a step with a closure, which makes the gradients.
    in_closure: set[int] = set()

    def marked_backward(*arguments: Any, **keywords: Any) -> None:
        phases.enter("backward")
        backward(*arguments, **keywords)
        if in_closure:
            phases.enter("optimizer_step")

    def before_step(optimizer: Optimizer, arguments: Any, keywords: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        # The first argument is the optimizer itself.
        if any(callable(value) for value in (*arguments[1:], *keywords.values())):
            in_closure.add(id(optimizer))
        else:
            phases.enter("optimizer_step")

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            in_closure.discard(id(optimizer))

    with ExitStack() as undo:
        vars(torch.autograd).update(backward=marked_backward)
        undo.callback(vars(torch.autograd).update, backward=backward)
        hooks = StepHooks()
        undo.callback(hooks.remove)
        for optimizer in optimizers:
            hooks.add(optimizer, after_step, before_step)
        yield


class LoopProgram(Program):
    """A training loop of the user, as the program of a search.

    Args:
        loop: the loop, before its first step.
        device_memory: the memory of its device.
        multiple_of: every batch has a multiple of this many samples.
    """

    training: LoopSteps

    def __init__(self, loop: TrainingLoop, device_memory: DeviceMemory, multiple_of: int) -> None:
        self.phases = PhasePeaks(device_memory)
        self.device = loop.device
        self.module = ModuleList(loop.models)
        self._optimizers = loop.optimizers
        self.steps_are_collective = loop.steps_are_collective
        self.training = LoopSteps(self, loop)
        self._device_memory = device_memory
        self.multiple_of = multiple_of
        self._is_first_rank = loop.ranks.rank == 0
        self._snapshot = _snapshot(loop)
        self._failed: list[str] = []
        self._has_same_batches = False
        self._warn_of_state()

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self._optimizers

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Search in the body, and restore everything at the end."""
        self._device_memory.release_cached()
        freeze(self._snapshot.attributes.schedulers)
        try:
            yield
        finally:
            self._failed += self._snapshot.restore()
            if self._failed:
                self._warn(f"could not restore: {'; '.join(dict.fromkeys(self._failed))}")
        # With empty caches, training starts as if nothing had been allocated before.
        self._device_memory.release_cached()

    def restart(self, batch_size: int) -> None:
        """Restore everything; learning rates stay as they are."""
        self._failed += self._snapshot.restore()
        freeze(self._snapshot.attributes.schedulers)
        self._device_memory.release_cached()

    def warn_of_same_batches(self, smaller: int, larger: int) -> None:
        """Warn once that the batches do not follow the size, so that no larger size is measured."""
        if not self._has_same_batches:
            self._has_same_batches = True
            self._warn(
                f"got as much data from make_batch({larger}) as from make_batch({smaller}), so it"
                " cannot measure larger batches. Set max_batch_size to the largest number of"
                " samples that make_batch can return, or return as many as its argument."
            )

    def _warn_of_state(self) -> None:
        attributes = self._snapshot.attributes
        if not_restorable := self._snapshot.not_restorable:
            self._warn(
                f"cannot restore these if a step changes them: {'; '.join(not_restorable[:10])}"
            )
        # The wrapper of Optimizer.step has this private name in torch 2.5.1 to 2.14.
        has_scheduler = any(hasattr(one.step, "_wrapped_by_lr_sched") for one in self.optimizers)
        if has_scheduler and not attributes.schedulers:
            self._warn(
                "was not given the scheduler of an optimizer, and cannot restore it. Pass"
                " state=[scheduler] if a step changes it."
            )

    def _warn(self, text: str) -> None:
        if self._is_first_rank:
            warnings.warn(f"BatchFinder {text}", stacklevel=2)


@dataclass(eq=False)
class LoopSteps(Steps):
    """The steps of a loop, each on a new batch."""

    program: LoopProgram
    loop: TrainingLoop
    # That is tried now.
    batch_size: int = 0
    _marks: ExitStack = field(default_factory=ExitStack)
    # The batch of the next step, which takes it out, and then holds the only reference.
    _next_batch: list[Any] = field(default_factory=list)
    # Numbers in the first batch of each size.
    _num_values: dict[int, int] = field(default_factory=dict)

    def last_batch_size(self, batch_size: int) -> int:
        # The end of an epoch is not known.
        unit = self.program.multiple_of
        half = batch_size // 2 // unit * unit
        return min(batch_size, max(2, unit, half))

    def begin(self, batch_size: int) -> int:
        program = self.program
        self.batch_size = batch_size
        self._marks.enter_context(marked_phases(program.phases, program.optimizers))
        return 1

    def make_batch(self, batch_size: int, index: int, *, other_lengths: bool = False) -> None:
        self._next_batch[:] = [self._batch(batch_size)]

    def run(self) -> None:
        self.loop.step(self._next_batch.pop())

    def _batch(self, batch_size: int) -> Any:
        batch = self.loop.make_batch(batch_size)
        if batch_size not in self._num_values:
            num_values = value_or_none("The size of a batch", _num_values_in, batch) or 0
            for other, num_others in self._num_values.items():
                smaller, larger = sorted((other, batch_size))
                if num_values and num_values == num_others and larger >= 2 * smaller:
                    self.program.warn_of_same_batches(smaller, larger)
            self._num_values[batch_size] = num_values
        return batch

    def end(self) -> None:
        self._marks.close()


def _num_values_in(batch: object) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch))


def _snapshot(loop: TrainingLoop) -> Snapshot:
    modules = [one for one in loop.state if isinstance(one, Module)]
    optimizers = [one for one in loop.state if isinstance(one, Optimizer)]
    others = {
        f"state[{index}]": one
        for index, one in enumerate(loop.state)
        if not isinstance(one, Module | Optimizer)
    }
    not_walked = [] if loop.fabric is None else [loop.fabric, loop.fabric.strategy]
    return Snapshot([*loop.models, *modules], [*loop.optimizers, *optimizers], others, not_walked)
