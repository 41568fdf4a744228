import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_batchmem.plan.options import SearchOptions, Unit, parse_memory_limit

BUDGET = 100 * 2**30


@pytest.mark.parametrize(
    ("memory_limit", "expected"),
    [
        (None, BUDGET),
        (12345, 12345),
        (BUDGET + 1, BUDGET + 1),
        (2e9, 2 * 10**9),
        (0.5, BUDGET // 2),
        (1.0, BUDGET),
        ("20GiB", 20 * 2**30),
        ("1.5 gib", 3 * 2**29),
        ("500MB", 500 * 10**6),
        (" 64 KiB ", 64 * 2**10),
        ("7 B", 7),
        ("20G", 20 * 2**30),
        ("512m", 2**29),
        ("20GB", 20 * 10**9),
        ("90%", 90 * 2**30),
        (" 12.5 % ", BUDGET // 8),
        # All of it.
        (1, BUDGET),
        ("1TiB", 2**40),
        (np.int64(7), 7),
        (np.float64(0.5), BUDGET // 2),
    ],
)
def test_memory_limit_in_bytes(memory_limit, expected):
    assert parse_memory_limit(memory_limit, BUDGET) == expected


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (2, '"2GiB" or "2%"'),
        (90.0, '"90GiB" or "90%"'),
        (100, '"100GiB" or "100%"'),
        (101, '"101GiB"'),
        (2**20, '"1048576MiB"'),
    ],
)
def test_a_number_that_is_no_number_of_bytes_is_refused(value, meant):
    with pytest.raises(ValueError, match=f"got {int(value):,}; did you mean {meant}[?]$"):
        SearchOptions(memory_limit=value)
    assert SearchOptions(memory_limit=2**20 + 1).memory_limit == 2**20 + 1
    assert SearchOptions(memory_limit=1).memory_limit == 1


@given(st.floats(0.001, 1.0), st.integers(1, 2**45))
def test_a_fraction_is_never_more_than_the_budget(memory_limit, available_bytes):
    assert 0 <= parse_memory_limit(memory_limit, available_bytes) <= available_bytes


NO_LIMITS = [
    0,
    -1,
    0.0,
    1.1,
    float("nan"),
    float("inf"),
    1e30,
    True,
    "",
    "20",
    "20 parsecs",
    "-3GiB",
    "0GiB",
    "0%",
    "101%",
    "-5%",
    [],
]
NO_LIMITS += ["9" * 400 + "GB", 10**400, "1e3GB", np.array([1, 2]), torch.tensor(0.5)]


@pytest.mark.parametrize("value", NO_LIMITS, ids=lambda value: repr(value)[:20])
def test_memory_limit_is_named_with_its_value(value):
    message = r"^memory_limit must be a whole number of bytes, .* got "
    with pytest.raises(ValueError, match=message) as error:
        SearchOptions(memory_limit=value)
    assert repr(value)[:80] in str(error.value)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize(
    "name",
    ["max_batch_size", "min_batch_size", "multiple_of", "target_batch_size", "min_steps_per_epoch"],
)
@pytest.mark.parametrize("value", [0, -8, 2.0, True, "8", np.float64(2)], ids=repr)
def test_sizes_are_positive_whole_numbers(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be a whole number of at least 1, got "):
        SearchOptions(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"objective": "speed"},
            'objective must be one of "auto", "recipe", "memory", "throughput", got \'speed\'',
        ),
        (
            {"objective": None},
            'objective must be one of "auto", "recipe", "memory", "throughput", got None',
        ),
        (
            {"lr_scaling": "cubic"},
            'lr_scaling must be one of None, "linear", "sqrt", got \'cubic\'',
        ),
        (
            {"worst_case": 3},
            'worst_case must be one of None, "typical", "longest", got 3',
        ),
        (
            {"worst_case": np.zeros(1)},
            'worst_case must be one of None, "typical", "longest", got array',
        ),
        (
            {"min_batch_size": 8, "max_batch_size": 4},
            "max_batch_size must be at least min_batch_size=8, got 4",
        ),
        (
            {"batch_arg_name": "kwargs..size"},
            "batch_arg_name must be the name of an attribute or a path such as"
            " \"kwargs.size\", got 'kwargs..size'",
        ),
        ({"batch_arg_name": 3}, "batch_arg_name must be the name of an attribute or"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match="must") as error:
        SearchOptions(**arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ({}, 2),
        ({"min_batch_size": 1}, 1),
        ({"multiple_of": 4}, 4),
        ({"min_batch_size": 5, "multiple_of": 4}, 8),
    ],
)
def test_the_first_size_is_a_multiple(arguments, size):
    assert SearchOptions(**arguments).first_size(2) == size


def test_numbers_of_numpy_become_plain():
    options = SearchOptions(
        memory_limit=np.float32(0.5), max_batch_size=np.int64(64), multiple_of=np.int32(8)
    )
    values = (options.memory_limit, options.max_batch_size, options.multiple_of)
    assert values == (0.5, 64, 8)
    assert [type(value) for value in values] == [float, int, int]
    assert type(SearchOptions(memory_limit=np.int64(2**30)).memory_limit) is int


def test_sizes_in_samples():
    unit = Unit()
    assert (unit.name, unit.items, unit.one) == ("batch size", "samples", "a sample")
    assert unit.size(4096) == "4,096 samples"
    assert unit.size(1) == "1 sample"


def test_sizes_of_a_budget():
    unit = Unit("max_tokens")
    assert (unit.name, unit.items, unit.one) == ("max_tokens", "items", "for each of max_tokens")
    assert unit.size(4096) == "max_tokens 4,096"
