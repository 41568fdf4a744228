"""What a BatchFinder keeps for one fit or evaluation."""

import copy

import pytest

from lightning_batchmem._lightning.finder_run import FinderRun
from lightning_batchmem.search.ranks import Ranks


def search(run, calls):
    """A search that fails."""
    with run.warned_of_error() as without_search:
        without_search.callback(calls.append, "without")
        raise ValueError("mine")


def test_an_error_of_an_optional_search_starts_the_run_without_it():
    calls = []
    with pytest.warns(UserWarning, match=r"leaves the batch size .* as it is: ValueError: mine"):
        search(FinderRun(is_optional=True), calls)
    assert calls == ["without"]


def test_an_error_in_a_step_for_which_other_ranks_wait_ends_an_optional_search_too():
    calls = []
    ranks = Ranks(0, 2)
    with pytest.raises(ValueError, match="mine"), ranks.collective_step(4):
        search(FinderRun(ranks, is_optional=True), calls)
    assert calls == []


def test_a_kept_error_is_raised_once():
    run = FinderRun(is_optional=True)
    with run.kept_refusal():
        raise ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        run.raise_refusal()
    run.raise_refusal()


def test_the_end_of_a_copy_undoes_nothing():
    run = FinderRun()
    calls = []
    run.undo.callback(calls.append, "undone")
    copy.deepcopy(run).end()
    assert calls == []
    run.end()
    run.end()
    assert calls == ["undone"]
