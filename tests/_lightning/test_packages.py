"""A torch that is newer than all tested ones."""

import warnings

import pytest
import torch

from lightning_batchmem import MemoryProfiler
from lightning_batchmem._lightning.packages import (
    NEWEST_TESTED_TORCH,
    noted_errors,
    reason_of,
    warn_of_untested_torch,
)


@pytest.mark.parametrize("version", ["2.15.0", "3.0.0+cu130", "2.15.0a0+git1234"])
def test_a_newer_torch_is_one_warning(version):
    warn_of_untested_torch.cache_clear()
    with pytest.warns(UserWarning, match=f"torch {version[:4]}.* is newer than 2.14"):
        warn_of_untested_torch(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_untested_torch(version)


@pytest.mark.parametrize("version", ["2.14.1+cu130", "2.5.1", "1.13.0", torch.__version__])
def test_a_tested_torch_is_no_warning(version):
    warn_of_untested_torch(version)


def test_this_version_is_tested():
    assert tuple(map(int, torch.__version__.split(".")[:2])) <= NEWEST_TESTED_TORCH


def test_the_reason_of_an_error_of_the_project_has_the_note_of_the_search():
    with pytest.raises(KeyError) as raised, noted_errors(lambda: 2):
        raise KeyError("x")
    reason = reason_of(raised.value)
    assert reason.startswith("KeyError: 'x' BatchFinder: this error occurred in the search")
    with pytest.raises(ValueError, match="peak_flops") as raised, noted_errors(lambda: 2):
        MemoryProfiler(peak_flops=-1)
    assert reason_of(raised.value) == str(raised.value)
