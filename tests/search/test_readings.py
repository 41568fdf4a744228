"""The numbers of a trial that follow from the readings of its steps."""

from lightning_batchmem.devices.peaks import StepPeaks
from lightning_batchmem.search.readings import (
    CallReading,
    CallSeconds,
    StepReading,
    call_seconds,
    differing_peaks,
    growth_bytes,
    has_risen,
    held_peak_bytes,
    num_caught_errors,
    num_full_steps,
    num_retries,
    phase_peak_bytes,
)


def call(peaks=None, held_bytes=None, seconds=1.0, has_stepped=True):
    return CallReading(StepPeaks(peaks or {"forward": 1}), held_bytes, seconds, has_stepped)


def step(*calls, **values):
    known = {
        "is_primary": True,
        "batch_size": 2,
        "is_complete": True,
        "has_peaks": True,
        "has_times": True,
        "is_repeated": False,
        "allocator_retries": 0,
        "caught_errors": 0,
    }
    return StepReading(calls=calls or (call(),), **(known | values))


def test_the_time_of_an_optimizer_step_has_its_micro_batches_and_one_update():
    assert CallSeconds([], []).of_optimizer_step(4) is None
    # The update takes half a second.
    seconds = CallSeconds([1.5, 1.75, 1.25], [1.0, 1.5, 0.75])
    assert seconds.of_optimizer_step(1) == 1.5
    assert seconds.of_optimizer_step(4) == 4.5
    assert seconds.all == [1.5, 1.75, 1.25, 1.0, 1.5, 0.75]


def test_without_accumulation_each_call_has_an_update():
    assert CallSeconds([1.5, 1.5, 1.75], []).of_optimizer_step(1) == 1.5


def test_one_quick_step_of_many_does_not_make_a_size_fast():
    # Another process has every other tenth of a second. Of the quick steps one fits between.
    quick = [0.05, *[0.1] * 9]
    assert CallSeconds(quick, []).of_optimizer_step(1) == 0.1


def test_seconds_are_those_of_timed_steps_with_and_without_an_update():
    timed = step(call(seconds=2.0, has_stepped=False), call(seconds=3.0))
    readings = [timed, step(call(seconds=9.0), has_times=False)]
    assert call_seconds(readings) == CallSeconds([3.0], [2.0])


def test_the_peak_of_a_phase_is_the_highest_of_complete_steps_whose_peaks_count():
    readings = [
        step(call({"forward": 1, "backward": 5}), call({"forward": 3, "backward": 4})),
        step(call({"forward": 9}), has_peaks=False),
        step(call({"forward": 8}), is_complete=False),
    ]
    assert phase_peak_bytes(readings) == {"forward": 3, "backward": 5}
    assert phase_peak_bytes([]) == {}


def test_held_bytes_count_in_every_call_in_which_they_were_read():
    readings = [
        step(call(held_bytes=4), has_peaks=False),
        step(call(held_bytes=7), is_complete=False),
        step(call(held_bytes=None)),
    ]
    assert held_peak_bytes(readings) == 7
    assert held_peak_bytes([step(call())]) is None


def test_full_steps_are_counted():
    readings = [
        step(call(), call(), batch_size=3),
        step(batch_size=4, is_primary=False),
        step(batch_size=5, is_complete=False),
    ]
    assert num_full_steps(readings) == 1


def test_only_what_repeats_counts_as_a_retry_or_a_caught_error():
    readings = [
        step(allocator_retries=5, caught_errors=4),
        step(allocator_retries=2, caught_errors=1, is_repeated=True),
    ]
    assert num_retries(readings) == 2
    assert num_caught_errors(readings) == 1


def ends(*end_bytes):
    return [step(end_bytes=count_bytes) for count_bytes in end_bytes]


def test_memory_has_risen_if_each_step_ends_with_more():
    assert has_risen(ends(1, 2, 3))
    assert not has_risen(ends(1, 2, 2))
    assert not has_risen(ends(1))
    assert not has_risen(ends(None, None))


def test_growth_is_nearly_the_same_in_each_step():
    assert growth_bytes(ends(0, 100, 204, 300)) == 100
    assert growth_bytes(ends(0, 100, 250, 350)) == 0
    assert growth_bytes(ends(0, 100, 100)) == 0
    assert growth_bytes(ends(0, 100)) == 0


def test_times_of_a_step_that_failed_do_not_count():
    assert call_seconds([step(call(seconds=2.0), is_complete=False)]).all == []


def test_peaks_differ_above_a_tenth_and_in_timed_steps_only():
    def timed(*peaks, **values):
        return step(*(call({"forward": peak, "backward": 1}) for peak in peaks), **values)

    assert differing_peaks([]) == ()
    assert differing_peaks([timed(100), timed(110)]) == ()
    assert differing_peaks([timed(100), timed(111), timed(105)]) == (111, 100)
    # Batches of other lengths are not timed, and a step that ran out of memory has no peak.
    others = [timed(500, has_times=False), timed(500, is_complete=False)]
    assert differing_peaks([timed(100), timed(110), *others]) == ()
    # The micro batches of a step differ in any case.
    assert differing_peaks([timed(50, 100), timed(50, 100)]) == ()
