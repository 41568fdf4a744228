import os

import pytest

from lightning_batchmem import Plan
from lightning_batchmem.plan.json_fields import read_small


def test_a_file_that_is_no_plan_is_not_read_whole(tmp_path):
    path = tmp_path / "batch_plan.json"
    path.touch()
    os.truncate(path, 16 * 2**20 + 1)
    with pytest.raises(ValueError, match="it is larger than 16 MiB"):
        read_small(path)


def test_a_text_that_is_no_json_is_named():
    with pytest.raises(ValueError, match=r"text must be the JSON of a Plan, got 'plan\.json'"):
        Plan.from_json("plan.json")
