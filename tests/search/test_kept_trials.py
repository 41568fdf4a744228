"""Trials are kept in a file, so that a new start goes on behind the one that ended the run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_batchmem._version import __version__
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.records import NextSize, Trial, TrialMemory
from lightning_batchmem.search.kept_trials import ENDED, KeptTrials
from lightning_batchmem.search.ranks import RankFailedError, RankLostError, Ranks
from tests.plan.test_records import TRIALS

ALONE = Ranks(0, 1)
OK = Trial(2, "ok", TrialMemory({"forward": 5}))
NEXT = NextSize(8, "probe")
QUESTION = "the question"


class SeveralRanks(Ranks):
    """One of two ranks, which gets what the first one has."""

    def __init__(self, rank, of_first=None):
        super().__init__(rank, 2)
        self.of_first = of_first

    def exchange(self, value):
        return [value if self.rank == 0 else self.of_first, value]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "plan.json.trials"


def kept_in(path, question=QUESTION, training="32-true"):
    kept = KeptTrials(ALONE, path, training)
    return kept, kept.read(question)


def content_of(path):
    return json.loads(path.read_text())


def test_the_file_has_the_question_the_trials_and_the_one_that_runs(path):
    kept, trials = kept_in(path)
    assert (trials, kept.notes) == ((), [])
    empty = {
        "question": f"{__version__}; 32-true; {QUESTION}",
        "trials": [],
        "running": None,
        "why_kept": "",
    }
    assert content_of(path) == empty
    with kept.running(NEXT, are_collective=False):
        assert content_of(path) == {**empty, "running": {"batch_size": 8, "kind": "probe"}}
    kept.end((OK,))
    (trial,) = content_of(path)["trials"]
    assert (trial["batch_size"], trial["outcome"]) == (2, "ok")
    assert content_of(path)["running"] is None
    # A reader sees a whole file, and nothing else stays.
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    kept.remove()
    kept.remove()
    assert list(path.parent.iterdir()) == []


@settings(max_examples=20, deadline=None)
@given(
    trials=st.lists(TRIALS).map(tuple), why=st.text(st.characters(codec="ascii", categories=["L"]))
)
def test_a_new_start_has_the_trials_of_the_last_one(tmp_path_factory, trials, why):
    path = tmp_path_factory.mktemp("kept") / "trials"
    kept, _ = kept_in(path)
    kept.begin_again(why)
    kept.end(trials)
    again, read = kept_in(path)
    assert (read, again.why_kept, again.notes) == (trials, why, [])


def test_a_trial_that_has_not_ended_is_out_of_memory(path):
    kept, _ = kept_in(path)
    kept.end((OK,))
    # A process that is killed runs nothing after this.
    running = kept.running(NEXT, are_collective=False)
    running.__enter__()
    again, trials = kept_in(path)
    ended = Trial(8, "out_of_memory", TrialMemory(), "probe", error=ENDED)
    assert trials == (OK, ended)
    (note,) = again.notes
    assert note.kind == "earlier_plan"
    assert note.text.startswith("Earlier starts ended at size 8, which counts as out of memory. If")
    # It is counted once.
    third, trials = kept_in(path)
    assert (trials, third.notes) == ((OK, ended), again.notes)
    running = third.running(NextSize(4, "rehearsal"), are_collective=False)
    running.__enter__()
    (note,) = kept_in(path)[0].notes
    assert note.text.startswith("Earlier starts ended at size 8 and 4, which counts as")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_interrupt_or_an_error_of_the_project_is_no_trial(path, error):
    kept, _ = kept_in(path)
    kept.end((OK,))
    with pytest.raises(error), kept.running(NEXT, are_collective=False):
        raise error
    assert kept_in(path)[1] == (OK,)


@pytest.mark.parametrize(
    ("error", "are_collective", "counts"),
    [
        (KeyError("of the project"), False, False),
        (KeyError("of the project"), True, False),
        (RuntimeError("connection closed by peer"), True, True),
        (MemoryError(), True, True),
        (SystemExit(1), True, True),
        (KeyboardInterrupt(), False, False),
        (RankFailedError("rank 1 ended the search: KeyError"), False, False),
        (RankLostError("another rank ended without a message"), False, True),
    ],
)
def test_only_what_may_be_out_of_memory_counts(path, error, are_collective, counts):
    kept, _ = kept_in(path)
    with pytest.raises(type(error)), kept.running(NEXT, are_collective=are_collective):
        raise error
    assert [trial.batch_size for trial in kept_in(path)[1]] == [8] * counts


@pytest.mark.parametrize("another", [("another question",), (QUESTION, "bf16-mixed")])
def test_the_trials_of_another_search_are_not_used(path, another):
    kept, _ = kept_in(path)
    kept.end((OK,))
    other, trials = kept_in(path, *another)
    assert (trials, other.why_kept) == ((), "")
    assert other.notes == [
        Note("earlier_plan", f"The trials in {path} were of another search, and were not used.")
    ]
    assert content_of(path)["trials"] == []


def test_the_trials_of_another_version_are_not_used(path):
    kept, _ = kept_in(path)
    kept.end((OK,))
    path.write_text(path.read_text().replace(f'"{__version__};', '"0.1.0;'))
    assert kept_in(path)[1] == ()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"trials": 3}', '{"running": {"batch_size": "8"}}']
)
def test_another_file_stays_and_is_an_error(path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"plan\.json\.trials must have the trials of a search, but"
    ):
        kept_in(path)
    assert path.read_text() == text


def test_a_directory_that_cannot_be_written_is_an_error(path):
    path.parent.write_text("")
    message = r"plan\.json\.trials cannot be written \(.*runs'\)\. Name another file for the plan\."
    with pytest.raises(ValueError, match=message):
        kept_in(path)


def test_accumulation_that_keeps_the_samples_begins_again(path):
    kept, _ = kept_in(path)
    kept.end((OK,))
    kept.begin_again("6 samples ran out of memory")
    again, trials = kept_in(path)
    assert (trials, again.why_kept) == ((), "6 samples ran out of memory")


def test_the_first_rank_reads_and_writes_for_all(path):
    first = KeptTrials(SeveralRanks(0), path)
    first.read(QUESTION)
    first.end((OK,))
    text = path.read_text()
    of_first = first._read(f"{__version__}; ; {QUESTION}")
    # The second one may have no such directory.
    other = KeptTrials(SeveralRanks(1, of_first), Path("/dev/null/trials"))
    assert other.read(QUESTION) == (OK,)
    with other.running(NEXT, are_collective=True):
        pass
    other.remove()
    assert path.read_text() == text


def test_only_kept_trials_lift_the_caution_about_collective_steps(path):
    limits = SearchLimits(10**9, 1, 100, "dataset", steps_are_collective=True)
    assert KeptTrials(ALONE).to_decide(limits) == limits
    kept, _ = kept_in(path)
    assert kept.to_decide(limits) == replace(limits, steps_are_collective=False)


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = KeptTrials(ALONE)
    assert kept.read(QUESTION) == ()
    with kept.running(NEXT, are_collective=False):
        pass
    kept.end((OK,))
    kept.remove()
    assert list(tmp_path.iterdir()) == []
