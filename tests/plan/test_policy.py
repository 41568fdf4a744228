import inspect
import re
from dataclasses import fields

import pytest

from lightning_batchmem.plan.policy import (
    BudgetPolicy,
    ReadingPolicy,
    RehearsalPolicy,
    SearchPolicy,
    StepPolicy,
)

POLICIES = (SearchPolicy, RehearsalPolicy, StepPolicy, ReadingPolicy, BudgetPolicy)


def numbers_of(policy):
    return [number.name for number in fields(policy) if "Policy" not in str(number.type)]


@pytest.mark.parametrize("policy", POLICIES)
def test_each_number_has_a_meaning_and_a_source(policy):
    source = inspect.getsource(policy)
    texts = dict(re.findall(r'^    (\w+): [^\n]+\n    """(.+?)"""', source, re.M | re.S))
    assert list(texts) == numbers_of(policy)
    for text in texts.values():
        meaning, _, reason = " ".join(text.split()).partition(" Source: ")
        assert meaning.endswith(".")
        assert reason


def test_a_search_has_few_numbers():
    assert sum(len(numbers_of(policy)) for policy in POLICIES) <= 34
