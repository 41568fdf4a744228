from __future__ import annotations

import dataclasses
import doctest
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_batchmem.plan.decide as decide_module
from lightning_batchmem.plan.decide import decide
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import PHASES, NextSize, SearchFailed, SearchLimits, Trial
from lightning_batchmem.plan.sizes import guaranteed_size, repeatability_of, search_state

GB = 10**9
MANY = 4_000_000  # more samples than any law here has room for
Law = list[list[tuple[float, float]]]  # for each phase the lines (a, b) whose maximum a + b * size is its peak


def search_limits(limit: float, cap: int = MANY, low: int = 1, **more: object) -> SearchLimits:
    return SearchLimits(int(limit), low, cap, "dataset", **more)  # type: ignore[arg-type]


def peaks(law: Law, size: int) -> list[float]:
    return [max(a + b * size for a, b in lines) for lines in law]


def oracle(law: Law, limit: int, cap: int = MANY) -> int:
    """The largest size up to ``cap`` that fits, 0 when none does."""
    low, high = 0, cap
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if max(peaks(law, middle)) <= limit else (low, middle - 1)
    return low


@dataclass
class Driven:
    step: Plan | SearchFailed
    trials: list[Trial]

    @property
    def plan(self) -> Plan:
        assert isinstance(self.step, Plan), self.step
        return self.step

    @property
    def sizes(self) -> list[int]:
        return [trial.batch_size for trial in self.trials]

    def too_large(self, limit: float) -> list[int]:
        return [t.batch_size for t in self.trials if t.outcome != "ok" or t.held_bytes > limit]


def drive(
    measure: Callable[[int], Trial],
    search_limits: SearchLimits,
    repeatability: float = 0.0,
    start: list[Trial] | None = None,
) -> Driven:
    """What the finder does, and what must hold of every search whatever the device answers."""
    trials = list(start or [])
    while isinstance(step := decide(trials, search_limits, repeatability), NextSize):
        assert step.batch_size not in [trial.batch_size for trial in trials]
        assert 1 <= step.batch_size <= search_limits.max_batch_size
        assert step.batch_size >= search_limits.min_batch_size
        assert str(step.batch_size) in step.reason
        trials.append(measure(step.batch_size))
        assert len(trials) <= 10
    if isinstance(step, Plan):
        chosen = [t for t in trials if t.batch_size == step.batch_size]
        assert chosen or search_limits.max_batch_size == 1
        assert all(t.outcome == "ok" and t.held_bytes <= search_limits.limit_bytes for t in chosen)
        assert Plan.from_json(step.to_json()) == step
    assert step.trials == tuple(trials)
    return Driven(step, trials)


def device(law: Law, limit: float, runs_out: bool = False, noise: Callable[[int], tuple[int, float]] | None = None):  # type: ignore[no-untyped-def]
    """A measurement of ``law``; ``noise`` says for a peak the stated noise in bytes and the error in -1 to 1 of it."""

    def measure(size: int) -> Trial:
        values = [round(value) for value in peaks(law, size)]
        stated, error = noise(max(values)) if noise else (0, 0.0)
        seen = {phase: max(0, value + round(stated * error)) for phase, value in zip(PHASES, values, strict=False)}
        if runs_out and max(seen.values()) > limit:
            return Trial(size, "out_of_memory", {})
        return Trial(size, "ok", seen, stated, measured_steps=3, full_steps=3)

    return measure


def line(a: float, b: float) -> Law:
    return [[(a, b)]]


# --- by hand -------------------------------------------------------------------------------------------------------


def test_a_straight_law_takes_four_sizes() -> None:
    limit = 10_000
    driven = drive(device(line(1000, 30), limit), search_limits(limit, multiple_of=1))
    # 2, and 4 times as many, which surely fits; 8 times as many; then (10000 - 1000) / 30
    assert driven.sizes == [2, 8, 64, 299]
    plan = driven.plan
    assert (plan.batch_size, plan.limited_by, plan.verified) == (299, "memory", True)
    assert plan.predicted_peak_bytes == plan.measured_peak_bytes == 1000 + 30 * 299
    assert plan.upper_peak_bytes is not None
    assert plan.measured_peak_bytes < plan.upper_peak_bytes <= limit
    assert plan.memory is not None
    assert plan.memory.lines["forward"].slope == pytest.approx(30)
    assert plan.reason.startswith("299 samples: it held 0.010 MiB of the 0.010 MiB limit; the next size, 300")


def test_an_unconfirmed_step_uses_an_eighth_of_the_room() -> None:
    law, limit = line(9000, 10), 10_040
    driven = drive(device(law, limit), search_limits(limit, multiple_of=1))
    # Twice as much might not fit (9020 of 10040), so 3. An eighth of the room is 126 bytes there; a sample takes
    # 10 bytes, and may take 11 by the rounding: 11 more.
    assert driven.sizes == [2, 3, 14, 103]  # 104 would be exactly the limit, without room for the rounding


def test_confirmed_lines_are_followed_to_48_times_the_largest_size_at_most() -> None:
    driven = drive(device(line(10**6, 1), 10**7), search_limits(10**7, cap=10**6, multiple_of=1))
    assert driven.sizes == [2, 8, 64, 3072, 147456, 10**6]


def test_no_stop_is_made_just_before_the_end() -> None:
    """A stop at 32 of 35, which would surely fit, would push nearly as many samples through as the end itself."""
    driven = drive(device(line(1000, 1000), 36_100), search_limits(36_100, multiple_of=1))
    assert driven.sizes == [2, 8, 17, 35]


def test_noise_that_makes_the_end_is_sharpened_half_way_there() -> None:
    """The noise lets 83 samples in, and without it there is room for 200: at half of 83 the lines are sharper."""
    trials = [Trial(size, "ok", {"forward": 1000 + 10 * size}, noise_bytes=200, full_steps=2) for size in (2, 4, 16)]
    step = decide(trials, search_limits(3000, multiple_of=1))
    assert isinstance(step, NextSize)
    assert step.batch_size == 41
    quiet = [dataclasses.replace(trial, noise_bytes=0) for trial in trials]
    step = decide(quiet, search_limits(3000, multiple_of=1))
    assert isinstance(step, NextSize)
    assert step.batch_size == pytest.approx(200, abs=2)


def test_where_all_is_noise_half_steps_are_not_made() -> None:
    """A multilayer perceptron of much weight: 630 MiB, give or take 30, at 2, 3 and 4 samples, of 800."""
    trials = [
        Trial(size, "ok", {"forward": peak}, noise_bytes=30_000, full_steps=2)
        for size, peak in ((2, 630_000), (3, 606_000), (4, 624_000))
    ]
    step = decide(trials, search_limits(800_000, multiple_of=1))
    assert isinstance(step, NextSize)
    assert step.batch_size > 8


def test_a_search_pushes_at_most_four_times_its_size_through_two_steps_at_each() -> None:
    for limit in range(1_200, 40_000, 97):
        driven = drive(device(line(1000, 3), limit), search_limits(limit, multiple_of=1))
        assert 2 * sum(driven.sizes[1:]) <= 4 * driven.plan.batch_size, driven.sizes


@pytest.mark.parametrize(("limit", "goes_on"), [(10500, False), (10700, True)])
def test_a_small_gain_is_not_chased_where_the_search_has_become_dear(limit: int, goes_on: bool) -> None:
    """Sizes of 1304 in all lie behind: less than 20 % more than 800 is not worth another probe, 21 % is."""
    trials = [Trial(size, "ok", {"forward": 1000 + 10 * size}, full_steps=2) for size in (2, 4, 500, 800)]
    step = decide(trials, search_limits(limit, multiple_of=1))
    assert isinstance(step, NextSize if goes_on else Plan)


def test_sizes_from_64_on_are_multiples_of_8_by_default() -> None:
    driven = drive(device(line(1000, 30), 10_000), search_limits(10_000))
    assert driven.plan.batch_size == 296
    assert all(size % 8 == 0 for size in driven.sizes if size >= 64)


@pytest.mark.parametrize("multiple", [3, 32])
def test_every_size_is_a_multiple_when_asked_for(multiple: int) -> None:
    driven = drive(device(line(1000, 3), 10_000), search_limits(10_000, multiple_of=multiple))
    assert all(size % multiple == 0 for size in driven.sizes)
    assert driven.plan.batch_size >= 0.97 * 3000 - multiple


def test_no_multiple_in_the_range_is_refused() -> None:
    step = decide([], search_limits(10_000, cap=20, multiple_of=32))
    assert isinstance(step, SearchFailed)
    assert "no multiple of 32 lies within the bounds: min_batch_size is 1 and" in step.reason


def test_a_range_without_a_multiple_of_8_takes_its_end() -> None:
    driven = drive(device(line(0, 1), 10_000), search_limits(10_000, low=65, cap=70))
    assert driven.sizes == [70]


def test_a_data_set_below_the_smallest_probe_needs_no_search() -> None:
    plan = decide([], SearchLimits(10_000, 1, 1, "dataset"))
    assert isinstance(plan, Plan)
    assert (plan.batch_size, plan.limited_by, plan.verified) == (1, "dataset", False)
    assert (plan.trials, plan.measured_peak_bytes) == ((), None)
    assert isinstance(
        decide([], SearchLimits(10_000, 1, 1, "max_batch_size")), NextSize
    )  # the user's word is no data set


@pytest.mark.parametrize("cap", [2, 3, 5, 50, 300])
def test_the_cap_is_run_and_named(cap: int) -> None:
    driven = drive(device(line(1000, 1), 10_000), search_limits(10_000, cap=cap, multiple_of=1))
    assert (driven.plan.batch_size, driven.plan.limited_by) == (cap, "dataset")
    assert f"no more than {cap} samples" in driven.plan.reason
    assert len(driven.sizes) <= 4


def test_a_cap_of_the_user_is_named_so() -> None:
    driven = drive(device(line(1000, 1), 10_000), SearchLimits(10_000, 2, 16, "max_batch_size"))
    assert driven.plan.limited_by == "max_batch_size"
    assert "max_batch_size is 16" in driven.plan.reason


def test_a_flat_law_ends_at_the_cap() -> None:
    driven = drive(device(line(9000, 0), 10_000), search_limits(10_000, cap=50_000))
    assert driven.plan.batch_size == 50_000
    assert driven.plan.limited_by == "dataset"


def test_the_smallest_size_is_respected() -> None:
    driven = drive(device(line(1000, 1), 10_000), search_limits(10_000, low=100, multiple_of=1))
    assert driven.sizes[:2] == [100, 400]


def test_nothing_fits() -> None:
    step = drive(device(line(20 * 2**20, 0), 10 * 2**20), search_limits(10 * 2**20, low=2)).step
    assert isinstance(step, SearchFailed)
    assert step.reason.startswith(
        "nothing fits: 2 samples, the smallest size allowed, held 20.0 MiB under a limit of 10.0"
    )
    step = drive(device(line(20, 0), 10, runs_out=True), search_limits(10)).step
    assert isinstance(step, SearchFailed)
    assert step.reason.startswith("nothing fits: 1 samples, the smallest size allowed, ran out of memory")


def test_one_sample_where_two_do_not_fit() -> None:
    driven = drive(device(line(0, 10), 15), search_limits(15))
    assert driven.sizes == [2, 1]
    assert (driven.plan.batch_size, driven.plan.predicted_peak_bytes) == (1, None)


def test_the_second_size_is_smaller_than_twice_the_first_when_twice_might_not_fit() -> None:
    driven = drive(device(line(0, 30), 100), search_limits(100))
    assert driven.sizes == [2, 3]
    assert driven.plan.batch_size == 3
    assert not driven.too_large(100)


def test_a_plan_of_one_measured_step_is_not_verified() -> None:
    driven = drive(lambda size: Trial(size, "ok", {"forward": size}, measured_steps=1), search_limits(100, cap=4))
    assert not driven.plan.verified


@pytest.mark.parametrize(("limit", "more"), [(9140, 813), (9200, 819)])
def test_two_percent_more_is_worth_another_probe_and_less_is_not(limit: int, more: int) -> None:
    trials = [Trial(size, "ok", {"forward": 1000 + 10 * size}) for size in (2, 4, 8, 800)]
    step = decide(trials, search_limits(limit, multiple_of=1))
    if more > 1.02 * 800:
        assert isinstance(step, NextSize)
        assert step.batch_size == more
    else:
        assert isinstance(step, Plan)
        assert "less than 2% more" in step.reason


def test_reserved_bytes_are_held_against_the_limit() -> None:
    def measure(size: int) -> Trial:
        allocated = 100_000 + 1000 * size
        return Trial(
            size, "ok", {"forward": allocated}, peak_reserved_bytes=allocated + 50_000, measured_steps=3, full_steps=3
        )

    driven = drive(measure, search_limits(1_000_000, multiple_of=1))
    assert not driven.too_large(1_000_000)
    assert 830 <= driven.plan.batch_size <= 850
    assert driven.plan.measured_peak_bytes == 150_000 + 1000 * driven.plan.batch_size


def test_memory_that_lasts_from_step_to_step_lets_the_second_size_be_larger() -> None:
    """Of 1,010 bytes at 2 samples 1,000 are the model: 4 times the samples take 1,040, and surely no more."""

    def measure(size: int) -> Trial:
        return Trial(size, "ok", {"forward": 1000 + 5 * size}, measured_steps=3, full_steps=3, fixed_bytes=fixed_bytes)

    fixed_bytes = 0
    assert drive(measure, search_limits(1500, multiple_of=1)).sizes[:2] == [
        2,
        3,
    ]  # twice as many might take twice as much
    fixed_bytes = 1000
    assert drive(measure, search_limits(1500, multiple_of=1)).sizes[:2] == [2, 8]
    assert drive(measure, search_limits(1036, multiple_of=1)).sizes[:2] == [
        2,
        6,
    ]  # 6.5 times (10 and 1 for the rounding)


@given(st.integers(0, 10**6), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1, max_size=6))
def test_what_surely_fits_does_so_under_any_law(fixed: int, moments: list[tuple[int, int]]) -> None:
    law = [[(fixed + more, per_sample) for more, per_sample in moments]]
    limit = 10**7
    first = Trial(2, "ok", {"forward": int(max(peaks(law, 2)))}, fixed_bytes=fixed)
    search = search_state((first,), search_limits(limit), 0.0, 1, MANY)
    size = guaranteed_size(search)
    assert size >= 2
    assert max(peaks(law, size)) <= limit
    assert size >= 4 or max(peaks([[(fixed, (max(peaks(law, 2)) - fixed) / 2)]], 4.5)) > limit - 3  # nor is it timid


def test_what_lies_loose_at_the_largest_size_says_how_far_runs_differ() -> None:
    small = Trial(2, "ok", {"forward": 1}, loose_share=0.9)
    large = Trial(8, "ok", {"forward": 1}, loose_share=0.5)
    failed = Trial(16, "out_of_memory", {}, loose_share=0.1)
    unknown = Trial(32, "ok", {"forward": 1})
    assert repeatability_of([small, large, failed, unknown], 0.4) == pytest.approx(0.3)
    assert repeatability_of([large, dataclasses.replace(small, batch_size=16)], 0.4) == pytest.approx(0.54)
    assert repeatability_of([dataclasses.replace(small, loose_share=None), large], 0.4) == pytest.approx(0.3)
    assert repeatability_of([small, dataclasses.replace(large, loose_share=0.0)], 0.4) == 0.05
    assert repeatability_of([unknown], 0.4) == 0.4
    assert repeatability_of([small, large], 0.0) == 0.0


def test_the_noise_of_what_comes_and_goes_is_no_contradiction() -> None:
    """A step that makes and drops 200 MiB whatever its size: its peak differs, and nothing grows."""

    def measure(size: int) -> Trial:
        peak = {"optimizer_step": 600_000 + (30_000 if size == 2 else 0) + (10_000 if size == 64 else 0) + 20 * size}
        return Trial(size, "ok", peak, noise_bytes=1000, full_steps=3, fixed_bytes=fixed_bytes, loose_share=loose_share)

    fixed_bytes, loose_share = 400_000, 0.0  # lines may differ by little, and still nothing is contradicted
    driven = drive(measure, search_limits(10**6, cap=5000, multiple_of=1), repeatability=0.4)
    assert driven.plan.batch_size == 5000
    assert driven.plan.memory is not None
    fixed_bytes = 0
    failure = drive(measure, search_limits(10**6, cap=5000, multiple_of=1), repeatability=0.4).step
    assert isinstance(failure, SearchFailed)
    assert "the peak fell" in failure.reason


def test_a_heap_without_holes_leaves_less_room() -> None:
    def sized(loose_share: float | None) -> int:
        def measure(size: int) -> Trial:
            peak = {"forward": 1000 + 10 * size}
            return Trial(size, "ok", peak, measured_steps=3, full_steps=3, fixed_bytes=1000, loose_share=loose_share)

        return drive(measure, search_limits(11_000, multiple_of=1), repeatability=0.4).plan.batch_size

    assert sized(0.0) > 900  # of 1000
    assert sized(0.0) > sized(0.4) > sized(None)


def test_the_step_that_may_be_the_answer_is_named_and_a_stop_before_it_is_early_where_steps_differ() -> None:
    def way(repeatability: float) -> list[tuple[int, bool]]:
        trials: list[Trial] = []
        while isinstance(step := decide(trials, search_limits(10**6, multiple_of=1), repeatability), NextSize):
            asked.append((step.batch_size, step.may_be_last))
            trials.append(Trial(step.batch_size, "ok", {"forward": 10_000 * step.batch_size}, full_steps=3))
        return asked

    asked: list[tuple[int, bool]] = []
    assert way(0.0) == [(2, False), (8, False), (49, False), (99, True)]
    asked = []
    assert way(0.4) == [(2, False), (8, False), (17, False), (71, True)]


def test_host_memory_keeps_room_for_what_is_not_repeatable() -> None:
    driven = drive(device(line(0, 1000), 10**6), search_limits(10**6, multiple_of=1), repeatability=0.2)
    assert 700 < driven.plan.batch_size < 900


# --- tables of the field --------------------------------------------------------------------------------------------


def test_gains_that_the_device_cannot_repeat_are_not_chased() -> None:
    """On the host a transformer was run at 44, 45, 46 and 47 samples, each a little below the bound of the last."""
    search_limits = SearchLimits(limit_bytes=800_000, min_batch_size=2, max_batch_size=10_000, max_reason="dataset")
    trials: list[Trial] = []
    while isinstance(step := decide(trials, search_limits, repeatability=0.4), NextSize):
        grown = 4_800 * step.batch_size
        off = 0.03 * grown * (-1) ** len(trials)
        peak = 440_000 + round(grown + off)
        trials.append(
            Trial(step.batch_size, "ok", {"forward": peak}, grown // 20 + 1_000, measured_steps=3, full_steps=3)
        )
    assert [trial.batch_size for trial in trials] == [2, 3, 8, 48]  # with 2 % for a gain: and 50, and 51, and 53


def test_yolov5_9287_is_refused() -> None:
    rows = [(1, 2.798), (2, 2.749), (4, 2.718), (8, 2.720), (16, 5.207)]
    trials = [Trial(size, "ok", {"forward": round(peak * GB)}) for size, peak in rows]
    step = decide(trials, search_limits(16 * GB))
    assert isinstance(step, SearchFailed)
    assert "the peak fell from" in step.reason
    assert step.trials == tuple(trials)


@pytest.mark.parametrize("runs_out", [False, True])
@pytest.mark.parametrize("per_sample", [0.0615, 0.068, 0.0745, 0.1])
def test_ultralytics_1451_goes_on_measuring_and_ends_with_a_size_that_fits(per_sample: float, runs_out: bool) -> None:
    limit = 16.87 * GB
    rows = [(1, 0.285), (2, 0.445), (4, 0.470), (8, 0.719), (16, 1.197)]
    trials = [Trial(size, "ok", {"forward": round(peak * GB)}, measured_steps=3, full_steps=3) for size, peak in rows]
    step = decide(trials, search_limits(limit))
    assert isinstance(step, NextSize)
    assert 16 < step.batch_size <= 128
    law = [[(0.241 * GB, 0.05975 * GB), ((1.197 - 16 * per_sample) * GB, per_sample * GB)]]  # bends above 16
    driven = drive(device(law, limit, runs_out), search_limits(limit), start=trials)
    best = oracle(law, int(limit))
    assert 0.95 * best - 8 <= driven.plan.batch_size <= best < 281


@pytest.mark.parametrize("runs_out", [False, True])
def test_a_law_that_is_nearly_flat_up_to_8_samples_and_steep_after(runs_out: bool) -> None:
    limit = 40 * GB
    law = [[(18.292 * GB, 0.001 * GB), (18.3 * GB - 8 * 0.245 * GB, 0.245 * GB)]]
    driven = drive(device(law, limit, runs_out), search_limits(limit, multiple_of=1))
    assert not driven.too_large(limit)
    assert 0.97 * oracle(law, limit) <= driven.plan.batch_size <= oracle(law, limit) == 96


# --- stepping down --------------------------------------------------------------------------------------------------


def test_a_measured_failure_is_interpolated() -> None:
    limit = 100_000
    law = [[(10_000, 1), (-410_000, 500)]]  # the hidden part is steeper than any proportion: nothing could foresee it
    driven = drive(device(law, limit), search_limits(limit, multiple_of=1))
    assert driven.too_large(limit)
    assert 0.97 * oracle(law, limit) <= driven.plan.batch_size <= oracle(law, limit) == 1020


def test_the_secant_to_a_measured_failure_is_a_safe_step() -> None:
    trials = [Trial(size, "ok", {"forward": peak}) for size, peak in [(10, 1000), (20, 1100), (40, 5000)]]
    step = decide(trials, search_limits(4000))
    assert isinstance(step, NextSize)
    assert step.batch_size == 34  # 20 + 2900 / 195 = 34.9; the middle of 20 and 40 would be 28


def test_out_of_memory_is_stepped_down_from_without_passing_it_again() -> None:
    limit = 100_000
    law = [[(10_000, 1), (-410_000, 500)]]
    driven = drive(device(law, limit, runs_out=True), search_limits(limit, multiple_of=1))
    failed = driven.too_large(limit)
    assert failed
    for index, size in enumerate(driven.sizes):
        assert all(size < earlier for earlier in driven.sizes[:index] if earlier in failed)
    assert 0.8 * 1020 <= driven.plan.batch_size <= 1020
    assert driven.plan.limited_by == "memory"


def test_a_contradiction_after_good_sizes_is_refused() -> None:
    trials = [Trial(2, "ok", {"forward": 100}), Trial(4, "out_of_memory", {}), Trial(8, "ok", {"forward": 100})]
    step = decide(trials, search_limits(1000))
    assert isinstance(step, SearchFailed)
    assert "although 4 had run out of memory" in step.reason


# --- throughput -----------------------------------------------------------------------------------------------------


def timed(t0: float, c: float) -> Callable[[int], Trial]:
    return lambda size: Trial(size, "ok", {"forward": 1000 + size}, 0, None, t0 + c * size, 3)


def test_throughput_takes_the_smallest_size_near_the_best() -> None:
    driven = drive(timed(0.1, 0.001), search_limits(10_000, multiple_of=1, objective="throughput"))
    most = max(driven.sizes)
    assert most >= 8900
    wanted = 0.95 * 0.1 * most / (0.1 + 0.001 * most * 0.05)
    assert driven.plan.batch_size == math.ceil(wanted - 1e-6)
    assert driven.plan.limited_by == "throughput"
    assert driven.sizes[-1] == driven.plan.batch_size  # it was run
    assert driven.plan.time is not None
    speed = driven.plan.time.samples_per_second
    assert speed(driven.plan.batch_size) >= 0.95 * speed(most) > speed(driven.plan.batch_size - 1)


def test_throughput_is_probed_once_even_when_the_probe_changes_the_time_line() -> None:
    def measure(size: int) -> Trial:
        seconds = 0.1 + 0.001 * size if size < 100 or size > 8000 else 9.0  # slow just where the knee is expected
        return Trial(size, "ok", {"forward": 1000 + size}, 0, None, seconds, 3)

    driven = drive(measure, search_limits(10_000, multiple_of=1, objective="throughput"))
    assert driven.sizes[-2] > driven.sizes[-1]
    assert sorted(driven.sizes[:-1]) == driven.sizes[:-1]


def test_throughput_without_work_for_each_sample_wants_95_percent_of_the_size() -> None:
    driven = drive(timed(0.1, 0.0), search_limits(10_000, cap=1000, multiple_of=1, objective="throughput"))
    assert driven.plan.batch_size == 950


def test_throughput_without_overhead_takes_the_first_size() -> None:
    driven = drive(timed(0.0, 0.001), search_limits(10_000, objective="throughput"))
    assert driven.plan.batch_size == 2
    assert driven.plan.limited_by == "throughput"


def test_throughput_without_times_is_the_memory_answer() -> None:
    driven = drive(device(line(1000, 1), 10_000), search_limits(10_000, cap=500, objective="throughput"))
    assert (driven.plan.batch_size, driven.plan.limited_by) == (496, "dataset")


@pytest.mark.parametrize("limit", [1, 10_000, 10**9])
def test_throughput_with_no_time_at_all_ends(limit: int) -> None:
    drive(timed(0.0, 0.0), search_limits(limit, objective="throughput"))


# --- properties -----------------------------------------------------------------------------------------------------


@st.composite
def straight_laws(draw: st.DrawFn) -> tuple[Law, int]:
    """Phases of one line each, a limit of 1 MB to 1 TB, and 3 to two million samples that fit.

    A sample takes 4 bytes at least, all that fit 2000 together, and no flat phase lies within 0.1 % of the limit:
    otherwise rounding to a byte alone hides more than 3 % of the answer. Not 2 samples: whether 3 fit cannot be told
    from the peak at 2, so it is tried.
    """
    limit = int(10 ** draw(st.floats(6, 12)))
    fits = int(min(2 ** draw(st.floats(math.log2(3.01), 20.9)), limit / 16))
    slope = draw(st.floats(max(4, 2000 / fits), limit / (fits + 1)))
    law: Law = [[(limit - slope * (fits + draw(st.floats(0, 0.999))), slope)]]
    for _ in range(draw(st.integers(0, 3))):
        top, share = limit * draw(st.floats(0, 0.999)), draw(st.just(0.0) | st.floats(0, 1))
        law.append([(top * (1 - share), top * share / (fits + 1))])
    return draw(st.permutations(law)), limit


@st.composite
def convex_laws(draw: st.DrawFn) -> tuple[Law, int]:
    """Phases that are each the maximum of several lines, the bends anywhere below and above the limit."""
    law, limit = draw(straight_laws())
    fits = max(1, oracle(law, limit))
    for lines in law:
        for _ in range(draw(st.integers(0, 3))):
            top, share = limit * draw(st.floats(0.01, 2)), draw(st.floats(0, 1))
            lines.append((top * (1 - share), top * share / fits))
    return law, limit


SEARCH = settings(deadline=None, max_examples=300)


@SEARCH
@given(
    convex_laws(), st.booleans(), st.none() | st.integers(1, 100), st.integers(1, 5_000_000), st.sampled_from([1, 2])
)
def test_any_convex_law_ends_with_a_size_that_fits(
    law_and_limit: tuple[Law, int], runs_out: bool, multiple: int | None, cap: int, low: int
) -> None:
    law, limit = law_and_limit
    cap = max(cap, 2, multiple or 1)
    driven = drive(device(law, limit, runs_out), search_limits(limit, cap=cap, low=low, multiple_of=multiple))
    smallest = -(-low // (multiple or 1)) * (multiple or 1)
    if isinstance(driven.step, SearchFailed):
        assert "nothing fits" in driven.step.reason
        assert max(map(round, peaks(law, smallest))) > limit
    else:
        assert max(map(round, peaks(law, driven.plan.batch_size))) <= limit


@SEARCH
@given(straight_laws(), st.sampled_from([math.floor, round, math.ceil]), st.none() | st.floats(0.01, 2))
def test_straight_laws_are_never_overrun_and_nearly_filled_in_six_sizes(
    law_and_limit: tuple[Law, int], rounding: Callable[[float], int], cap_share: float | None
) -> None:
    law, limit = law_and_limit
    cap = MANY if cap_share is None else max(1, int(cap_share * oracle(law, limit)))

    def measure(size: int) -> Trial:
        seen = dict(zip(PHASES, map(rounding, peaks(law, size)), strict=False))
        return Trial(size, "ok", seen, measured_steps=3, full_steps=3)

    driven = drive(measure, search_limits(limit, cap=cap, multiple_of=1))
    assert not driven.too_large(limit)
    assert len(driven.sizes) <= 6
    assert driven.plan.batch_size >= 0.97 * oracle(law, limit, cap) - 1


@SEARCH
@given(straight_laws(), st.sampled_from([0, 10, 1000, 10**5, 10**7, 10**9]), st.data())
def test_noise_does_not_overrun_a_straight_law_once_there_is_a_line(
    law_and_limit: tuple[Law, int], noise: int, data: st.DataObject
) -> None:
    law, limit = law_and_limit

    def measure(size: int) -> Trial:
        errors = [noise * data.draw(st.floats(-0.5, 0.5)) for _ in law]  # two measurements differ by at most the noise
        seen = [max(0, round(value + error)) for value, error in zip(peaks(law, size), errors, strict=True)]
        return Trial(size, "ok", dict(zip(PHASES, seen, strict=False)), noise, measured_steps=3, full_steps=3)

    driven = drive(measure, search_limits(limit, multiple_of=1))
    assert not [size for size in driven.too_large(limit) if size not in driven.sizes[:2]]


@SEARCH
@given(convex_laws(), st.booleans(), st.sampled_from([0.0, 1e-4, 0.01, 0.1]), st.integers(0, 10**7), st.randoms())
def test_noise_costs_sizes_but_the_answer_was_seen_to_fit(law_and_limit, runs_out, share, fixed, random) -> None:  # type: ignore[no-untyped-def]
    law, limit = law_and_limit

    def noise(peak: int) -> tuple[int, float]:
        return int(share * peak) + fixed, random.uniform(-1, 1)

    drive(device(law, limit, runs_out, noise), search_limits(limit, multiple_of=1))  # its checks are the test


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(st.integers(1, 10**6), st.tuples(st.booleans(), st.lists(st.integers(0, 1000), max_size=4))),
    st.randoms(),
    st.sampled_from(["memory", "throughput"]),
)
def test_no_answer_of_a_device_makes_it_go_on_for_ever(known, random, objective) -> None:  # type: ignore[no-untyped-def]
    def measure(size: int) -> Trial:
        ran, values = known.get(size, (random.random() < 0.8, [random.randint(0, 1000)]))
        seen = dict(zip(PHASES, values, strict=False))
        seconds = random.choice([None, 0.0, random.random()])
        return Trial(size, "ok" if ran else "out_of_memory", seen, random.randint(0, 500), None, seconds, 3)

    drive(measure, search_limits(700, cap=10**6, objective=objective))


def test_the_examples_in_the_module_run() -> None:
    assert doctest.testmod(decide_module).failed == 0
