"""A rehearsal: an epoch in small, as the training will run it, under the limit."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Growth
from lightning_batchmem.search.meter import TrialMeter
from lightning_batchmem.search.program import Program, Steps
from lightning_batchmem.search.readings import (
    DIFFERING_SHARE,
    growth_bytes,
    has_risen,
    step_peaks,
)
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

STEPS_THAT_FOLLOW = 3
"""Steps that a training has after the steady ones: the last batch, and some of the next epoch."""

MOST_REPEATS = 4
"""More steady steps are run at most this often."""


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
    steady_steps = policy.steps.steady_steps
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
        consecutive.warm_up(policy.steps.rehearsal_warmup_steps)
        steady = consecutive.run_steady(steady_steps)
        # These come first, because a short rehearsal may have no other steps left.
        consecutive.run_others()
        peaks = step_peaks(steady)
        before_bytes = min(peaks)
        # On the host these are peaks of the resident set, which do not count.
        if meter.device.reports_requested_bytes and not is_fragmented:
            for _ in range(MOST_REPEATS):
                # Depth or size of the images may be random, and some draw it every tenth step.
                highest_bytes = max([before_bytes, *peaks])
                is_higher = highest_bytes > (1 + DIFFERING_SHARE) * before_bytes
                # A step of the project may count on no more steps than the training has.
                num_steps = policy.steps.more_steady_steps + STEPS_THAT_FOLLOW
                calls = num_steps * consecutive.calls_per_step
                batches_left = program.batches_in_training(batch_size) - consecutive.num_calls
                is_random = batches_left >= calls and (
                    0 < consecutive.num_draws < policy.steps.more_steady_steps
                )
                # What is kept is measured below, by steps that a short rehearsal has to spare.
                # If only some of the ranks that step together ran more, they would wait forever.
                if not on_any_rank((is_higher or is_random) and not has_risen(steady)):
                    break
                before_bytes = highest_bytes
                run = consecutive.run_more if on_any_rank(is_random) else consecutive.run_steady
                peaks = step_peaks(run(policy.steps.more_steady_steps))
        counted = consecutive.measure_live_bytes()
        if on_any_rank(has_risen(counted or steady)):
            _measure_growth(meter, consecutive, primary, batch_size)
    _run(meter, primary, primary.last_batch_size(batch_size), 1)
    if evaluation is not None:
        with ConsecutiveSteps(meter, evaluation, batch_size) as consecutive:
            steady = consecutive.run(EVALUATION_STEPS)
            counted = consecutive.measure_live_bytes()
            if on_any_rank(has_risen(counted or steady)):
                _measure_growth(meter, consecutive, evaluation, batch_size)
        _run(meter, evaluation, evaluation.last_batch_size(batch_size), 1)
    if program.training is not None:
        # No epoch follows an evaluation's.
        _run(meter, primary, batch_size, 1)


def batches_that_keep(program: Program, steps: Steps, batch_size: int) -> float:
    """Batches over which what equal steps keep adds up; ``inf`` where their number is unknown."""
    in_epoch = steps.batches_in_epoch(batch_size)
    in_training = program.batches_in_training(batch_size)
    if steps is program.primary:
        return min(in_epoch if steps.frees_at_epoch_end else math.inf, in_training)
    if steps.frees_at_epoch_end:
        return in_epoch
    # A validation follows each epoch.
    return in_epoch * max(1.0, in_training / max(1.0, program.batches_in_epoch(batch_size)))


def _measure_growth(
    meter: TrialMeter, consecutive: ConsecutiveSteps, steps: Steps, batch_size: int
) -> None:
    """Measure what equal steps keep."""
    readings = consecutive.run_equal(GROWTH_STEPS)
    step_bytes = growth_bytes(readings)
    if step_bytes > 0:
        batches = batches_that_keep(meter.program, steps, batch_size)
        meter.keep_growth(
            Growth(
                -(-step_bytes // len(readings[-1].calls)),
                int(batches) if math.isfinite(batches) else None,
                consecutive.num_calls,
                is_of_epoch=steps.frees_at_epoch_end,
                is_of_validation=steps is meter.program.evaluation,
            )
        )


def _run(meter: TrialMeter, steps: Steps, batch_size: int, count: int) -> None:
    with ConsecutiveSteps(meter, steps, batch_size) as consecutive:
        consecutive.run(count)
