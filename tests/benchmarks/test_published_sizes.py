"""The pure parts of benchmarks.published_sizes: the choice of models, the ladder, the bracket."""

import math

import pytest

from benchmarks.published_list import (
    SEEN,
    Known,
    Published,
    candidates,
    from_the_middle,
    ladder,
    read_chosen,
    read_published,
    size_above,
)
from benchmarks.published_sizes import (
    EVERY_EIGHTH,
    Setting,
    cause_of,
    is_missing,
    kept_rows,
    ladder_verdict,
    misses,
    search_verdict,
    summary,
)

SETTING = Setting("off", 1300)


def test_the_ladder_is_the_published_one():
    rungs = list(ladder())
    assert rungs[:7] == [512, 384, 256, 192, 128, 96, 64]
    assert rungs[-6:] == [8, 6, 4, 3, 2, 1]
    # Every published size is a rung.
    assert {row.batch_size for row in read_published()} <= set(rungs)


@pytest.mark.parametrize(
    ("published", "above"), [(512, math.inf), (384, 512), (48, 64), (3, 4), (1, 2)]
)
def test_the_bracket_ends_at_the_rung_above(published, above):
    assert size_above(published) == above


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (192, "equal"),
        (256, "1 rung higher"),
        (384, "2 rungs higher"),
        (128, "1 rung lower"),
        (64, "3 rungs lower"),
        (0, "without a size"),
    ],
)
def test_a_ladder_is_compared_by_its_rungs(found, expected):
    assert ladder_verdict(192, found) == expected


@pytest.mark.parametrize(
    ("found", "expected"), [(191, "below"), (192, "inside"), (255, "inside"), (256, "above")]
)
def test_a_search_is_compared_with_the_bracket(found, expected):
    assert search_verdict(192, found) == expected


def test_the_middle_comes_first_and_of_two_the_later():
    assert from_the_middle(5) == [2, 3, 1, 4, 0]
    assert from_the_middle(4) == [2, 3, 1, 0]
    assert from_the_middle(1) == [0]


def test_candidates_are_comparable_and_new():
    rows = [
        Published("b", 256, 224, 1.0),
        Published("a", 128, 384, 1.0),
        Published("gone", 128, 224, 1.0),
        Published("first rung", 512, 224, 1.0),
        Published("large images", 64, 385, 1.0),
        Published("other image", 64, 224, 1.0),
        Published("resnet50", 64, 224, 1.0),
    ]
    known = {row.model: Known("family", None) for row in rows if row.model != "gone"}
    known["b"] = Known("family", 224)
    known["other image"] = Known("family", 256)
    found = candidates(rows, known)
    assert {family: [row.model for row in chosen] for family, chosen in found.items()} == {
        "family": ["b", "a"]
    }


def test_the_chosen_models_are_as_published_and_follow_the_rule():
    published = {row.model: row for row in read_published()}
    chosen = read_chosen()
    assert len(chosen) >= 30
    assert len({one.family for one in chosen}) == len(chosen)
    for one in chosen:
        row = published[one.model]
        assert (one.batch_size, one.image) == (row.batch_size, row.image)
        assert one.model not in SEEN
        assert one.batch_size < 512
        assert one.image <= 384
    assert len(EVERY_EIGHTH) == 6


def row(ladder_size, search_size, **values):
    return {"published": 192, "ladder": ladder_size, "search": search_size, **values}


def test_the_summary_counts_verdicts_and_errors():
    rows = [row(192, 200), row(256, 250), row(0, 0, search_error="RuntimeError: no")]
    # A row whose process was killed has no sizes.
    rows.append({"published": 192, "error": "no end after 600 s"})
    text = summary(SETTING, rows)
    assert "ladder 1 of 3 equal, 1 is 1 rung higher, 1 is without a size" in text
    assert "search 2 of 3 in the bracket, 1 below, 0 above; 2 rows with an error" in text


def test_a_row_names_what_is_not_as_published():
    assert misses(row(192, 200)) == []
    assert misses(row(256, 191)) == ["ladder 1 rung higher", "search below"]
    assert misses({"published": 192, "error": "no end after 600 s"}) == []


def test_the_cause_is_named_as_far_as_an_experiment_shows_it():
    named = {"model": "vgg16", "cudnn": "off", "context_mib": 426}
    high = row(256, 200, **named)
    equal = row(192, 180, **{**named, "context_mib": 1300})
    assert cause_of([high], {}) == "cause not found"
    assert cause_of([high], {"vgg16": "another cause"}) == "another cause"
    assert cause_of([equal, high], {}) == "the ladder is equal with off 1300"
    with_all = cause_of([{**equal, "search_all": 193}], {})
    assert with_all == "without the 5% that a search leaves free it finds 193, inside"


def test_only_the_parts_that_a_row_lacks_are_missing(tmp_path):
    assert kept_rows(tmp_path / "none.json") == {}
    assert not is_missing(row(192, 200), ["ladder", "search"])
    assert is_missing(row(192, 200), ["ladder", "largest"])
    assert is_missing({}, ["ladder"])
