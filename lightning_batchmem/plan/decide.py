"""From everything that was run to the next size to run, or the size to train with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_batchmem.plan import sentences
from lightning_batchmem.plan.fit import dropped_sizes, fit_memory, fit_time, ran_through
from lightning_batchmem.plan.headroom import (
    guaranteed_size_on_accelerator,
    guaranteed_size_on_host,
    needed_bytes_on_host,
)
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import (
    Chosen,
    LimitedBy,
    MemoryModel,
    NextSize,
    SearchFailed,
    SearchLimits,
    Trial,
    TrialKind,
)
from lightning_batchmem.plan.scaling import largest_where, rounded, size_range

_MEMORY: LimitedBy = "memory"


def decide(
    trials: Sequence[Trial], limits: SearchLimits, policy: SearchPolicy | None = None
) -> NextSize | Chosen | SearchFailed:
    """Choose the next batch size to run, or the size to train with.

    Probes two or three small sizes, predicts the largest that fits, and rehearses it. After a
    failure the size steps down. The chosen size has passed a rehearsal, unless the data set leaves
    no choice.

    Args:
        trials: everything that was run, in the order in which it was run.
        limits: limit in bytes, range of sizes in samples, rounding and objective.
        policy: the numbers that steer the search.

    Returns:
        The next size, the size to train with, or the reason why there is none.

    Example:
        >>> limits = SearchLimits(1000, min_batch_size=1, max_batch_size=50, max_reason="dataset")
        >>> trials = []
        >>> while isinstance(step := decide(trials, limits), NextSize):
        ...     peak_bytes = 100 + 10 * step.batch_size
        ...     trials.append(Trial(step.batch_size, "ok", {"forward": peak_bytes}, step.kind))
        >>> step.batch_size, step.limited_by, [trial.batch_size for trial in trials]
        (50, 'dataset', [2, 8, 50])
    """
    state = _SearchState(tuple(trials), limits, policy or SearchPolicy())
    if state.lowest > state.highest:
        return SearchFailed(sentences.empty_range(limits))
    if not trials:
        return state.first_size()
    step = state.next_size() if state.fitting else state.smallest_size()
    if isinstance(step, SearchFailed):
        return step
    if isinstance(step, NextSize):
        if step.batch_size in state.tried or state.sizes_left:
            return step
        # A size that was probed costs no further size, so it is the last try.
        if not state.passed and state.fitting:
            return state.rehearse(state.largest.batch_size)
        step = _MEMORY
    if not state.passed:
        return SearchFailed(sentences.no_rehearsal(state.failed[-1]))
    if limits.objective == "throughput":
        return state.knee(step)
    return state.choose(state.passed[-1], step)


@dataclass(frozen=True)
class _SearchState:
    """Everything that is derived from the trials, computed once."""

    trials: tuple[Trial, ...]
    limits: SearchLimits
    policy: SearchPolicy

    @cached_property
    def lowest(self) -> int:
        return size_range(self.limits)[0]

    @cached_property
    def highest(self) -> int:
        return size_range(self.limits)[1]

    @cached_property
    def tried(self) -> set[int]:
        return {trial.batch_size for trial in self.trials}

    @property
    def sizes_left(self) -> int:
        is_compiled = self.limits.is_compiled
        most = self.policy.max_sizes_compiled if is_compiled else self.policy.max_sizes
        return most - len(self.tried)

    @cached_property
    def passed_sizes(self) -> set[int]:
        return {
            trial.batch_size
            for trial in self.trials
            if trial.kind == "rehearsal" and trial.outcome == "ok"
        }

    @cached_property
    def failed(self) -> list[Trial]:
        """Trials that did not run through, above every rehearsal that passed."""
        best = max(self.passed_sizes, default=0)
        return [t for t in self.trials if t.outcome != "ok" and t.batch_size > best]

    @cached_property
    def failed_size(self) -> float:
        return min((trial.batch_size for trial in self.failed), default=math.inf)

    @cached_property
    def ran(self) -> list[Trial]:
        """One trial for each size that ran through, smallest size first."""
        return ran_through(self.trials)

    @cached_property
    def fitting(self) -> list[Trial]:
        """One trial for each size that ran within the limit, below any size that did not."""
        ran = ran_through(trial for trial in self.trials if trial.outcome == "ok")
        return [trial for trial in ran if trial.batch_size < self.failed_size]

    @cached_property
    def passed(self) -> list[Trial]:
        """Rehearsals that passed, smallest size first."""
        return [trial for trial in self.fitting if trial.batch_size in self.passed_sizes]

    @cached_property
    def memory(self) -> MemoryModel | None:
        return fit_memory(self.ran, self.policy)

    @property
    def largest(self) -> Trial:
        return self.fitting[-1]

    def probe(self, batch_size: int) -> NextSize:
        return self._next(batch_size, "probe")

    def rehearse(self, batch_size: int) -> NextSize:
        return self._next(batch_size, "rehearsal")

    def first_size(self) -> NextSize | Chosen:
        first = self.policy.first_size
        if self.limits.max_reason == "dataset" and self.limits.max_batch_size < first:
            reason = sentences.too_small_to_run(self.highest, self.limits)
            return Chosen(self.highest, "dataset", reason, is_verified=False)
        return self.probe(min(max(self.lowest, rounded(first, self.limits, up=True)), self.highest))

    def smallest_size(self) -> NextSize | SearchFailed:
        if self.lowest < self.failed_size:
            return self.probe(self.lowest)
        could_be_one = self.lowest == self.policy.first_size
        return SearchFailed(
            sentences.nothing_fits(self.failed[-1], self.limits, could_be_one=could_be_one)
        )

    def next_size(self) -> NextSize | LimitedBy:
        """The next size, or what limits the size if no other one is worth a try."""
        kills = self.limits.overrun_kills
        if self.passed and self.passed[-1].batch_size >= self.highest:
            return self.limits.max_reason
        if self.memory is None:
            return self._second_size()
        has_failed_probe = bool(self.failed) and self.failed[-1].kind == "probe"
        if has_failed_probe and self.sizes_left > self.policy.between_probes_sizes and not kills:
            # Between a size that fits and one that does not.
            between = self._between_fit_and_failure()
            if between >= 2 * self.largest.batch_size:
                return self.probe(between)
        candidate = self._candidate()
        is_first_candidate = not self.passed and not self.failed
        if is_first_candidate and not kills and not self.limits.is_compiled:
            large = self._rounded(int(self.policy.large_probe_share * candidate))
            is_far = large >= 2 * self.largest.batch_size
            if is_far and self._is_predicted_to_fit(large, self.policy.large_probe_limit_share):
                return self.probe(large)
        if kills:
            return self._climb(candidate)
        if not self.passed:
            return self.rehearse(candidate)
        if self.failed or self.limits.steps_are_collective or len(self.passed) > 1:
            return _MEMORY
        higher = self._largest_predicted_size(self.policy.step_up_share)
        enough = (1 + self.policy.min_gain) * self.passed[-1].batch_size
        return self.rehearse(higher) if higher == self.highest or higher >= enough else _MEMORY

    def knee(self, limited_by: LimitedBy) -> NextSize | Chosen:
        """The smallest size near the best throughput, once the largest size that fits is known.

        Source: with ``T(B) = t0 + c * B`` the throughput ``B / T(B)`` never falls, so it is best at
        the largest size ``M``; ``B / T(B) = s * M / T(M)`` gives
        ``B = s * t0 * M / (t0 + c * M * (1 - s))``.
        """
        best = self.passed[-1]
        time = fit_time(self.trials)
        if time is None:
            return self.choose(best, limited_by)
        share = self.policy.throughput_share
        t0 = time.line.intercept
        divisor = t0 + time.line.slope * best.batch_size * (1 - share)
        wanted = best.batch_size
        if divisor > 0:
            wanted = math.ceil(share * t0 * best.batch_size / divisor)
        wanted = rounded(max(self.policy.first_size, wanted), self.limits, up=True)
        target = min(best.batch_size, max(self.lowest, wanted))
        chosen = next(trial for trial in self.passed if trial.batch_size >= target)
        rehearsed = {trial.batch_size for trial in self.trials if trial.kind == "rehearsal"}
        may_run = target in self.tried or self.sizes_left > 0
        if chosen.batch_size != target and target not in rehearsed and may_run:
            return self.rehearse(target)
        return self.choose(chosen, limited_by if chosen is best else "throughput")

    def choose(self, trial: Trial, limited_by: LimitedBy) -> Chosen:
        size = trial.batch_size
        if limited_by == "throughput":
            share = self.policy.throughput_share
            reason = sentences.near_best_throughput(size, share, self.passed[-1].batch_size)
        elif limited_by == "memory":
            reason = sentences.limited_by_memory(size, self.failed)
        else:
            reason = sentences.limited_by_size(size, self.limits)
        notes = [sentences.dropped_from_fit(dropped) for dropped in dropped_sizes(self.ran)]
        is_fragmented = trial.held_bytes > self.policy.fragmented_ratio * trial.peak_bytes
        if limited_by == "memory" and is_fragmented and not self.limits.overrun_kills:
            notes.append(sentences.fragmented(trial))
        return Chosen(size, limited_by, reason, tuple(notes))

    def _next(self, batch_size: int, kind: TrialKind) -> NextSize:
        follows_failure = bool(self.trials) and self.trials[-1].outcome != "ok"
        return NextSize(batch_size, kind, kind == "rehearsal" or follows_failure)

    def _second_size(self) -> NextSize | LimitedBy:
        """A second size before there is a line: one that fits for certain, or the next above."""
        size = self.largest.batch_size
        highest = min(self.highest, self.failed_size - 1)
        following = rounded(size + 1, self.limits, up=True)
        if following > highest:
            return _MEMORY if self.passed else self.rehearse(size)
        second = min(self.policy.second_growth * size, self._guaranteed_size(), highest)
        second = self._rounded(int(second))
        if self.failed:
            second = min(second, self._between_fit_and_failure())
        if second > size:
            return self.rehearse(second) if second == self.highest else self.probe(second)
        if not self.passed:
            # The next size may not fit.
            return self.rehearse(size)
        return _MEMORY if self.limits.overrun_kills else self.rehearse(following)

    def _candidate(self) -> int:
        """The largest size that is predicted to fit, less a step for each failure."""
        policy = self.policy
        if self.limits.steps_are_collective:
            share = policy.collective_share
        elif self.limits.overrun_kills:
            # The needed bytes include a reserve.
            share = 1.0
        else:
            share = policy.candidate_share
        size = self._largest_predicted_size(share)
        if self.failed:
            num_steps = len(self.failed) + self._skipped_steps_down()
            shrink = policy.step_down[min(num_steps, len(policy.step_down)) - 1]
            size = min(size, self._rounded(int(self.failed_size * (1 - shrink))))
            if len(self.failed) >= len(policy.step_down):
                # The prediction is far too large, so search in between.
                size = min(size, self._between_fit_and_failure())
        return max(size, self.lowest)

    def _skipped_steps_down(self) -> int:
        """Steps down to skip: the last size should fit, and so should the third that failed."""
        if self.sizes_left == 1 and not self.limits.overrun_kills:
            return 2
        num_out_of_memory = sum(trial.outcome == "out_of_memory" for trial in self.failed)
        return 1 if num_out_of_memory > 1 else 0

    def _climb(self, candidate: int) -> NextSize | LimitedBy:
        """Approach the candidate in stages where exceeding the limit ends the process."""
        gain = 1 + self.policy.min_gain_when_killed
        if self.passed and candidate < min(self.highest, gain * self.passed[-1].batch_size):
            return _MEMORY
        if self.failed:
            return self.rehearse(candidate)
        stages = self.policy.climb[1:] if self.limits.is_compiled else self.policy.climb
        for share in stages[len(self.passed) :]:
            fits = largest_where(lambda size: self._is_predicted_to_fit(size, 1.0), 0, 10**9)
            target = max(self.lowest, self._rounded(int(share * fits)))
            # A rehearsal below the candidate measures how many bytes are held.
            if gain * self.largest.batch_size < target <= candidate / gain:
                return self.rehearse(target)
        return self.rehearse(candidate)

    def _guaranteed_size(self) -> int:
        limit_bytes = int(self.policy.candidate_share * self.limits.limit_bytes)
        if self.limits.overrun_kills:
            return guaranteed_size_on_host(self.largest, limit_bytes, self.policy)
        return guaranteed_size_on_accelerator(self.largest, limit_bytes)

    def _largest_predicted_size(self, share: float) -> int:
        fits = largest_where(lambda size: self._is_predicted_to_fit(size, share), 0, self.highest)
        return self._rounded(fits)

    def _is_predicted_to_fit(self, size: int, share: float) -> bool:
        """Whether a size is predicted to need at most a share of the limit."""
        if self.memory is None:
            return False
        if self.limits.overrun_kills:
            needed_bytes = needed_bytes_on_host(
                size, self.memory, self.ran, self.failed, self.policy
            )
        else:
            needed_bytes = self.memory.predict_bytes(size)
        return needed_bytes <= share * self.limits.limit_bytes

    def _between_fit_and_failure(self) -> int:
        """The geometric mean of the largest size that fits and the smallest that does not."""
        return self._rounded(math.isqrt(self.largest.batch_size * int(self.failed_size)))

    def _rounded(self, size: int) -> int:
        return self.highest if size >= self.highest else rounded(size, self.limits)
