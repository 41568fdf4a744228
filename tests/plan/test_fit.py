import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_batchmem.plan.fit import fit_memory, ran_through
from lightning_batchmem.plan.records import MIB, Trial, TrialMemory


def ok(size, **peaks):
    return Trial(size, "ok", TrialMemory(peaks))


def test_a_peak_above_that_of_a_larger_size_is_left_out():
    """The peaks are measured, in MB: cuDNN took a larger workspace at one sample than at two.

    Source: https://github.com/ultralytics/yolov5/issues/9287
    """
    peaks = {1: 2798, 2: 2749, 4: 2718, 8: 2720, 16: 5207}
    trials = [ok(size, forward=peak) for size, peak in peaks.items()]
    line = fit_memory(trials).lines["forward"]
    assert line.at(16) == pytest.approx(5207)
    assert line.first_batch_size == 8
    # Only one of these sizes is left, and one size makes no line.
    assert fit_memory(trials[:2]) is None


def test_a_lower_phase_may_decrease_and_is_then_flat():
    model = fit_memory([ok(2, forward=1000, backward=500), ok(4, forward=1200, backward=300)])
    line = model.lines["backward"]
    assert (line.intercept, line.slope) == (500, 0)


def test_a_phase_that_ran_at_one_size_may_grow_in_proportion():
    model = fit_memory([ok(2, forward=100), ok(4, forward=120, evaluation=60)])
    assert model.lines["evaluation"].at(8) == 120


@pytest.mark.parametrize(("live_growth", "expected"), [(0, 4100), (48, 4100), (60, 340)])
def test_reserved_bytes_are_fitted_where_live_bytes_stay_flat(live_growth, expected):
    """Under CUDA graphs a replay allocates nothing, so the live bytes stay flat.

    A growth of at most 5 % of the growth of the needed bytes counts as flat.
    """
    trials = []
    for size in (100, 200):
        peaks = {"forward": (100 + live_growth * size // 100) * MIB}
        trials.append(Trial(size, "ok", TrialMemory(peaks, needed_bytes=(100 + 10 * size) * MIB)))
    assert fit_memory(trials).predict_bytes(400) == pytest.approx(expected * MIB)


def test_live_bytes_are_not_flat_if_a_phase_below_the_highest_grows():
    """As with large embeddings: the optimizer step has the highest peak, which no batch changes."""
    trials = [
        Trial(
            size,
            "ok",
            TrialMemory(
                {"forward": (100 + size) * MIB, "optimizer_step": 500 * MIB},
                needed_bytes=(510 + size) * MIB,
            ),
        )
        for size in (100, 200)
    ]
    model = fit_memory(trials)
    assert model.predict_bytes(300) == 500 * MIB
    assert model.predict_bytes(600) == pytest.approx(700 * MIB)


def test_inexact_peaks_are_fitted_by_one_line_through_all():
    points = {2: 100, 4: 190, 8: 300, 16: 700}
    trials = [
        Trial(size, "ok", TrialMemory({"forward": peak}, is_exact=False))
        for size, peak in points.items()
    ]
    assert fit_memory(trials).lines["forward"].first_batch_size == 2
    exact = [ok(size, forward=peak) for size, peak in points.items()]
    assert fit_memory(exact).lines["forward"].first_batch_size == 8


def test_one_size_makes_no_line_and_out_of_memory_is_no_point():
    failed = Trial(8, "out_of_memory", TrialMemory({"forward": 900}))
    assert fit_memory([ok(2, forward=100), ok(2, forward=100), failed]) is None
    # The steps of a trial over the limit ran to their end, so its peak counts.
    over = Trial(8, "over_limit", TrialMemory({"forward": 700}))
    assert fit_memory([ok(2, forward=100), over]).predict_bytes(8) == 700


def test_repetitions_of_a_size_count_as_the_worst():
    outcome = "allocator_retry"
    repeated = [
        ok(4, forward=140, backward=90),
        Trial(4, outcome, TrialMemory({"forward": 145, "backward": 80})),
        ok(2, forward=9),
    ]
    assert ran_through(repeated) == [
        ok(2, forward=9),
        Trial(4, outcome, TrialMemory({"forward": 145, "backward": 90})),
    ]


@settings(deadline=None, max_examples=100)
@given(
    lines=st.lists(
        st.tuples(st.integers(0, 10**10), st.integers(1, 10**7)), min_size=1, max_size=3
    ),
    sizes=st.sets(st.integers(1, 10_000), min_size=2, max_size=7),
)
def test_a_maximum_of_lines_is_never_predicted_too_high_beyond_the_sizes_that_ran(lines, sizes):
    def peak(size):
        return max(a + b * size for a, b in lines)

    model = fit_memory([ok(size, forward=peak(size)) for size in sorted(sizes)])
    largest = max(sizes)
    for size in (largest, 2 * largest, 50 * largest):
        # A bend between the sizes of a run may leave an error of half a per cent of the growth.
        assert model.predict_bytes(size) <= peak(size) + 0.02 * (peak(size) - peak(min(sizes))) + 50
        if len(lines) == 1:
            assert model.predict_bytes(size) == pytest.approx(peak(size), rel=1e-6)
    assert model.lines["forward"].slope >= 0
