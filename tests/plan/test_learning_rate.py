from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_batchmem.plan.learning_rate import (
    learning_rate_factor,
    learning_rate_note,
)
from lightning_batchmem.plan.options import Unit
from lightning_batchmem.plan.recipe import Recipe


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


RATE_BY = "multiplies the rate by"
SEE = 'see "Choosing a batch size" in the documentation.'
TOO_DIFFERENT = "No rule is known for such a step: tune the learning rate by hand."
NONE_KNOWN = "No single rule is known for {}: tune the learning rate by hand."
WORSE = ', so the training may end worse. objective="recipe" keeps your own size'


@pytest.mark.parametrize(
    ("names", "effective", "expected"),
    [
        (("SGD",), 32, ""),
        ((), 64, ""),
        (("SGD", "SGD"), 48, f'{WORSE}. For SGD, lr_scaling="linear" {RATE_BY} 1.5: {SEE}'),
        (("SGD",), 64, f'{WORSE}. For SGD, lr_scaling="linear" {RATE_BY} 2: {SEE}'),
        (
            ("Adam", "RMSprop"),
            800,
            f'{WORSE}. For Adam and RMSprop, lr_scaling="sqrt" {RATE_BY} 5: {SEE}',
        ),
        (("Adam",), 33 * 32, f"{WORSE}. {TOO_DIFFERENT}"),
        (("Lion",), 7_200, f"{WORSE}. {TOO_DIFFERENT}"),
        (
            ("SGD",),
            3,
            f'. For SGD, lr_scaling="linear" {RATE_BY} 0.09375: {SEE}',
        ),
        (("Lion",), 48, f"{WORSE}. {NONE_KNOWN.format('Lion')}"),
        (("NAdam", "Adamax"), 48, f"{WORSE}. {NONE_KNOWN.format('NAdam and Adamax')}"),
    ],
)
def test_note(names, effective, expected):
    before = Recipe(effective_batch_size=32, learning_rates=(0.1,))
    after = replace(before, effective_batch_size=effective, optimizer_names=names)
    text = f"An optimizer step has {effective:,} samples instead of 32 at the same learning rate"
    note = learning_rate_note(before, after, Unit())
    assert note == (text + expected if expected else "")


def test_there_is_no_note_where_the_project_changes_its_rate_itself():
    before = Recipe(effective_batch_size=32, learning_rates=(0.1,), optimizer_names=("SGD",))
    after = replace(before, effective_batch_size=64, learning_rates=(0.2,))
    assert learning_rate_note(before, after, Unit()) == ""
    assert learning_rate_note(replace(before, effective_batch_size=None), after, Unit()) == ""


def test_where_the_project_steps_its_optimizers_batches_are_compared():
    before = Recipe(effective_batch_size=32, counts_batches=True, optimizer_names=("SGD",))
    note = learning_rate_note(before, replace(before, effective_batch_size=48), Unit())
    assert note.startswith("A batch has 48 samples instead of 32 at the same learning rate, so")
