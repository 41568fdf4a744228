"""The file of a reference."""

import json

import pytest

from lightning_batchmem.check.reference import (
    PhaseMemory,
    StepMemory,
    current_versions,
    read_reference,
)

MEMORY = StepMemory({"forward": PhaseMemory(1, 2, {"b": 2, "a": -1}, {"": 2})}, current_versions())


def test_a_file_has_sorted_json_and_all_numbers(tmp_path):
    path = tmp_path / "memory.json"
    path.write_text(MEMORY.to_json())
    assert read_reference(path) == MEMORY
    content = json.loads(path.read_text())
    assert json.dumps(content, indent=1, sort_keys=True) + "\n" == path.read_text()
    assert set(content["versions"]) == {"torch", "lightning_batchmem"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"phases": {}}',
        '{"versions": {}}',
        MEMORY.to_json()[:-10],
        MEMORY.to_json().replace('"fixed_bytes": 1', '"fixed_bytes": "1"'),
        MEMORY.to_json().replace('"fixed_bytes": 1', '"fixed_bytes": NaN'),
        "[" * 100_000,
        "\xff",
    ],
)
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "memory.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"memory\.json must be a reference of the memory"):
        read_reference(path)
