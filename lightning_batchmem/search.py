"""The searches: real steps at the sizes that :func:`.decide.decide` asks for, and nothing of them left afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console

from lightning_batchmem._lightning.data_source import attach_loaders, validation_source
from lightning_batchmem._lightning.module_state import ModuleState
from lightning_batchmem._lightning.run_step import EvaluationLoop, begin_training
from lightning_batchmem._lightning.strategies import (
    is_synchronised,
    processes_on_node,
    steps_are_collective,
    without_synchronisation,
    wrap_again,
)
from lightning_batchmem._lightning.trainer_state import Loop, RandomStates, TrainerState
from lightning_batchmem.apply.batch_size import BatchSizeSetting, ProbeBatches
from lightning_batchmem.apply.loaders import StageLoaders, limited_batches
from lightning_batchmem.apply.training import restoring
from lightning_batchmem.devices import DeviceMemory
from lightning_batchmem.measure.breakdown import measure_breakdown, tensors_in
from lightning_batchmem.measure.compiled import each_size_static
from lightning_batchmem.measure.phases import PhasePeaks
from lightning_batchmem.measure.ranks import Ranks, own_budget_bytes, worst_of_all
from lightning_batchmem.measure.stage_workers import UNBOUNDED_MAX_BATCH_SIZE, StageWorkers
from lightning_batchmem.measure.steps import EvaluationSteps, Steps, TrainingSteps
from lightning_batchmem.measure.trial import Looseness, PhaseCallback, measure
from lightning_batchmem.measure.validation import Validation
from lightning_batchmem.plan.decide import FIRST_SIZE, decide
from lightning_batchmem.plan.options import SearchOptions, parse_memory_limit
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import NextSize, SearchFailed, SearchLimits, SizeLimit, Trial, mib
from lightning_batchmem.report.plan_table import SearchProgress
from lightning_batchmem.report.tables import breakdown_text


class BatchSizeSearch:
    """One search over real steps, in a trainer that is lent for it.

    Args:
        trainer: before its loop runs.
        device_memory: of the device.
        options: the user's.
        random: the generators' states to rewind to.
        module_state: the module as it is to be again.

    Attributes:
        epoch_batches: batches of an epoch at the size that was found; ``inf`` when unknown.
    """

    def __init__(
        self,
        trainer: Trainer,
        device_memory: DeviceMemory,
        options: SearchOptions,
        random: RandomStates,
        module_state: ModuleState,
    ) -> None:
        self._trainer = trainer
        self._module_state = module_state
        self._device_memory = device_memory
        self._options = options
        self._random = random
        self._phase_peaks, self._looseness = PhasePeaks(device_memory), Looseness(device_memory)
        self._ranks = Ranks(trainer)
        self._together = steps_are_collective(trainer)
        shown = trainer.is_global_zero and trainer.progress_bar_callback is not None
        self._progress = SearchProgress(Console(), enabled=shown)
        self._first = options.min_batch_size or FIRST_SIZE
        self.epoch_batches = math.inf

    def training(self, setting: BatchSizeSetting) -> Plan | SearchFailed:
        """Search with training steps, and validation as a phase of them where there is one.

        Args:
            setting: where the training batch size lives.
        """
        with self._ranks.fail_together():
            outcome = self._training(setting)
            wrap_again(self._trainer)
        return outcome

    def _training(self, setting: BatchSizeSetting) -> Plan | SearchFailed:
        trainer, options = self._trainer, self._options
        setting.check()
        with self._lent([setting, replace(setting, source=validation_source(trainer))], trainer.fit_loop) as lent:
            loaders = setting.loaders_for(self._first)
            validation = self._validation(setting)
            val_loaders, val_batches = (validation.combined, validation.batches) if validation else (None, [])
            attach_loaders(trainer, loaders.combined, loaders.batches(self._first), val_loaders, val_batches)
            if options.target_batch_size is not None:
                trainer.accumulate_grad_batches = 2  # gradients are then alive in backward too
            begin_training(trainer)
            samples = ProbeBatches(loaders, options.worst_case)
            steps = TrainingSteps(trainer, samples, loaders.batches)
            workers = StageWorkers([*loaders.sized, *(validation.sized if validation else ())])
            largest = loaders.largest_batch_size(trainer.limit_train_batches)
            search_limits = self._search_limits(largest, workers, target_batch_size=options.target_batch_size)

            def probe(batch_size: int, warmup_steps: int, measured_steps: int) -> Trial:
                setting.write(batch_size)
                trial = self.measure(steps, batch_size, search_limits, warmup_steps, measured_steps)
                trial = validation.beside(trial, search_limits) if validation else trial
                if trial.outcome == "out_of_memory":
                    lent.lend_scaler()
                return self._with_workers(trial, workers)

            outcome = self._run(probe, search_limits)
            if isinstance(outcome, SearchFailed):
                return self._explained(outcome, samples)
            if is_synchronised(trainer):

                def check(batch_size: int) -> Trial:
                    setting.write(batch_size)
                    return self._with_workers(
                        self.measure(steps, batch_size, search_limits, 1, 1, together=True), workers
                    )

                outcome = self._synchronised(outcome, search_limits, probe, check)
                if isinstance(outcome, SearchFailed):
                    return self._explained(outcome, samples)
            setting.check_loaders(outcome.batch_size, loaders)
            batches = limited_batches(loaders.batches(outcome.batch_size), trainer.limit_train_batches)
            self.epoch_batches = min(on_rank for (on_rank,) in self._ranks.exchange(batches))
            outcome = replace(outcome, notes=steps.growth_notes(outcome.batch_size))
            return validation.completed(outcome) if validation else outcome

    def evaluation(self, setting: BatchSizeSetting, loop: EvaluationLoop) -> Plan | SearchFailed | None:
        """Search with forward passes only.

        Args:
            setting: where the stage's batch size lives.
            loop: of the stage.

        Returns:
            A plan or a refusal; ``None`` when the stage's loaders do not follow the size: it is the user's own.
        """
        with self._ranks.fail_together(), self._lent([setting], loop):
            try:
                loaders = setting.loaders_for(self._first, may_be_fixed=True)
            except ValueError as error:  # for training that is an error; this stage may not be what the finder is for
                rank_zero_warn(str(error))
                return None
            if not loaders.follows:
                return None
            outcome = self.over(setting, loaders, self.evaluation_steps(loaders, loop))
            if isinstance(outcome, Plan):
                setting.check_loaders(outcome.batch_size, loaders)
            return outcome

    def over(self, setting: BatchSizeSetting, loaders: StageLoaders, steps: EvaluationSteps) -> Plan | SearchFailed:
        """Search with evaluation steps, in a trainer that has been lent."""
        workers = StageWorkers(loaders.sized)
        limit_batches = getattr(self._trainer, f"limit_{setting.source.stage}_batches")
        search_limits = self._search_limits(loaders.largest_batch_size(limit_batches), workers)

        def probe(batch_size: int, warmup_steps: int, measured_steps: int) -> Trial:
            setting.write(batch_size)
            trial = self.measure(steps, batch_size, search_limits, warmup_steps, measured_steps)
            return self._with_workers(trial, workers)

        outcome = self._run(probe, search_limits)
        if isinstance(outcome, SearchFailed):
            return outcome
        return replace(outcome, notes=steps.growth_notes(outcome.batch_size))

    def evaluation_steps(self, loaders: StageLoaders, loop: EvaluationLoop) -> EvaluationSteps:
        """Steps of an evaluation, on samples of its own loaders."""
        return EvaluationSteps(self._trainer, loop, loaders, ProbeBatches(loaders, self._options.worst_case))

    def measure(
        self,
        steps: Steps,
        batch_size: int,
        search_limits: SearchLimits,
        warmup_steps: int,
        measured_steps: int,
        *,
        together: bool = False,
    ) -> Trial:
        """Run steps at one size; see :func:`.measure.measure`."""
        together = together or self._together
        with self._ranks.collective_step() if together else without_synchronisation(self._trainer):
            trial = measure(
                steps,
                self._device_memory,
                self._phase_peaks,
                self._looseness,
                batch_size,
                warmup_steps=warmup_steps,
                measured_steps=measured_steps,
                # several ranks take as many steps each, in case these have collectives that nobody sees
                enough_bytes=search_limits.limit_bytes if self._ranks.size == 1 else math.inf,
                together=together,
            )
        return replace(trial, fixed_bytes=self._fixed_bytes())

    def _fixed_bytes(self) -> int:
        """What a step finds in use and leaves so, but for gradients, which Lightning frees before backward."""
        trainer, device_memory = self._trainer, self._device_memory
        device_memory.release_cached()
        device = trainer.strategy.root_device
        gradients_bytes = measure_breakdown(trainer.lightning_module, [], None, device, start_bytes=0).gradients_bytes
        return max(0, device_memory.current().allocated_bytes - gradients_bytes)

    @contextmanager
    def _lent(self, settings: Sequence[BatchSizeSetting], loop: Loop) -> Iterator[TrainerState]:
        with ExitStack() as stack:
            watcher = PhaseCallback(self._phase_peaks, self._looseness)
            kept = stack.enter_context(
                restoring(self._trainer, settings, self._random, self._module_state, watcher, loop)
            )
            stack.enter_context(self._progress)
            stack.enter_context(each_size_static())
            for handle in self._phase_peaks.watch(self._trainer.optimizers):
                stack.callback(handle.remove)
            yield kept
        self._device_memory.release_cached()  # training starts as if nothing had been allocated before

    def _run(
        self, probe: Callable[[int, int, int], Trial], search_limits: SearchLimits, trials_run: Sequence[Trial] = ()
    ) -> Plan | SearchFailed:
        trials = list(trials_run)
        while isinstance(step := decide(trials, search_limits, self._device_memory.repeatability), NextSize):
            self._progress.trying(step)
            trials.append(worst_of_all(probe(step.batch_size, *self._step_counts(step, trials)), self._ranks))
            # somebody else may have filled the device meanwhile
            budgets = self._ranks.exchange(own_budget_bytes(self._device_memory, self._trainer))
            search_limits = replace(
                search_limits, limit_bytes=min(search_limits.limit_bytes, *(int(budget) for (budget,) in budgets))
            )
        return step

    def _step_counts(self, step: NextSize, trials: Sequence[Trial]) -> tuple[int, int]:
        """How many steps warm up and how many are counted; two in all at each size but the smallest.

        The first step of all creates the optimizer's state, the second is the first with gradients alive in forward.
        Where the device does not repeat itself, a first step at a size says as much of the peak as any, the worst of
        more steps is worse, and what may be the answer gets three where all samples that were pushed through are then
        no more than four times as many.
        """
        if self._device_memory.repeatability == 0:
            return (1, 1) if trials else (3, 5)
        if not trials:
            return 3, 2
        if not step.may_be_last:
            return 0, 2
        pushed, last = sum(trial.samples_run for trial in trials), trials[-1]
        micro_batches = last.samples_run // (last.full_steps * last.batch_size) if last.full_steps else 1
        return 0, max(2, (4 * step.batch_size - pushed) // (micro_batches * step.batch_size))

    def _with_workers(self, trial: Trial, workers: StageWorkers) -> Trial:
        trial = replace(trial, worker_bytes=workers.bytes_at(trial.batch_size))
        peaks = {phase: peak + self._shared(trial) for phase, peak in trial.phase_peak_bytes.items()}
        return replace(trial, phase_peak_bytes=peaks)

    def _shared(self, trial: Trial) -> int:
        """What loader workers hold of the memory that is measured; on a device they bound the size, and no peak."""
        return trial.worker_bytes if self._device_memory.name == "host" else 0

    def _search_limits(
        self, largest_in_data: int | None, workers: StageWorkers, *, target_batch_size: int | None = None
    ) -> SearchLimits:
        options, budget = self._options, own_budget_bytes(self._device_memory, self._trainer)
        wanted = parse_memory_limit(options.memory_limit, budget)
        if wanted > budget:
            rank_zero_warn(f"memory_limit={options.memory_limit!r} is more than the device can give, {mib(budget)}")
        ceilings: list[tuple[int, SizeLimit]] = [(options.max_batch_size or UNBOUNDED_MAX_BATCH_SIZE, "max_batch_size")]
        if largest_in_data is not None:
            ceilings.append((largest_in_data, "dataset"))
        if target_batch_size is not None:
            ceilings.append((target_batch_size, "target_batch_size"))
        if self._device_memory.name != "host":
            processes = processes_on_node(self._trainer)
            ceilings.append((workers.largest_in_host_memory(processes), "host memory"))
        own = min(range(len(ceilings)), key=lambda index: ceilings[index][0])
        told = self._ranks.exchange(min(wanted, budget), ceilings[own][0], own)
        limits, largest_sizes, reasons = zip(*told, strict=True)  # the rank with the least of each decides
        largest = int(min(largest_sizes))
        reason = ceilings[int(reasons[largest_sizes.index(largest)])][1]
        return SearchLimits(
            limit_bytes=int(min(limits)),
            min_batch_size=options.min_batch_size or min(FIRST_SIZE, largest),
            max_batch_size=largest,
            max_reason=reason,
            multiple_of=options.multiple_of,
            objective=options.objective,
            target_batch_size=target_batch_size,
            ranks=self._ranks.size,
        )

    def _synchronised(
        self,
        plan: Plan,
        search_limits: SearchLimits,
        probe: Callable[[int, int, int], Trial],
        check: Callable[[int], Trial],
    ) -> Plan | SearchFailed:
        """The plan, checked with steps in which the ranks exchange gradients; what these take is kept free for them.

        Args:
            plan: of steps that stay on their rank.
            search_limits: of the search.
            probe: runs such steps.
            check: runs steps that are synchronised, at a size.
        """
        room = search_limits
        while True:
            checked = worst_of_all(check(plan.batch_size), self._ranks)
            if checked.held_bytes <= plan.limit_bytes:
                measured_bytes = max(checked.held_bytes, plan.measured_peak_bytes or 0)
                return replace(plan, limit_bytes=search_limits.limit_bytes, measured_peak_bytes=measured_bytes)
            alone = next(trial for trial in reversed(plan.trials) if trial.batch_size == plan.batch_size)
            room = replace(room, limit_bytes=room.limit_bytes - max(1, checked.held_bytes - alone.held_bytes))
            outcome = self._run(probe, room, plan.trials)
            if isinstance(outcome, SearchFailed):
                return outcome
            plan = replace(outcome, limit_bytes=search_limits.limit_bytes)

    def _validation(self, setting: BatchSizeSetting) -> Validation | None:
        """Validation beside training; ``None`` where there is none, or its loaders cannot be probed."""
        if not self._trainer.enable_validation:
            return None
        name = self._options.eval_batch_arg_name
        own_setting = replace(setting, source=validation_source(self._trainer), name=name or setting.name)
        if name is not None:
            own_setting.check()
            return Validation(self, own_setting, self._first, own=True)
        try:
            return Validation(self, own_setting, self._first, own=False)
        except ValueError as error:
            rank_zero_warn(f"validation is no part of the search: {error}")
            return None

    def _explained(self, failure: SearchFailed, samples: ProbeBatches) -> SearchFailed:
        """The refusal with what the memory is made of, where something was run."""
        if not failure.trials:
            return failure
        trial, trainer, device_memory = failure.trials[-1], self._trainer, self._device_memory
        device_memory.release_cached()  # what the host's heap keeps of the steps is activations, not the rest
        breakdown = measure_breakdown(
            trainer.lightning_module,
            trainer.optimizers,
            None,  # counted as it is on the host: to move it could run out of memory once more
            trainer.strategy.root_device,
            start_bytes=device_memory.current().allocated_bytes,
            peak_bytes=trial.peak_bytes - self._shared(trial),
        )
        batch_bytes = sum(tensor.nbytes for tensor in tensors_in(samples.batch(trial.batch_size)[0]))
        activations_bytes = max(0, breakdown.activations_bytes - batch_bytes)
        breakdown = replace(breakdown, batch_bytes=batch_bytes, activations_bytes=activations_bytes)
        held = f"At {trial.batch_size} samples the memory held {breakdown_text(breakdown)}"
        if shared := self._shared(trial):
            held += (
                f", and up to {mib(shared)} in loader workers: fewer of them, or a smaller prefetch_factor, hold less"
            )
        return replace(failure, reason=f"{failure.reason} {held}.")
