from dataclasses import fields
from pathlib import Path

from lightning_batchmem.plan.policy import SearchPolicy, policy_table

ROOT = Path(__file__).parents[2]


def test_each_number_has_a_meaning_and_a_source():
    for number in fields(SearchPolicy):
        assert number.metadata["meaning"].endswith("."), number.name
        assert number.metadata["source"], number.name


def test_the_table_in_the_documentation_is_the_printed_one():
    assert policy_table() in (ROOT / "docs" / "limits.md").read_text()
