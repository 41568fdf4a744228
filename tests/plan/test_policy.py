from dataclasses import fields
from pathlib import Path

from lightning_batchmem.plan.policy import SearchPolicy, policy_table

ROOT = Path(__file__).parents[2]


def test_each_number_has_a_meaning_and_a_source():
    rows = [row.split(" | ") for row in policy_table().splitlines()[2:]]
    assert [row[0].strip("| `") for row in rows] == [number.name for number in fields(SearchPolicy)]
    for _, value, meaning, source in rows:
        assert value
        assert meaning.endswith(".")
        assert len(source) > len(" |")


def test_the_table_in_the_documentation_is_the_printed_one():
    assert policy_table() in (ROOT / "docs" / "search-policy.md").read_text()
