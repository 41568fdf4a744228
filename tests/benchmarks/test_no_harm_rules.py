"""The pure parts of benchmarks.no_harm_rules: the sizes that a rule allows, and what harm is."""

import math

import pytest
import torch
from torch import nn

from benchmarks.no_harm_rules import (
    RULES,
    Comparison,
    Training,
    cell,
    is_falling,
    scaled_rate,
    smaller,
    steps,
    times,
)
from benchmarks.no_harm_tasks import SETS, Data, Task, regression_loss


def task(samples=1_000, batch_size=16, epochs=4, optimizer="adam"):
    rows = (torch.zeros(samples, 1), torch.zeros(samples))
    return Task(
        "line",
        lambda: nn.Linear(1, 1),
        lambda: Data(rows, rows),
        regression_loss,
        batch_size,
        epochs,
        0.01,
        optimizer,
    )


def trainings(*losses, late_loss=1.0):
    return [
        Training("line", 4, 16, 0.01, seed, late_loss, loss) for seed, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(("factor", "size"), [(1, 16), (1.25, 20), (1.5, 24), (4, 64)])
def test_a_factor_is_of_the_own_size(factor, size):
    assert times(factor)(task()) == size


def test_a_factor_is_rounded_down():
    assert times(1.5)(task(batch_size=25)) == 37


def test_steps_in_an_epoch_and_in_the_training_both_bound_the_size():
    assert steps(10)(task()) == 100
    assert steps(10, 100)(task()) == 40
    assert steps(50, 100)(task()) == 20


def test_a_count_of_steps_allows_the_own_size_where_that_has_fewer():
    assert steps(200)(task()) == 16


def test_the_smaller_of_two_rules():
    assert smaller(times(2), steps(10))(task()) == 32
    assert smaller(times(8), steps(10))(task()) == 100


def test_no_rule_allows_less_than_the_project_size():
    assert all(rule(task()) >= 16 for rule in RULES.values())


def test_the_rate_follows_the_factor_or_its_root():
    assert scaled_rate(task(), 64) == pytest.approx(0.02)
    assert scaled_rate(task(optimizer="adamw"), 64) == pytest.approx(0.02)
    assert scaled_rate(task(optimizer="sgd"), 64) == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("own", "other", "is_harm"),
    [
        ((0.9, 1.1), (1.3, 1.3), True),
        ((0.9, 1.1), (1.1, 1.1), False),
        ((0.9, 1.1), (0.1, 0.1), False),
        ((0.999, 1.001), (1.01, 1.01), False),
        ((0.9, 1.1), (1.0, math.nan), True),
        ((0.9, 1.1), (1.0, math.inf), True),
    ],
    ids=["harm", "in the spread", "better", "below 2 %", "not a number", "infinite"],
)
def test_harm_is_more_than_a_spread_and_more_than_2_per_cent(own, other, is_harm):
    comparison = Comparison(trainings(*own), trainings(*other))
    assert comparison.is_harm == is_harm
    assert cell(comparison).startswith("**") == is_harm


def test_a_difference_is_told_in_spreads_and_as_a_share():
    comparison = Comparison(trainings(1.9, 2.1), trainings(2.4, 2.4))
    assert comparison.spreads == pytest.approx(2)
    assert comparison.share == pytest.approx(0.2)


def test_a_size_is_worse_with_every_seed_if_each_seed_ends_worse_than_itself():
    own = trainings(0.8, 1.2)
    assert Comparison(own, trainings(0.9, 1.3)).is_worse_with_every_seed
    assert Comparison(own, trainings(0.9, math.nan)).is_worse_with_every_seed
    assert not Comparison(own, trainings(1.3, 1.1)).is_worse_with_every_seed
    assert not Comparison(own, own).is_worse_with_every_seed


def test_a_loss_is_falling_if_its_mean_is_below_the_late_one():
    assert is_falling(trainings(0.8, 1.1))
    assert not is_falling(trainings(0.9, 1.2))


def test_the_sets_have_eight_tasks_each_and_all_names_differ():
    names = [task.name for tasks in SETS.values() for task in tasks]
    assert [len(tasks) for tasks in SETS.values()] == [8, 8]
    assert len(set(names)) == 16
