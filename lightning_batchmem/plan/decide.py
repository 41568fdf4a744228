"""From everything run so far to the next size to run, or the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_batchmem.plan import sentences
from lightning_batchmem.plan.fit import dropped_sizes, fit_memory, fit_time, ran_through
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import (
    LimitedBy,
    MemoryModel,
    NextSize,
    SearchFailed,
    SearchLimits,
    Trial,
)
from lightning_batchmem.plan.scaling import largest_where, rounded, size_range

_MEMORY: LimitedBy = "memory"
# While only small probes have run, the host is assumed to hold at most this many bytes for each
# live byte.
_MOST_HELD = 2.5
# Expandable segments are worth a try from this ratio of reserved bytes to requested bytes.
_FRAGMENTED = 1.15


def decide(
    trials: Sequence[Trial], limits: SearchLimits, policy: SearchPolicy | None = None
) -> NextSize | Plan | SearchFailed:
    """Choose the next batch size to run, or the plan.

    Probes two or three small sizes, predicts the largest that fits, and rehearses it. After a
    failure the size steps down. The planned size has passed a rehearsal, unless the data set leaves
    no choice.

    Args:
        trials: everything run so far, in the order in which it was run.
        limits: limit in bytes, range of sizes in samples, rounding and objective.
        policy: constants of the search.

    Returns:
        The next size, a plan, or the reason why there is none.

    Example:
        >>> limits = SearchLimits(
        ...     limit_bytes=1000, min_batch_size=1, max_batch_size=50, max_reason="dataset"
        ... )
        >>> trials = []
        >>> while isinstance(step := decide(trials, limits), NextSize):
        ...     peaks = {"forward": 100 + 10 * step.batch_size}
        ...     trials.append(Trial(step.batch_size, "ok", peaks, step.kind))
        >>> step.batch_size, step.limited_by, [trial.batch_size for trial in trials]
        (50, 'dataset', [2, 8, 50])
    """
    policy = policy or SearchPolicy()
    lowest, highest = size_range(limits)
    if lowest > highest:
        return SearchFailed(sentences.empty_range_text(limits), tuple(trials))
    if not trials:
        if limits.max_reason == "dataset" and limits.max_batch_size < policy.first_size:
            reason = f"{highest} samples: {sentences.size_limit_text(limits)}. Nothing was run."
            return Plan(
                highest, "dataset", False, limits.limit_bytes, None, None, (), None, None, reason
            )
        first = min(max(lowest, rounded(policy.first_size, limits, up=True)), highest)
        return NextSize(first, "probe")
    state = _SearchState(tuple(trials), limits, policy, lowest, highest)
    step = state.smaller() if not state.fitting else state.next_size()
    if isinstance(step, NextSize):
        if step.batch_size in state.tried or state.sizes_left:
            return step
        # No other size may run. The rehearsal of a size that was probed is no other size.
        if not state.passed and state.fitting:
            return NextSize(state.largest.batch_size, "rehearsal")
        step = _MEMORY
    if isinstance(step, SearchFailed):
        return step
    if not state.passed:
        return SearchFailed(sentences.no_rehearsal_text(state.failed[-1]), tuple(trials))
    if limits.objective == "throughput":
        return state.knee(step)
    return state.plan(state.passed[-1], step)


@dataclass(frozen=True)
class _SearchState:
    """Everything that is derived from the trials, computed once."""

    trials: tuple[Trial, ...]
    limits: SearchLimits
    policy: SearchPolicy
    lowest: int
    highest: int

    @cached_property
    def tried(self) -> set[int]:
        return {trial.batch_size for trial in self.trials}

    @property
    def sizes_left(self) -> int:
        return self.limits.max_sizes - len(self.tried)

    @cached_property
    def passed_sizes(self) -> set[int]:
        return {
            trial.batch_size
            for trial in self.trials
            if trial.kind == "rehearsal" and trial.outcome == "ok"
        }

    @cached_property
    def failed(self) -> list[Trial]:
        """Sizes that did not run through, above every rehearsal that passed."""
        best = max(self.passed_sizes, default=0)
        return [trial for trial in self.trials if trial.outcome != "ok" and trial.batch_size > best]

    @cached_property
    def failed_size(self) -> float:
        return min((trial.batch_size for trial in self.failed), default=math.inf)

    @cached_property
    def fitting(self) -> list[Trial]:
        """Sizes that ran within the limit, below any that did not, smallest first."""
        ran = ran_through(trial for trial in self.trials if trial.outcome == "ok")
        return [trial for trial in ran if trial.batch_size < self.failed_size]

    @cached_property
    def passed(self) -> list[Trial]:
        """Rehearsals that passed, smallest size first."""
        return [trial for trial in self.fitting if trial.batch_size in self.passed_sizes]

    @cached_property
    def model(self) -> MemoryModel | None:
        return fit_memory(self.trials)

    @property
    def largest(self) -> Trial:
        return self.fitting[-1]

    def next_size(self) -> NextSize | LimitedBy | SearchFailed:
        kills = self.limits.out_of_memory_kills
        if self.passed and self.passed[-1].batch_size >= self.highest:
            return self.limits.max_reason
        if self.model is None:
            return self._second_size()
        if self.failed and self.failed[-1].kind == "probe" and self.sizes_left > 3 and not kills:
            # Probe a size between the largest that fits and the smallest that does not.
            between = self._rounded(math.isqrt(self.largest.batch_size * int(self.failed_size)))
            if between >= 2 * self.largest.batch_size:
                return NextSize(between, "probe")
        candidate = self._candidate()
        probes_only = not self.passed and not self.failed and not kills
        if probes_only and self.limits.max_sizes > 4:
            # A probe at a larger size checks the lines before the first rehearsal.
            large = self._rounded(int(self.policy.large_probe_share * candidate))
            half_share = self.policy.candidate_share / 2
            if large >= 2 * self.largest.batch_size and self._within(large, half_share):
                return NextSize(large, "probe")
        if kills:
            return self._climb(candidate)
        if not self.passed:
            return NextSize(candidate, "rehearsal")
        if self.failed or self.limits.steps_are_collective or len(self.passed) > 1:
            return _MEMORY
        higher = self._largest_within(self.policy.step_up_share)
        least_gain = (1 + self.policy.min_gain) * self.passed[-1].batch_size
        is_gain = higher == self.highest or higher >= least_gain
        return NextSize(higher, "rehearsal") if is_gain else _MEMORY

    def smaller(self) -> NextSize | SearchFailed:
        if self.lowest < self.failed_size:
            return NextSize(self.lowest, "probe")
        hint = " Or pass min_batch_size=1." if self.lowest == self.policy.first_size else ""
        return SearchFailed(
            sentences.nothing_fits_text(self.failed[-1], self.limits) + hint, self.trials
        )

    def knee(self, limited_by: LimitedBy) -> NextSize | Plan:
        """The smallest size within five per cent of the best throughput.

        It can be computed once the largest size that fits is known.

        Source: with ``T(B) = t0 + c * B`` the throughput ``B / T(B)`` never falls, so it is best at
        the largest size ``M``; ``B / T(B) = s * M / T(M)`` gives ``B = s * t0 * M / (t0 + c * M *
        (1 - s))``.
        """
        best = self.passed[-1]
        time = fit_time(self.trials)
        share = self.policy.throughput_share
        if time is None:
            return self.plan(best, limited_by)
        t0 = time.line.intercept
        c = time.line.slope
        size = best.batch_size
        divisor = t0 + c * size * (1 - share)
        wanted = math.ceil(share * t0 * size / divisor) if divisor > 0 else size
        allowed = rounded(max(self.policy.first_size, wanted), self.limits, up=True)
        target = min(size, max(self.lowest, allowed))
        chosen = next(trial for trial in self.passed if trial.batch_size >= target)
        rehearsed = {trial.batch_size for trial in self.trials if trial.kind == "rehearsal"}
        may_run = target in self.tried or self.sizes_left
        if chosen.batch_size != target and target not in rehearsed and may_run:
            return NextSize(target, "rehearsal")
        return self.plan(chosen, "throughput" if chosen is not best else limited_by)

    def plan(self, chosen: Trial, limited_by: LimitedBy) -> Plan:
        size = chosen.batch_size
        smaller = fit_memory([trial for trial in self.trials if trial.batch_size < size])
        share = self.policy.throughput_share
        best = self.passed[-1].batch_size
        if limited_by == "throughput":
            why = f"{share:.0%} of the throughput at {best}, the largest size that fits"
        elif limited_by == "memory":
            why = sentences.memory_text(self.failed, size)
        else:
            why = sentences.size_limit_text(self.limits)
        return Plan(
            batch_size=size,
            limited_by=limited_by,
            verified=True,
            limit_bytes=self.limits.limit_bytes,
            predicted_peak_bytes=round(smaller.predict_bytes(size)) if smaller else None,
            measured_peak_bytes=chosen.peak_bytes,
            held_peak_bytes=chosen.peak_held_bytes,
            trials=self.trials,
            memory=self.model,
            time=fit_time(self.trials),
            reason=f"{size} samples: {why}.",
            notes=self._notes(chosen, limited_by),
        )

    def _notes(self, chosen: Trial, limited_by: LimitedBy) -> tuple[str, ...]:
        notes = [sentences.dropped_text(dropped) for dropped in dropped_sizes(self.trials)]
        is_fragmented = (
            not self.limits.out_of_memory_kills
            and chosen.held_bytes > _FRAGMENTED * chosen.peak_bytes
        )
        if limited_by == "memory" and is_fragmented:
            notes.append(sentences.fragmentation_text(chosen))
        return tuple(notes)

    def _second_size(self) -> NextSize | LimitedBy:
        """A second size before there is a line: one that fits for certain, or the next one."""
        size = self.largest.batch_size
        highest = min(self.highest, self.failed_size - 1)
        if (following := rounded(size + 1, self.limits, up=True)) > highest:
            return NextSize(size, "rehearsal") if not self.passed else _MEMORY
        second = self._rounded(
            int(min(self.policy.second_growth * size, self._guaranteed(), highest))
        )
        if self.failed:
            second = min(second, self._rounded(math.isqrt(size * int(self.failed_size))))
        if second > size:
            return NextSize(second, "rehearsal" if second == self.highest else "probe")
        if not self.passed:
            # Rehearse this size first, because the next one may not fit.
            return NextSize(size, "rehearsal")
        return _MEMORY if self.limits.out_of_memory_kills else NextSize(following, "rehearsal")

    def _guaranteed(self) -> int:
        """The largest size that fits if bytes that do not last grow in proportion to the batch.

        Source: the peak is a maximum of ``a + b * size`` with ``a >= fixed``, and for each of these
        ``a + b * k * size <= fixed + k * (a - fixed + b * size)``. On the host the held bytes for
        each live byte give a second size, and the larger of the two counts.
        """
        trial = self.largest
        needed_bytes = self.largest.needed_bytes
        fixed_bytes = min(trial.fixed_bytes, needed_bytes)
        limit_bytes = int(self.policy.candidate_share * self.limits.limit_bytes)
        size = (limit_bytes - fixed_bytes) * trial.batch_size // max(1, needed_bytes - fixed_bytes)
        if not (self.limits.out_of_memory_kills and trial.is_exact):
            return size
        # An old process holds free blocks of earlier work, which do not grow with the batch.
        growth_bytes = _MOST_HELD * max(1, trial.peak_bytes - fixed_bytes)
        room_bytes = limit_bytes - needed_bytes
        return max(size, trial.batch_size + int(room_bytes * trial.batch_size / growth_bytes))

    def _candidate(self) -> int:
        """The largest size that is predicted to fit, less a step for each failure."""
        policy = self.policy
        if self.limits.steps_are_collective:
            share = policy.collective_share
        elif self.limits.out_of_memory_kills:
            # The needed bytes include a reserve there.
            share = 1.0
        else:
            share = policy.candidate_share
        size = self._largest_within(share)
        if self.failed:
            is_third = sum(trial.outcome == "out_of_memory" for trial in self.failed) > 1
            if self.sizes_left == 1 and not self.limits.out_of_memory_kills:
                # The last size should fit where exceeding the limit does not end the process.
                more = 2
            else:
                # The size after two that ran out of memory should fit.
                more = int(is_third)
            shrink = policy.step_down[min(len(self.failed) + more, len(policy.step_down)) - 1]
            size = min(size, self._rounded(int(self.failed_size * (1 - shrink))))
            # The prediction is far too large, so search between the sizes that fit and that do not.
            if len(self.failed) >= len(policy.step_down):
                between = self._rounded(math.isqrt(self.largest.batch_size * int(self.failed_size)))
                size = min(size, between)
        return max(size, self.lowest)

    def _climb(self, candidate: int) -> NextSize | LimitedBy:
        """Approach the candidate in stages where exceeding the limit ends the process."""
        gain = 1 + self.policy.min_gain_when_killed
        if self.passed and candidate < min(self.highest, gain * self.passed[-1].batch_size):
            return _MEMORY
        stages = self.policy.climb if self.limits.max_sizes > 4 else self.policy.climb[1:]
        for share in () if self.failed else stages[len(self.passed) :]:
            fits = largest_where(lambda size: self._within(size, 1.0), 0, 10**9)
            target = max(self.lowest, self._rounded(int(share * fits)))
            if gain * self.largest.batch_size < target <= candidate / gain:
                # A rehearsal on the way to the candidate measures the held bytes.
                return NextSize(target, "rehearsal")
        return NextSize(candidate, "rehearsal")

    def _largest_within(self, share: float) -> int:
        return self._rounded(largest_where(lambda size: self._within(size, share), 0, self.highest))

    def _within(self, size: int, share: float) -> bool:
        """Whether a size is predicted to need at most a share of the limit."""
        if self.model is None:
            return False
        limit_bytes = self.limits.limit_bytes
        predicted_bytes = self.model.predict_bytes(size)
        if not self.limits.out_of_memory_kills:
            return predicted_bytes <= share * limit_bytes
        # Held bytes grow with the live bytes, as far as the process writes to these. Probes are too
        # small to show by how much.
        ran = ran_through(self.trials)
        first = ran[0]
        last = ran[-1]
        last_live_bytes = last.peak_bytes
        ended = [
            trial
            for trial in self.failed
            if trial.outcome == "over_limit" and not trial.phase_peak_bytes
        ]
        # Exceeding the limit ended these trials before their live bytes were counted.
        if ended:
            last = min(ended, key=lambda trial: trial.batch_size)
            last_live_bytes = round(self.model.predict_bytes(last.batch_size))
        least, most = (0.75, math.inf) if last.kind != "probe" else (1.0, _MOST_HELD)
        grown_bytes = max(1, last_live_bytes - first.peak_bytes)
        ratio = min(most, max(least, (last.needed_bytes - first.needed_bytes) / grown_bytes))
        needed_bytes = last.needed_bytes + ratio * (predicted_bytes - last_live_bytes)
        return needed_bytes <= share * limit_bytes

    def _rounded(self, size: int) -> int:
        return self.highest if size >= self.highest else rounded(size, self.limits)
