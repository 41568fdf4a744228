from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_batchmem.measure.phases import StepPeaks
from lightning_batchmem.measure.step_record import StepRecord
from lightning_batchmem.report.history import MOST_ROWS, History


def step(number, peak_bytes, stage="train", reserved_bytes=None, limit_bytes=None):
    phase = "forward" if stage == "train" else "evaluation"
    peaks = StepPeaks({phase: peak_bytes}, reserved_bytes)
    return StepRecord(number, 4, peaks, 0.1, None, stage, limit_bytes=limit_bytes)


def test_few_steps_are_kept_as_they_are():
    history = History(has_peak=False)
    history.add(step(0, 5, reserved_bytes=9, limit_bytes=100))
    history.add(step(1, 7))
    (first, second) = history.rows
    assert (first.step, first.peak_bytes, first.peak_reserved_bytes, first.limit_bytes) == (0, 5, 9, 100)
    assert first.phase_peak_bytes == {"forward": 5}
    assert (first.batch_size, first.has_peak) == (4, False)
    assert (second.peak_bytes, second.limit_bytes) == (7, None)


def test_neighbours_become_one_with_their_highest():
    history = History()
    for number in range(MOST_ROWS + 1):
        history.add(step(number, number % 10, limit_bytes=50 if number == 3 else None))
    assert len(history.rows) == MOST_ROWS // 2 + 1
    assert [(row.step, row.peak_bytes) for row in history.rows[:5]] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    assert history.rows[1].limit_bytes == 50
    history.add(step(MOST_ROWS + 1, 77))  # completes the last pair
    assert len(history.rows) == MOST_ROWS // 2 + 1
    assert history.rows[-1].peak_bytes == 77


def test_an_evaluation_stays_apart_and_in_its_place():
    history = History()
    for number in range(MOST_ROWS):
        history.add(step(number, 1))
        history.add(step(0, 9, "validate"))
    assert len(history.rows) <= MOST_ROWS + 1
    assert {row.stage: row.peak_bytes for row in history.rows} == {"train": 1, "validate": 9}
    assert [row.stage for row in history.rows[:4]] == ["train", "validate", "train", "validate"]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20_000), st.integers(0, 19_999), st.sampled_from([0, 7, 100]))
def test_no_peak_is_lost_and_the_rows_stay_few(steps, at_step, every):
    history = History()
    for number in range(steps):
        history.add(step(number, 1000 if number == at_step else 1))
        if every and number % every == 0:
            history.add(step(0, 5, "validate"))
    assert len(history.rows) <= MOST_ROWS + 1
    trained = [row for row in history.rows if row.stage == "train"]
    assert [row.step for row in trained] == sorted(row.step for row in trained)
    if at_step < steps:
        (found,) = [index for index, row in enumerate(trained) if row.peak_bytes == 1000]
        assert trained[found].step <= at_step
        assert found + 1 == len(trained) or trained[found + 1].step > at_step
