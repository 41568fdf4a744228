from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import PHASES, LimitedBy, Line, MemoryModel, TimeModel, Trial

settings.register_profile("records", deadline=None, max_examples=100)
FAST = settings.get_profile("records")

finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**50)
trials = st.builds(
    Trial,
    batch_size=st.integers(1, 2**31),
    outcome=st.sampled_from(["ok", "out_of_memory"]),
    phase_peak_bytes=st.dictionaries(st.sampled_from(PHASES), counts),
    noise_bytes=counts,
    peak_reserved_bytes=st.none() | counts,
    step_seconds=st.none() | st.floats(0, 1e6),
    measured_steps=st.integers(0, 100),
)
lines = st.builds(Line, finite, finite, finite, st.integers(1, 100), st.integers(100, 10**7))
plans = st.builds(
    Plan,
    batch_size=st.integers(1, 2**31),
    limited_by=st.sampled_from(get_args(LimitedBy)),
    verified=st.booleans(),
    limit_bytes=counts,
    predicted_peak_bytes=st.none() | counts,
    upper_peak_bytes=st.none() | counts,
    measured_peak_bytes=st.none() | counts,
    trials=st.lists(trials, max_size=10).map(tuple),
    memory=st.none() | st.builds(MemoryModel, st.dictionaries(st.sampled_from(PHASES), lines, min_size=1), finite),
    time=st.none() | st.builds(TimeModel, lines),
    reason=st.text(),
    device=st.text(),
    accumulate_grad_batches=st.integers(1, 1000),
    effective_batch_size=st.none() | st.integers(1, 2**40),
    learning_rate=st.none() | finite,
    notes=st.lists(st.text(), max_size=3).map(tuple),
)


@FAST
@given(plans)
def test_plan_json_round_trip_is_equal(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    both = dataclasses.replace(plan, evaluation=plan)
    assert Plan.from_json(both.to_json()) == both


@FAST
@given(trials)
def test_trial_holds_at_least_its_peak(trial: Trial) -> None:
    assert all(trial.peak_bytes >= peak for peak in trial.phase_peak_bytes.values())
    assert trial.held_bytes >= trial.peak_bytes
    assert trial.held_bytes in {trial.peak_bytes, trial.peak_reserved_bytes}


def test_trial_without_measurements_has_no_peak() -> None:
    assert Trial(4, "out_of_memory", {}).peak_bytes == 0
    assert Trial(4, "out_of_memory", {}).held_bytes == 0


def test_trial_peak_is_the_highest_phase_and_held_counts_what_is_reserved() -> None:
    trial = Trial(4, "ok", {"forward": 70, "backward": 90}, peak_reserved_bytes=128)
    assert trial.peak_bytes == 90
    assert trial.held_bytes == 128


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Trial(4, "ok", {}).batch_size = 8  # type: ignore[misc]


def test_line_upper_bound_inside_and_beyond_the_measured_range() -> None:
    line = Line(intercept=100, slope=10, noise=6, first_batch_size=2, last_batch_size=4)
    assert line.at(4) == 140
    assert line.upper(3) == 136
    assert line.upper(4) == 146
    assert line.upper(8) == 100 + 80 + 6 * (1 + 4 / 2)


def test_line_of_one_size_has_no_growing_error() -> None:
    assert Line(0, 10, 1, 4, 4).upper(8) == 81


def test_memory_model_is_the_highest_line_times_the_reserved_ratio() -> None:
    model = MemoryModel({"forward": Line(0, 10, 0, 1, 2), "optimizer_step": Line(50, 0, 0, 1, 2)}, reserved_ratio=1.5)
    assert model.predict_bytes(2) == 75
    assert model.phase_at(2) == "optimizer_step"
    assert model.predict_bytes(10) == 150
    assert model.phase_at(10) == "forward"
    assert model.upper_bytes(10) == 150


def test_time_model_throughput() -> None:
    model = TimeModel(Line(0.1, 0.01, 0, 1, 2))
    assert model.step_seconds(10) == pytest.approx(0.2)
    assert model.samples_per_second(10) == pytest.approx(50)
    assert TimeModel(Line(0, 0, 0, 1, 2)).samples_per_second(10) == math.inf


def test_plan_from_json_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        Plan.from_json("no json")
    for text in ("{}", "[]", "1", '{"memory": null, "time": null, "trials": []}'):
        with pytest.raises(ValueError, match="text must be the JSON of a Plan, got"):
            Plan.from_json(text)
