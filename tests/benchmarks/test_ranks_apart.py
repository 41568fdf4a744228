"""The rows of benchmarks.ranks_apart; the trainings themselves need a stub."""

from benchmarks.ranks_apart import columns

MIB = 2**20


def rank(*steps_mib):
    return {"steps": [step * MIB for step in steps_mib], "reserved": 100 * MIB}


def test_equal_steps_are_equal():
    row = columns("ddp", [rank(10, 20), rank(10, 21)], rank(10, 20), rank(10, 20))
    assert row["largest difference"] == "equal"
    assert row["apart"] == "equal"
    assert row["rank 1"] == "10.00 21.00"


def test_the_step_with_the_largest_difference_is_shown():
    row = columns("ddp", [rank(10, 20), rank(10, 20)], rank(10, 19), rank(10, 21))
    assert row["largest difference"] == "+1,048,576 bytes, +5.00%"
    assert row["apart"] == "10.00 19.00"


def test_an_error_takes_the_place_of_the_numbers():
    row = columns("ddp", [rank(10), {"error": "ended with -14"}], rank(10), rank(10))
    assert row == {"way": "ddp", "error": "ended with -14"}
