import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.records import (
    PHASES,
    Line,
    MemoryModel,
    Trial,
    TrialMemory,
    counted,
    mib,
)

A, B, C = (Note("search", text) for text in "abc")
MEMORY = st.builds(
    TrialMemory,
    phase_peak_bytes=st.dictionaries(st.sampled_from(PHASES), st.integers(0, 2**50)),
    is_exact=st.booleans(),
    held_peak_bytes=st.none() | st.integers(0, 2**50),
    needed_bytes=st.integers(0, 2**50),
    set_aside_bytes=st.integers(0, 2**50),
)
TRIALS = st.builds(
    Trial,
    batch_size=st.just(4),
    outcome=st.sampled_from(["ok", "out_of_memory", "over_limit", "allocator_retry"]),
    memory=MEMORY,
    step_seconds=st.none() | st.floats(0, 1e6),
)


def test_peaks_and_what_is_held_and_grows():
    memory = TrialMemory({"forward": 100, "backward": 140, "optimizer_step": 170})
    assert (memory.peak_bytes, memory.held_bytes, memory.growing_bytes) == (170, 170, 140)
    memory = replace(memory, held_peak_bytes=200, set_aside_bytes=30, fixed_bytes=60)
    assert (memory.held_bytes, memory.growing_bytes) == (200, 80)
    assert memory.with_set_aside().phase_peak_bytes == {
        "forward": 130,
        "backward": 170,
        "optimizer_step": 200,
    }
    # Storages that were never written take no memory, so fewer bytes may be held than are live.
    assert replace(memory, held_peak_bytes=90).held_bytes == 90
    assert TrialMemory().growing_bytes == 1


def test_worst_of_takes_the_worst_of_each_field():
    first = Trial(
        batch_size=4,
        outcome="ok",
        kind="rehearsal",
        step_seconds=0.1,
        full_steps=9,
        notes=(A, B),
        memory=TrialMemory(
            phase_peak_bytes={"forward": 140, "backward": 90},
            start_bytes=30,
            held_peak_bytes=200,
            set_aside_bytes=5,
            fixed_bytes=60,
            largest_batch_bytes=7,
        ),
    )
    second = Trial(
        batch_size=4,
        outcome="allocator_retry",
        kind="rehearsal",
        step_seconds=0.3,
        full_steps=12,
        notes=(B, C),
        error="e",
        memory=TrialMemory(
            phase_peak_bytes={"forward": 145, "evaluation": 7},
            is_exact=False,
            start_bytes=20,
            set_aside_bytes=9,
            fixed_bytes=50,
            largest_batch_bytes=8,
            needed_bytes=300,
        ),
    )
    expected = replace(
        second,
        memory=replace(
            second.memory,
            phase_peak_bytes={"forward": 145, "backward": 90, "evaluation": 7},
            start_bytes=30,
            held_peak_bytes=200,
        ),
        full_steps=9,
        notes=(A, B, C),
    )
    assert Trial.worst_of([first, second]) == Trial.worst_of([second, first]) == expected
    failed = Trial(4, "out_of_memory", TrialMemory())
    over_limit = replace(first, outcome="over_limit")
    assert Trial.worst_of([first, over_limit, failed]).outcome == "out_of_memory"


@settings(deadline=None, max_examples=50)
@given(st.lists(TRIALS, min_size=1, max_size=4))
def test_worst_of_is_at_least_every_trial_and_does_not_depend_on_the_order(trials):
    worst = Trial.worst_of(trials)
    assert worst == Trial.worst_of(reversed(trials)) == Trial.worst_of([worst, *trials])
    for trial in trials:
        assert worst.memory.needed_bytes >= trial.memory.needed_bytes
        assert trial.step_seconds is None or (worst.step_seconds or 0) >= trial.step_seconds
    assert (worst.outcome == "ok") == all(trial.outcome == "ok" for trial in trials)


def test_mebibytes_have_three_decimals_below_one():
    assert (mib(1536 * 2**20), mib(2**19)) == ("1,536.0 MiB", "0.500 MiB")


def test_one_thing_has_no_plural():
    assert (counted(1, "step"), counted(1024, "step")) == ("1 step", "1,024 steps")


def test_the_first_line_that_reaches_the_bytes_counts():
    steep = Line(-3000.0, 60.0, 2, 8)
    shallow = Line(1000.0, 5.0, 2, 8)
    flat = Line(9000.0, 0.0, 2, 8)
    model = MemoryModel({"forward": shallow, "backward": steep, "optimizer_step": flat})
    assert model.size_at(9000) == 200
    # The lines cross at 4000 / 55 samples.
    assert model.size_at(1000) == 0
    assert model.size_at(1100) == 20
    assert model.size_at(0) < 0
    assert MemoryModel({"forward": flat}).size_at(10_000) == math.inf


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(1.0, 1e7)), min_size=1, max_size=4),
    st.floats(1e9, 1e11),
)
def test_the_size_at_which_lines_reach_some_bytes_is_predicted_to_need_them(lines, limit_bytes):
    model = MemoryModel(
        {phase: Line(*line, 2, 8) for phase, line in zip(PHASES, lines, strict=False)}
    )
    size = model.size_at(limit_bytes)
    assert model.predict_bytes(size) == pytest.approx(limit_bytes)
