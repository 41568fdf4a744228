from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_batchmem.plan.options import Unit
from lightning_batchmem.plan.recipe import (
    Epoch,
    Recipe,
    learning_rate_factor,
    learning_rate_text,
    longer_search_text,
    loss_text,
    rounded_step_text,
    slower_text,
    step_ratio,
    training_text,
)
from lightning_batchmem.plan.records import Speed
from tests.helpers.simulated_search import limits

RATE = "learning rate 0.001 unchanged"


def recipe(size, steps, *, accumulate=1, ranks=1, rates=(0.001,), **more):
    effective = size * accumulate * ranks
    return Recipe(size, accumulate, ranks, effective, steps, learning_rates=rates, **more)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        # The newcomer's training.
        (
            recipe(16, 252),
            recipe(100, 40),
            f"16 -> 100 samples a step, 252 -> 40 steps, {RATE}",
        ),
        (recipe(16, 1252), recipe(16, 1252), f"16 samples a step, 1,252 steps, {RATE}"),
        (
            recipe(16, 252),
            recipe(64, 63, rates=(0.002,)),
            "16 -> 64 samples a step, 252 -> 63 steps, learning rate 0.001 -> 0.002",
        ),
        # Accumulation keeps the step.
        (
            recipe(32, 252),
            recipe(8, 252, accumulate=4),
            f"32 (32 -> 4 x 8) samples a step, 252 steps, {RATE}",
        ),
        (
            recipe(4, 252, accumulate=8),
            recipe(32, 252),
            f"32 (8 x 4 -> 32) samples a step, 252 steps, {RATE}",
        ),
        (
            recipe(8, 20, ranks=2),
            recipe(16, 10, ranks=2),
            f"16 (2 ranks x 8) -> 32 (2 ranks x 16) samples a step, 20 -> 10 steps, {RATE}",
        ),
        # The number of steps does not depend on the size.
        (
            recipe(16, 1000),
            recipe(64, 1000),
            f"1,000 steps of 16 -> 64 samples: 4 times the samples, {RATE}",
        ),
        (
            recipe(16, None),
            recipe(64, None),
            f"steps of 16 -> 64 samples: 4 times the samples, {RATE}",
        ),
        # The project steps its optimizers itself.
        (
            recipe(16, 100, counts_batches=True),
            recipe(32, 50, counts_batches=True),
            f"16 -> 32 samples a batch, 100 -> 50 batches, {RATE}",
        ),
        (
            recipe(16, 100, counts_batches=True),
            recipe(32, 100, counts_batches=True),
            f"100 batches of 16 -> 32 samples: 2 times the samples, {RATE}",
        ),
        # An epoch ends before the accumulation does.
        (
            replace(recipe(4, 1, accumulate=8), effective_batch_size=14),
            recipe(14, 1),
            f"14 (4 x 4 -> 14) samples a step, 1 step, {RATE}",
        ),
        # It has fewer samples than a batch.
        (
            replace(recipe(10_000, 1), effective_batch_size=5000),
            recipe(250, 1, accumulate=20),
            f"5,000 (5,000 -> 20 x 250) samples a step, 1 step, {RATE}",
        ),
        (recipe(1, 50), recipe(1, 50), f"1 sample a step, 50 steps, {RATE}"),
        (recipe(1, 2), recipe(2, 1), f"1 -> 2 samples a step, 2 -> 1 step, {RATE}"),
        (recipe(7, 1), recipe(8, 1), f"1 step of 7 -> 8 samples: 1.14 times the samples, {RATE}"),
        # Groups of parameters.
        (
            recipe(16, 10, rates=(0.1, 0.2)),
            recipe(16, 10, rates=(0.1, 0.2)),
            "16 samples a step, 10 steps, learning rates 0.1 and 0.2 unchanged",
        ),
        (
            recipe(16, 10, rates=(1, 2, 3, 4)),
            recipe(16, 10, rates=(1, 2, 3, 4)),
            "16 samples a step, 10 steps",
        ),
    ],
)
def test_the_text_says_what_changes(before, after, text):
    assert training_text(before, after, Unit()) == text


def test_the_text_of_a_budget():
    text = training_text(recipe(1024, 10), recipe(4096, 3), Unit("max_tokens"))
    assert text == f"max_tokens 1,024 -> 4,096 a step, 10 -> 3 steps, {RATE}"


def test_the_ratio_is_1_where_a_size_is_not_known():
    assert step_ratio(recipe(16, 1), recipe(40, 1)) == 2.5
    assert step_ratio(replace(recipe(16, 1), effective_batch_size=None), recipe(40, 1)) == 1


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
        # Without a batch there is no step.
        (Epoch(0, 0), 32, 4, 32),
    ],
)
def test_the_samples_of_an_optimizer_step(epoch, batch_size, accumulate, samples):
    assert epoch.samples_of_step(batch_size, accumulate) == samples


@pytest.mark.parametrize(
    ("budget_name", "size"), [(None, "1,008 samples"), ("max_tokens", "max_tokens 1,008")]
)
def test_a_step_that_is_missed_is_one_note(budget_name, size):
    after = Recipe(126, 2, 4, 1008)
    note = rounded_step_text(after, 1010, "target_batch_size", Unit(budget_name))
    assert note == (
        f"An optimizer step has {size}, not the 1,010 of target_batch_size: 4 ranks x 2 x 126."
    )
    assert rounded_step_text(after, 1008, "target_batch_size", Unit(budget_name)) == ""
    # One batch on one rank has no parts.
    alone = Recipe(batch_size=12, effective_batch_size=12)
    text = "An optimizer step has 12 samples, not the 8 of your own size."
    assert rounded_step_text(alone, 8, "your own size", Unit()) == text
    assert rounded_step_text(after, None, "target_batch_size", Unit(budget_name)) == ""


def test_a_search_that_takes_longer_than_the_training_is_one_note():
    assert longer_search_text(12.0, 3.0) == (
        "The search took 12 s, longer than the steps of the training. Write size and accumulation"
        " into your code to search no more."
    )
    assert longer_search_text(3.0, 12.0) == ""
    assert longer_search_text(3.0, None) == ""
    assert longer_search_text(2.0, 1.0) == ""


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
TOO_DIFFERENT = "No rule is known for such a step: tune the learning rate by hand."
NONE_KNOWN = "No single rule is known for {}: tune the learning rate by hand."
WORSE = ', so the training may end worse. objective="recipe" keeps your own size'


@pytest.mark.parametrize(
    ("names", "effective", "expected"),
    [
        (("SGD",), 32, ""),
        ((), 64, ""),
        (("SGD", "SGD"), 48, f'{WORSE}. lr_scaling="linear" {RATE_BY} 1.5 (SGD).'),
        (("SGD",), 64, f'{WORSE}. lr_scaling="linear" {RATE_BY} 2 (SGD).'),
        (
            ("Adam", "RMSprop"),
            800,
            f'{WORSE}. lr_scaling="sqrt" {RATE_BY} 5 (Adam and RMSprop).',
        ),
        (("Adam",), 33 * 32, f"{WORSE}. {TOO_DIFFERENT}"),
        (("Lion",), 7_200, f"{WORSE}. {TOO_DIFFERENT}"),
        (
            ("SGD",),
            3,
            f'. lr_scaling="linear" {RATE_BY} 0.09375 (SGD).',
        ),
        (("Lion",), 48, f"{WORSE}. {NONE_KNOWN.format('Lion')}"),
        (("NAdam", "Adamax"), 48, f"{WORSE}. {NONE_KNOWN.format('NAdam and Adamax')}"),
    ],
)
def test_note(names, effective, expected):
    before = Recipe(effective_batch_size=32, learning_rates=(0.1,))
    after = replace(before, effective_batch_size=effective, optimizer_names=names)
    text = f"An optimizer step has {effective:,} samples instead of 32 at the same learning rate"
    note = learning_rate_text(before, after, Unit())
    assert note == (text + expected if expected else "")


def test_there_is_no_note_where_the_project_changes_its_rate_itself():
    before = Recipe(effective_batch_size=32, learning_rates=(0.1,), optimizer_names=("SGD",))
    after = replace(before, effective_batch_size=64, learning_rates=(0.2,))
    assert learning_rate_text(before, after, Unit()) == ""
    assert learning_rate_text(replace(before, effective_batch_size=None), after, Unit()) == ""


def test_where_the_project_steps_its_optimizers_batches_are_compared():
    before = Recipe(effective_batch_size=32, counts_batches=True, optimizer_names=("SGD",))
    note = learning_rate_text(before, replace(before, effective_batch_size=48), Unit())
    assert note.startswith("A batch has 48 samples instead of 32 at the same learning rate, so")


def test_a_slower_size_is_one_warning():
    speeds = (Speed(32, 245.0), Speed(160, 193.0))
    assert slower_text(speeds, 160, limits()) == (
        "160 samples are slower than your 32: 79% of the samples a second."
        ' objective="throughput" looks for the fastest size.'
    )
    # The size of the project was taken instead.
    assert slower_text(speeds, 32, limits()) == ""
    assert slower_text((Speed(32, 245.0), Speed(160, 240.0)), 160, limits()) == ""
    assert slower_text((), 160, limits()) == ""


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((0.5, 0.5), ""),
        # Dropout.
        ((0.5, 0.6), ""),
        ((0.5, 2.0), "a sum"),
        ((0.5, 1.8), "a sum"),
        # In-batch negatives: the logarithms of 2 and 8.
        ((0.69, 2.08), "compares the samples"),
        ((2.0, 0.5), "compares the samples"),
        ((None, 2.0), ""),
        ((0.0, 2.0), ""),
    ],
)
def test_copies_of_a_sample_show_what_the_loss_is(losses, words):
    note = loss_text(losses)
    assert bool(note) == bool(words)
    assert words in note
