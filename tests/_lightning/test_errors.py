"""Errors of a search, of the project and of the package."""

import pytest

from lightning_batchmem import MemoryProfiler
from lightning_batchmem._lightning.errors import noted_errors, reason_of


def test_the_reason_of_an_error_of_the_project_has_the_note_of_the_search():
    with pytest.raises(KeyError) as raised, noted_errors(lambda: 2):
        raise KeyError("x")
    reason = reason_of(raised.value)
    assert reason.startswith("KeyError: 'x' BatchFinder: this error occurred in the search")
    with pytest.raises(ValueError, match="peak_flops") as raised, noted_errors(lambda: 2):
        MemoryProfiler(peak_flops=-1)
    assert reason_of(raised.value) == str(raised.value)
