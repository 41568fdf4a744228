import pytest

from lightning_batchmem.plan.own_size import loss_note, slower_note, takes_own_size
from lightning_batchmem.plan.records import Speed
from tests.helpers.simulated_search import limits


@pytest.mark.parametrize(
    ("objective", "speed", "takes_own"),
    [
        ("auto", 84, True),
        ("auto", 86, False),
        ("recipe", 84, False),
        ("memory", 10, False),
        ("throughput", 115, True),
        ("throughput", 116, False),
    ],
)
def test_the_own_size_is_taken_where_the_other_is_slower(objective, speed, takes_own):
    own = Speed(16, 100.0)
    assert takes_own_size(objective, own, Speed(64, float(speed))) is takes_own


def test_a_slower_size_is_one_warning():
    speeds = (Speed(32, 245.0), Speed(160, 193.0))
    assert slower_note(speeds, 160, limits()) == (
        "160 samples are slower than your 32: 79% of the samples a second."
        ' objective="throughput" looks for the fastest size.'
    )
    # The size of the project was taken instead.
    assert slower_note(speeds, 32, limits()) == ""
    assert slower_note((Speed(32, 245.0), Speed(160, 240.0)), 160, limits()) == ""
    assert slower_note((), 160, limits()) == ""


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((0.5, 0.5), ""),
        # Dropout.
        ((0.5, 0.6), ""),
        ((0.5, 2.0), "a sum"),
        ((0.5, 1.8), "a sum"),
        # In-batch negatives: the logarithms of 2 and 8.
        ((0.69, 2.08), "compares the samples"),
        ((2.0, 0.5), "compares the samples"),
        ((None, 2.0), ""),
        ((0.0, 2.0), ""),
    ],
)
def test_copies_of_a_sample_show_what_the_loss_is(losses, words):
    note = loss_note(losses)
    assert bool(note) == bool(words)
    assert words in note
