"""A rehearsal: an epoch in small, as the training will run it, under the limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from lightning_batchmem.devices.foreign_values import value_or_none
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Growth
from lightning_batchmem.search.meter import TrialMeter
from lightning_batchmem.search.program import Steps
from lightning_batchmem.search.readings import growth_bytes, has_risen
from lightning_batchmem.search.steps import ConsecutiveSteps

EVALUATION_STEPS = 2
"""Steps of an evaluation. The second shows a difference."""

GROWTH_STEPS = 5
"""Equal steps where memory rises from step to step. Four equal rises are not an accident."""

RAGGED_STEPS = 40
"""Steps at the beginning where batches of ever new shapes fragment the cache of the allocator.

Source: of the trainings that ran out of memory, most did so within 40 steps.
"""

SHORT_TRAINING = 100
SHORT_REHEARSAL = 10
"""A training with fewer batches is short, and its rehearsals have at most this many full steps.

Source: otherwise they have 7 to 25 and more, and would cost as much as such a training.
"""

DIFFERING_SHARE = 0.1
"""Peaks differ from this share of the highest on. Less is noise of the allocator."""


def rehearse(
    meter: TrialMeter,
    policy: SearchPolicy,
    batch_size: int,
    on_any_rank: Callable[[bool], bool] = bool,
    *,
    is_fragmented: bool = False,
) -> None:
    """Run the kinds of steps that a training runs, in their order, on the batches that it gets.

    These are the sanity check, full steps, the last batch of the epoch, the validation, and a full
    step of the next epoch. In an evaluation there are full steps and the last batch.

    Args:
        meter: reads the steps of the program, which has just been restarted.
        policy: the numbers that steer the search.
        batch_size: samples in each full batch.
        on_any_rank: whether something is true on one of the ranks that take the steps together;
            by default on this one.
        is_fragmented: whether batches of ever new shapes fragment the cache of the allocator.
    """
    program = meter.program
    primary = program.primary
    evaluation = program.evaluation if program.training is not None else None
    if evaluation is not None and program.evaluates_first:
        _run(meter, evaluation, batch_size, EVALUATION_STEPS)
        # The sanity check leaves workspaces of libraries, in a training too.
        meter.start_again()
    steady_steps = policy.steady_steps
    most_steps = math.inf
    ragged_steps = RAGGED_STEPS
    # A rank may get more batches, and those that step together run as many steps.
    if not on_any_rank(program.batches_in_training(batch_size) >= SHORT_TRAINING):
        # The last batch follows, and a step of the next epoch.
        most_steps = SHORT_REHEARSAL - 2
        ragged_steps = SHORT_REHEARSAL
        if not meter.device.reports_requested_bytes:
            # Steps that count live bytes follow, and these may show what grows.
            steady_steps = 1
    if is_fragmented:
        with ConsecutiveSteps(meter, primary, batch_size) as consecutive:
            consecutive.run_mixed(ragged_steps)
    with ConsecutiveSteps(meter, primary, batch_size, most_steps) as consecutive:
        consecutive.warm_up(policy.rehearsal_warmup_steps)
        steady = consecutive.run_steady(steady_steps)
        # The micro batches of a step differ in any case: only the later ones have gradients.
        peaks_bytes = [max(call.peaks.peak_bytes for call in one.calls) for one in steady]
        difference_bytes = max(peaks_bytes) - min(peaks_bytes)
        # If only some of the ranks that step together ran more steps, they would wait forever.
        # On the host these peaks are those of the resident set, which do not count.
        if (meter.device.reports_requested_bytes and not is_fragmented) and on_any_rank(
            difference_bytes > DIFFERING_SHARE * max(peaks_bytes)
        ):
            # Depth or size of the images may be random.
            consecutive.run_steady(policy.more_steady_steps)
        consecutive.run_others()
        counted = consecutive.measure_live_bytes()
        if on_any_rank(has_risen(counted or steady)):
            batches = program.batches_in_training(batch_size)
            _measure_growth(meter, consecutive, primary, batches)
        if primary.kept_bytes:
            number = _number(primary.batches_in_epoch(batch_size))
            meter.keep_growth(primary, Growth(primary.kept_bytes, number, has_predictions=True))
    _run(meter, primary, primary.last_batch_size(batch_size), 1)
    if evaluation is not None:
        with ConsecutiveSteps(meter, evaluation, batch_size) as consecutive:
            steady = consecutive.run(EVALUATION_STEPS)
            counted = consecutive.measure_live_bytes()
            if on_any_rank(has_risen(counted or steady)):
                # An evaluation follows each epoch.
                in_epoch = program.batches_in_epoch(batch_size)
                epochs = program.batches_in_training(batch_size) / max(1.0, in_epoch)
                batches = evaluation.batches_in_epoch(batch_size) * max(1.0, epochs)
                _measure_growth(meter, consecutive, evaluation, batches)
        _run(meter, evaluation, evaluation.last_batch_size(batch_size), 1)
    if program.training is not None:
        # No epoch follows that of an evaluation.
        _run(meter, primary, batch_size, 1)


def growth_over_epochs(
    meter: TrialMeter,
    steps: Steps,
    batch_size: int,
    growth: Growth | None,
    watched: Callable[[], AbstractContextManager[None]],
) -> Growth | None:
    """What equal steps keep, over an epoch if most of it is freed before the next one.

    Hooks between two epochs may need all ranks, so they call this together, also those on which
    nothing grows.

    Args:
        meter: reads the steps of the program, which has just been restarted.
        steps: the steps.
        batch_size: samples in each batch.
        growth: what they keep on this rank.
        watched: makes a context for steps, which ranks take together or alone.
    """
    end_bytes = []
    # Hooks may replace a list, and the first one is in the snapshot of the search too.
    for count in (1, GROWTH_STEPS, 1):
        with ConsecutiveSteps(meter, steps, batch_size) as consecutive:
            with watched():
                last = consecutive.run_equal(count)[-1]
            end_bytes.append(last.end_bytes or 0)
            value_or_none("Memory after the end of an epoch", steps.end_epoch)
    if growth is not None:
        kept_bytes = GROWTH_STEPS * len(last.calls) * growth.batch_bytes
        if 2 * (end_bytes[1] - end_bytes[2]) > kept_bytes:
            batches = _number(steps.batches_in_epoch(batch_size))
            return replace(growth, batches=batches, falls_at_epoch_end=True)
    return growth


def _measure_growth(
    meter: TrialMeter, consecutive: ConsecutiveSteps, steps: Steps, batches: float
) -> None:
    """Measure what equal steps keep, which adds up over these batches."""
    readings = consecutive.run_equal(GROWTH_STEPS)
    step_bytes = growth_bytes(readings)
    if step_bytes > 0:
        batch_bytes = -(-step_bytes // len(readings[-1].calls))
        growth = Growth(batch_bytes, _number(batches), batches_run=consecutive.num_calls)
        meter.keep_growth(steps, growth)


def _number(batches: float) -> int | None:
    return int(batches) if math.isfinite(batches) else None


def _run(meter: TrialMeter, steps: Steps, batch_size: int, count: int) -> None:
    with ConsecutiveSteps(meter, steps, batch_size) as consecutive:
        consecutive.run(count)
