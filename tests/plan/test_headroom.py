"""Which sizes are predicted to fit, and which fit for certain."""

from dataclasses import replace

from lightning_batchmem.plan.fit import fit_memory
from lightning_batchmem.plan.headroom import (
    guaranteed_size_on_host,
    needed_bytes_on_host,
)
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Trial

POLICY = SearchPolicy()


def trial(batch_size, overhead_bytes, kind="rehearsal"):
    """The forward pass grows by 10 bytes a sample, below an optimizer step of 5000 bytes."""
    phases = {"forward": 1000 + 10 * batch_size, "optimizer_step": 5000}
    return Trial(
        batch_size,
        "ok",
        phases,
        kind,
        peak_held_bytes=5000 + overhead_bytes,
        fixed_bytes=900,
    )


def needed_bytes(batch_size, trials):
    memory = fit_memory(trials)
    assert memory is not None
    return needed_bytes_on_host(batch_size, memory, trials, [], POLICY)


def test_the_overhead_of_the_heap_grows_with_activations_below_the_highest_phase():
    trials = [trial(10, 0, "probe"), trial(110, 2000)]
    # Each live byte of the forward pass came with two bytes that live bytes do not have.
    assert needed_bytes(210, trials) == 9000
    # From 400 samples on, the live bytes of the forward pass come on top.
    assert needed_bytes(510, trials) == 5000 + 1100 + 2000 + 8000


def test_the_largest_overhead_of_any_rehearsal_may_return():
    trials = [trial(10, 0, "probe"), trial(110, 2000), trial(210, 2000)]
    # The last rehearsal held one byte for each live byte of growth, and the one before held two.
    by_the_last = 7000 + 1000
    assert needed_bytes(310, trials) == by_the_last + 1 * 3000
    assert needed_bytes(310, [trials[0], trials[2]]) == by_the_last


def test_the_first_trial_has_no_overhead_of_its_own():
    # The steps hold less than their live bytes, because some bytes are never written.
    first = trial(10, 0)
    trials = [first, trial(60, 0, "probe"), trial(510, -500)]
    probed = [trial(10, 0, "probe"), *trials[1:]]
    assert needed_bytes(510, trials) == needed_bytes(510, probed) == trials[-1].needed_bytes


def test_the_overhead_is_bounded():
    growing = [trial(10, 0, "probe"), trial(20, 1000, "probe")]
    assert needed_bytes(120, growing) == 6000 + (POLICY.most_held_ratio - 1) * 1000
    shrinking = [trial(10, 1000, "probe"), trial(20, 0, "probe")]
    assert needed_bytes(120, shrinking) == 5000
    rehearsed = [trial(10, 1000, "probe"), trial(20, 0)]
    # Live bytes stay at 5000 up to 400 samples, and grow by 1000 from there.
    assert needed_bytes(120, rehearsed) == 5000
    assert needed_bytes(500, rehearsed) == 5000 + POLICY.least_held_ratio * 1000


def test_an_optimizer_step_does_not_grow_with_the_batch_on_the_host():
    measured = trial(10, 0, "probe")
    # 1100 - 900 bytes belong to 10 samples, and up to 2.5 bytes are held for each.
    assert guaranteed_size_on_host(measured, 7000, POLICY) == 10 + 2000 * 10 // 500
    inexact = replace(measured, is_exact=False)
    assert guaranteed_size_on_host(inexact, 7000, POLICY) == 14


def test_a_single_phase_grows_as_a_whole_on_the_host():
    measured = Trial(10, "ok", {"forward": 1900}, peak_held_bytes=3900, fixed_bytes=900)
    assert guaranteed_size_on_host(measured, 6400, POLICY) == 20
    inexact = Trial(10, "ok", {"forward": 1900}, is_exact=False, fixed_bytes=900)
    assert guaranteed_size_on_host(inexact, 6400, POLICY) == 55
