import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_batchmem.plan.learning_rate import (
    Epoch,
    TrainingSetup,
    learning_rate_factor,
    learning_rate_note,
    optimizer_step,
)
from lightning_batchmem.plan.sizes import MicroBatch, micro_batch
from lightning_batchmem.plan.unit import Unit


@pytest.mark.parametrize(
    ("budget_name", "size"), [(None, "1,008 samples"), ("max_tokens", "max_tokens 1,008")]
)
def test_a_target_that_is_missed_is_one_note(budget_name, size):
    setup = TrainingSetup(1, 4, None, None, (), Unit(budget_name))

    def notes(target, batch_size):
        step = optimizer_step(
            setup,
            batch_size,
            Epoch(),
            target_batch_size=target,
            multiple_of=None,
            lr_scaling=None,
        )
        return step.notes

    assert micro_batch(1010, largest=256, ranks=4) == MicroBatch(253, 1, 1012)
    expected = (
        f"An optimizer step has {size}, not the 1,010 of target_batch_size: 2 x 126 on each"
        " of 4 ranks."
    )
    assert notes(1010, 126) == (expected,)
    assert notes(1024, 256) == ()


@pytest.mark.parametrize(
    ("epoch", "batch_size", "accumulate", "samples"),
    [
        (Epoch(), 32, 4, 128),
        # The data set is smaller than the batch.
        (Epoch(1, 7), 32, 1, 7),
        # The epoch ends with half a batch.
        (Epoch(3, 80), 32, 4, 80),
        (Epoch(3, 80), 32, 2, 64),
        # Under limit_train_batches=2.
        (Epoch(2, 64), 32, 4, 64),
        (Epoch(0, 0), 32, 4, 1),
    ],
)
def test_the_samples_of_an_optimizer_step(epoch, batch_size, accumulate, samples):
    assert epoch.samples_of_step(batch_size, accumulate) == samples


@pytest.mark.parametrize(
    ("scaling", "effective", "base", "expected"),
    [
        ("linear", 256, 32, 0.8),
        ("linear", 32, 256, 0.0125),
        ("sqrt", 128, 32, 0.2),
        ("sqrt", 8, 32, 0.05),
    ],
)
def test_scaled_learning_rate(scaling, effective, base, expected):
    rate = 0.1 * learning_rate_factor(scaling, effective, base)
    assert rate == pytest.approx(expected, rel=1e-12)


@given(st.floats(1e-8, 10.0), st.integers(1, 10**6), st.integers(1, 10**6))
def test_linear_is_the_square_root_twice_and_a_rule_can_be_undone(rate, first, second):
    def scaled(rate, scaling, to, base):
        return rate * learning_rate_factor(scaling, to, base)

    twice = scaled(scaled(rate, "sqrt", first, second), "sqrt", first, second)
    assert twice == pytest.approx(scaled(rate, "linear", first, second))
    assert scaled(twice, "linear", second, first) == pytest.approx(rate)
    assert scaled(rate, "sqrt", first, first) == rate


RATE_BY = "multiplies the learning rate by"
SEE = 'see "Choosing a batch size" in the documentation.'
NONE_KNOWN = "and no single rule is known for {}. Tune the learning rate by hand."


@pytest.mark.parametrize(
    ("names", "effective", "expected"),
    [
        (["SGD"], 32, ""),
        ([], 64, ""),
        (["SGD", "SGD"], 256, f'. For SGD, lr_scaling="linear" {RATE_BY} 8: {SEE}'),
        (
            ["Adam", "RMSprop"],
            320_000,
            f'. For Adam and RMSprop, lr_scaling="sqrt" {RATE_BY} 100 (untested beyond 8 times the'
            f" samples): {SEE}",
        ),
        (
            ["SGD"],
            3,
            '. For SGD, lr_scaling="linear" multiplies the learning rate by 0.09375 (untested'
            " beyond 8 times",
        ),
        (["Lion"], 64, f", {NONE_KNOWN.format('Lion')}"),
        (["NAdam", "Adamax"], 64, f", {NONE_KNOWN.format('NAdam and Adamax')}"),
    ],
)
def test_note(names, effective, expected):
    note = learning_rate_note(names, 32, effective, Unit())
    start = ""
    if expected:
        start = f"An optimizer step has {effective:,} samples instead of 32{expected}"
    assert note.startswith(start)
    assert bool(note) == bool(expected)
    is_untested = bool(note) and "no single" not in note and not 4 <= effective <= 256
    assert ("untested" in note) == is_untested
