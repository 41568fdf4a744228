from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_batchmem.plan.fit import find_contradiction, fit_memory, fit_time, worst_per_size
from lightning_batchmem.plan.records import Line, MemoryModel, SearchFailed, Trial

GB = 10**9


def ok(size: int, noise: int = 0, **phases: int) -> Trial:
    return Trial(size, "ok", phases, noise_bytes=noise, measured_steps=3)


def table(*rows: tuple[int, float]) -> list[Trial]:
    return [ok(size, forward=round(peak * GB)) for size, peak in rows]


def fitted(trials: list[Trial], repeatability: float = 0.0) -> MemoryModel:
    model = fit_memory(trials, repeatability)
    assert isinstance(model, MemoryModel), model
    return model


def refused(trials: list[Trial], repeatability: float = 0.0) -> str:
    failure = fit_memory(trials, repeatability)
    assert isinstance(failure, SearchFailed), failure
    assert failure.trials == tuple(trials)
    return failure.reason


def test_a_line_for_each_phase_in_the_order_of_the_phases() -> None:
    model = fitted([ok(2, optimizer_step=500, forward=120), ok(4, optimizer_step=500, forward=140)])
    assert list(model.lines) == ["forward", "optimizer_step"]
    assert model.lines["forward"] == Line(100.0, 10.0, model.lines["forward"].noise, 2, 4)
    assert model.lines["optimizer_step"].slope == 0
    assert model.predict_bytes(10) == 500
    assert model.predict_bytes(60) == 700


def test_exact_points_have_the_noise_of_rounding_only() -> None:
    line = fitted([ok(size, forward=100 + 10 * size) for size in (2, 4, 32)]).lines["forward"]
    assert (line.intercept, line.slope) == pytest.approx((100, 10))
    assert line.noise == pytest.approx(1, abs=1e-6)
    assert (line.first_batch_size, line.last_batch_size) == (2, 32)


def test_only_the_largest_sizes_count_where_the_law_bends() -> None:
    law = {size: max(1000, 200 + 100 * size) for size in (2, 4, 8, 16, 32, 64)}  # bends at 8
    line = fitted([ok(size, forward=peak) for size, peak in law.items()]).lines["forward"]
    assert line.first_batch_size == 8
    assert line.at(100) == pytest.approx(10_200)


def test_the_last_two_sizes_where_no_three_lie_on_a_line() -> None:
    line = fitted([ok(2, forward=100), ok(4, forward=200), ok(8, forward=1000)]).lines["forward"]
    assert (line.first_batch_size, line.last_batch_size, line.slope) == (4, 8, 200)


def test_noise_lets_more_points_onto_the_line() -> None:
    trials = [ok(2, 8, forward=120), ok(4, 8, forward=148), ok(8, 8, forward=180), ok(16, 8, forward=260)]
    line = fitted(trials).lines["forward"]
    assert line.first_batch_size == 2
    assert line.noise >= 9  # the noise of the trials and the rounding
    assert line.slope == pytest.approx(10, abs=1)


def test_the_residual_of_the_last_point_adds_to_the_noise() -> None:
    # slope 0 and mean 101, so residuals 2, -4 and 2: the law may lie 6 / 2 above its last point, a measurement 6 / 2
    # above the law, one byte for rounding, and the last point is 2 above the line
    line = fitted([ok(2, 6, forward=103), ok(4, 6, forward=97), ok(6, 6, forward=103)]).lines["forward"]
    assert line.noise == pytest.approx(6 + 1 + 2)


def test_a_rise_within_the_noise_is_flat_not_refused() -> None:
    line = fitted([ok(2, 10, forward=1000), ok(4, 10, forward=998), ok(8, 10, forward=995)]).lines["forward"]
    assert line.slope == 0
    assert line.intercept == pytest.approx((1000 + 998 + 995) / 3)
    assert line.noise >= 11


def test_repeatability_adds_its_share_of_the_growth() -> None:
    trials = [ok(2, forward=120), ok(12, forward=220)]
    exact, host = fitted(trials).lines["forward"], fitted(trials, 0.2).lines["forward"]
    assert host.upper(12) - exact.upper(12) == pytest.approx(0.2 * 100)
    assert host.upper(22) - exact.upper(22) == pytest.approx(0.2 * 200)
    assert host.upper(2) == exact.upper(2)


def test_noise_at_large_sizes_of_the_host_does_not_flatten_the_line() -> None:
    """The optimizer step of a U-Net on the host, as measured: the largest two sizes alone would make a flat line."""
    measured = {2: 445.4, 3: 446.7, 6: 457.2, 50: 533.9, 64: 682.4, 72: 605.7}
    noise = {2: 4.6, 3: 1.3, 6: 2.5, 50: 1.0, 64: 53.9, 72: 1.0}
    trials = [Trial(b, "ok", {"optimizer_step": int(v * 2**20)}, int(noise[b] * 2**20)) for b, v in measured.items()]
    model = fit_memory(trials, repeatability=0.2)
    assert isinstance(model, MemoryModel)
    for size, peak in measured.items():
        assert model.predict_bytes(size) == pytest.approx(peak * 2**20, rel=0.12)
        assert model.upper_bytes(size) > peak * 2**20


def test_the_worst_of_several_trials_counts_and_their_distance_is_noise() -> None:
    first = Trial(4, "ok", {"forward": 140, "backward": 90}, 3, 200, 0.1, 1)
    second = Trial(4, "ok", {"forward": 145, "backward": 80}, 2, None, 0.3, 3)
    (worst,) = worst_per_size([first, second, Trial(8, "out_of_memory", {"forward": 9})])
    assert worst == Trial(4, "ok", {"forward": 145, "backward": 90}, 10, 200, 0.3, 3)


def test_a_phase_seen_at_one_size_may_grow_in_proportion() -> None:
    model = fitted([ok(2, forward=100), ok(4, forward=120, evaluation=60)])
    assert model.lines["evaluation"].at(8) == 120


def test_a_lower_phase_may_fall_and_gets_its_fall_as_noise() -> None:
    line = fitted([ok(2, forward=1000, backward=500), ok(4, forward=1200, backward=300)]).lines["backward"]
    assert (line.slope, line.intercept) == (0, 400)
    assert line.upper(4) >= 500


def test_reserved_ratio_is_that_of_the_largest_size_that_has_it() -> None:
    trials = [
        Trial(2, "ok", {"forward": 100}, peak_reserved_bytes=200),
        Trial(4, "ok", {"forward": 200}, peak_reserved_bytes=250),
        Trial(8, "ok", {"forward": 400}),
    ]
    assert fitted(trials).reserved_ratio == 1.25
    assert fitted([ok(2, forward=100), ok(4, forward=200)]).reserved_ratio == 1.0
    assert fitted([ok(2, forward=1), Trial(4, "ok", {"forward": 200}, peak_reserved_bytes=100)]).reserved_ratio == 1.0


def test_one_size_is_refused() -> None:
    assert "only 2 samples (95.4 MiB)" in refused(table((2, 0.1)))
    assert "no size" in refused([Trial(2, "out_of_memory", {})])
    assert "no peak" in refused([Trial(2, "ok", {})])


def test_the_table_of_yolov5_9287_is_refused_and_the_fall_is_named() -> None:
    reason = refused(table((1, 2.798), (2, 2.749), (4, 2.718), (8, 2.720), (16, 5.207)))
    assert "fell from 2,668.4 MiB at 1 samples to 2,621.7 MiB at 2" in reason


def test_a_slow_fall_is_seen_although_each_step_is_within_the_noise() -> None:
    assert "fell" in refused([ok(size, 10, forward=1000 - 12 * i) for i, size in enumerate((2, 4, 8, 16))])


def test_a_fall_within_the_noise_of_both_sizes_is_no_contradiction() -> None:
    assert find_contradiction([ok(2, 10, forward=1000), ok(4, 10, forward=979)]) is None
    assert find_contradiction([ok(2, 10, forward=1000), ok(4, 10, forward=978)]) is not None


def test_host_memory_may_fall_by_its_repeatability() -> None:
    trials = [ok(2, forward=1000), ok(4, forward=2000), ok(8, forward=1900)]
    assert find_contradiction(trials) is not None
    assert find_contradiction(trials, 0.2) is None


@pytest.mark.parametrize("size", [8, 16])
def test_a_size_that_ran_after_a_smaller_or_equal_one_had_failed_is_refused(size: int) -> None:
    reason = refused([ok(2, forward=100), Trial(8, "out_of_memory", {}), ok(size, forward=900)])
    assert f"{size} samples ran" in reason
    assert "8 had run out of memory" in reason


@settings(deadline=None, max_examples=200)
@given(
    intercept=st.floats(0, 1e12),
    slope=st.floats(0, 1e8),
    sizes=st.sets(st.integers(1, 10_000), min_size=2, max_size=8),
    noise=st.integers(0, 10**7),
    data=st.data(),
)
def test_the_next_measurement_on_a_straight_law_does_not_exceed_the_upper_bound(
    intercept: float, slope: float, sizes: set[int], noise: int, data: st.DataObject
) -> None:
    def measure(size: int) -> int:
        error = data.draw(st.floats(-noise / 2, noise / 2))  # two measurements of a size differ by at most the noise
        return max(0, round(intercept + slope * size + error))

    model = fit_memory([ok(size, noise, forward=measure(size)) for size in sorted(sizes)])
    assert isinstance(model, MemoryModel)  # never refused: every fall is within the noise
    for size in (max(sizes), max(sizes) + 1, 3 * max(sizes), 100 * max(sizes)):
        assert measure(size) <= model.upper_bytes(size) + 1 + 1e-9 * model.upper_bytes(size)


def timed(*rows: tuple[int, float | None]) -> list[Trial]:
    return [Trial(size, "ok", {"forward": 1}, step_seconds=seconds) for size, seconds in rows]


def test_time_line_through_exact_points() -> None:
    model = fit_time(
        [*timed((2, 0.12), (4, 0.14), (32, 0.42), (8, None)), Trial(64, "out_of_memory", {}, 0, None, 9.9)]
    )
    assert model is not None
    assert (model.line.intercept, model.line.slope) == pytest.approx((0.1, 0.01))
    assert model.line.noise == pytest.approx(0, abs=1e-12)
    assert (model.line.first_batch_size, model.line.last_batch_size) == (2, 32)


def test_time_needs_two_sizes() -> None:
    assert fit_time(timed((2, 0.1), (2, 0.2), (4, None))) is None


def test_time_never_falls_with_the_batch_nor_starts_below_zero() -> None:
    falling = fit_time(timed((2, 0.3), (4, 0.1)))
    assert falling is not None
    assert falling.line == Line(0.2, 0.0, pytest.approx(0.1), 2, 4)
    steep = fit_time(timed((2, 0.1), (4, 0.4)))
    assert steep is not None
    assert steep.line.intercept == 0
    assert steep.line.slope == pytest.approx((2 * 0.1 + 4 * 0.4) / 20)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e4)), min_size=2, max_size=10))
def test_time_line_is_never_negative_and_its_noise_covers_every_point(rows: list[tuple[int, float]]) -> None:
    model = fit_time(timed(*rows))
    if model is None:
        assert len({size for size, _ in rows}) == 1
        return
    assert min(model.line.intercept, model.line.slope) >= 0
    for size, seconds in rows:
        assert math.isclose(model.step_seconds(size), seconds, rel_tol=1e-9, abs_tol=model.line.noise + 1e-9)


def test_a_fall_is_held_against_the_noise_of_all_sizes_where_the_device_does_not_repeat_itself() -> None:
    """Seen with a wide multilayer perceptron on the host: two steps at 176 samples agreed, five at 2 did not."""
    trials = [
        Trial(2, "ok", {"forward": 630_000}, noise_bytes=20_000),
        Trial(176, "ok", {"forward": 698_500}, noise_bytes=1_000),
        Trial(240, "ok", {"forward": 666_100}, noise_bytes=1_000),
    ]
    assert find_contradiction(trials, repeatability=0.4) is None
    assert find_contradiction(trials) is not None
