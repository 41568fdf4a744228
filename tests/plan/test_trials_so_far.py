"""What the trials of a search show of speeds, and of the probes that are left."""

from dataclasses import replace

import pytest

from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.plan.records import Trial
from lightning_batchmem.plan.trials_so_far import TrialsSoFar, faster_note
from tests.helpers.simulated_search import limits


@pytest.fixture(autouse=True)
def _no_note_about_speed():
    """Compare speeds here."""


def timed(**by_size):
    return [
        Trial(int(name[1:]), "ok", {}, samples_per_second=float(value))
        for name, value in by_size.items()
    ]


@pytest.mark.parametrize(
    ("trials", "batch_size", "named"),
    [
        (timed(b2=10, b69=112, b138=100), 138, True),
        (timed(b2=10, b69=110, b138=100), 138, False),
        # A larger size that failed, or ran before a smaller one was chosen.
        (timed(b69=100, b138=200), 69, False),
        (timed(b69=100), 69, False),
        # The chosen size was not timed.
        (timed(b69=100), 138, False),
        ([], 138, False),
    ],
)
def test_a_smaller_size_is_named_if_it_is_clearly_faster(trials, batch_size, named):
    text = (
        "69 samples ran at 112 samples/s, and 138 samples ran at 100 samples/s."
        ' objective="throughput" looks for the fastest size.'
    )
    assert faster_note(trials, batch_size, limits()) == ([text] if named else [])


@pytest.mark.parametrize(("speed", "named"), [(112, False), (125, False), (126, True)])
def test_on_the_host_steps_vary_more(speed, named):
    trials = timed(b69=speed, b138=100)
    assert bool(faster_note(trials, 138, limits(is_host=True))) is named


def test_speeds_are_those_of_all_ranks():
    (note,) = faster_note(timed(b1=80, b2=20), 2, limits(ranks=3))
    assert note.startswith("1 samples ran at 240 samples/s, and 2 samples ran at 60 samples/s.")


def test_the_fastest_of_the_smaller_sizes_is_named():
    (note,) = faster_note(timed(b2=130, b8=150, b32=140, b64=100), 64, limits())
    assert note.startswith("8 samples ran at 150 ")


@pytest.mark.parametrize(
    ("batch_size", "is_last"),
    [
        # The first rehearsal has 90 samples, and a probe that follows at least 1.5 times as many.
        (8, False),
        (30, False),
        (31, True),
        (45, True),
        # Two steps of it take longer than one at the size of the rehearsal.
        (46, False),
    ],
)
def test_the_last_probe_is_known_from_the_lines(batch_size, is_last):
    trials = [Trial(2, "ok", {"forward": 20}), Trial(8, "ok", {"forward": 80})]
    known = TrialsSoFar(trials, replace(limits(), limit_bytes=1000), SearchPolicy())
    assert known.first_rehearsal_size == pytest.approx(90)
    assert known.is_last_probe(batch_size) is is_last
