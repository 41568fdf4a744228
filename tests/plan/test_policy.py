from dataclasses import fields

import pytest

from lightning_batchmem.plan.policy import POLICIES, policy_table


@pytest.mark.parametrize("policy", POLICIES)
def test_each_number_has_a_meaning_and_a_source(policy):
    rows = [row.split(" | ") for row in policy_table(policy).splitlines()[2:]]
    names = [number.name for number in fields(policy) if "Policy" not in str(number.type)]
    assert [row[0].strip("| `") for row in rows] == names
    for _, value, meaning, source in rows:
        assert value
        assert meaning.endswith(".")
        assert len(source) > len(" |")


def test_a_search_has_few_numbers():
    numbers = [number for policy in POLICIES for number in fields(policy)]
    assert len([number for number in numbers if "Policy" not in str(number.type)]) <= 34
