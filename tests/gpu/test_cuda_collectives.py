"""Collectives of one rank, where the others do not exist and are taken to be equal."""

import pytest

from tests.helpers.cuda_stub import needs_stub, on_stub

pytestmark = needs_stub

RANKS = 4
OWN = [2.0, 3.0]


def on_rank(case, **settings):
    return on_stub("cuda_collectives", case, CUDA_STUB_DEVICES=str(RANKS), **settings)


def test_values_are_those_of_equal_ranks():
    found = on_rank("values")
    summed = [8.0, 12.0]
    assert found.pop("SUM") == summed
    assert found.pop("PRODUCT") == [16.0, 81.0]
    assert [found.pop(name) for name in ("AVG", "MIN", "MAX")] == [OWN] * 3
    assert {name: found.pop(name) for name in list(found) if name.startswith("torch.")} == {
        f"torch.{name}": summed
        for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
    }
    assert found == {
        "all_gather_into_tensor": OWN * RANKS,
        "all_gather": [OWN] * RANKS,
        "gather": [OWN] * RANKS,
        # The first part, of all ranks.
        "reduce_scatter_tensor": [0.0, 4.0],
        "broadcast": OWN,
        "functional": summed,
        "functional gather": OWN * RANKS,
        "uneven": OWN,
        "objects": [{"rank": 0}] * RANKS,
        "bytes of large objects": [3 * 2**20] * RANKS,
        "scattered object": [{"for": 0}],
        "scatter": [0.0, 1.0],
        "host": [8.0],
        "of a pair": [*OWN, *OWN, 0.0, 0.0, 0.0, 0.0],
        "of others": [8.0],
    }


def test_large_values_are_not_known():
    # The number that stands for unknown floats.
    found = on_rank("unknown")
    assert found == {"large": 1.0, "exchanged": [1.0] * RANKS, "sent": 7.0}


def test_what_depends_on_other_ranks_is_refused():
    parts, pipeline, *objects = on_rank("refused")["sentences"]
    assert parts.startswith("the program exchanges parts of different sizes with all ranks")
    assert pipeline.startswith("the program sends tensors from one rank to another")
    assert [text.partition(",")[0] for text in objects] == [
        "the program receives objects of rank 1 (broadcast_object_list)",
        "the program receives objects of rank 3 (scatter_object_list)",
    ]


@pytest.mark.parametrize(
    ("settings", "taken_mib"),
    [
        ({}, [0, 0, 0, 0, 0]),
        ({"CUDA_STUB_NCCL_MIB": "500"}, [0, 500, 500, 1000, 1000]),
        (
            {"CUDA_STUB_NCCL_MIB": "500", "CUDA_STUB_NCCL_FIRST_MIB": "2000"},
            [0, 2500, 2500, 3000, 3000],
        ),
        ({"CUDA_STUB_NCCL_FIRST_MIB": "700"}, [0, 700, 700, 700, 700]),
    ],
)
def test_nccl_takes_memory_at_the_first_exchange_of_a_group(settings, taken_mib):
    assert on_rank("memory", **settings)["taken_mib"] == taken_mib
