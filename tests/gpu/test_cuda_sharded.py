"""A training after a search takes the memory of one with the size hard-coded, on two ranks."""

import pytest

from tests.helpers.cuda_sharded import SIZE, WAYS
from tests.helpers.cuda_stub import needs_stub, on_stub

pytestmark = needs_stub

# Streams of FSDP run side by side, so blocks are reused in another order in each process. A layer
# that is gathered takes 4 MiB, and the allocator reserves segments of 20 MiB.
MOST_MIB = {
    "start_live_mib": 0.1,
    "peak_live_mib": 6,
    "start_reserved_mib": 42,
    "peak_reserved_mib": 42,
}


TWO_DEVICES = {"CUDA_STUB_DEVICES": "2", "CUDA_STUB_GIB": "2"}


@pytest.mark.parametrize("way", WAYS)
def test_a_training_after_a_search_takes_what_one_with_the_size_hard_coded_takes(way, tmp_path):
    searches = ("in fit", "before", "hard-coded")
    found = on_stub("cuda_sharded", str(tmp_path), way, *searches, **TWO_DEVICES)
    hard_coded = found["hard-coded"]
    assert [one["size"] for one in hard_coded] == [SIZE] * 2
    for search in ("in fit", "before"):
        for one, expected in zip(found[search], hard_coded, strict=True):
            for name in ("size", "steps", "roots"):
                assert one[name] == expected[name], (search, name)
            for name, most in MOST_MIB.items():
                assert one[name] == pytest.approx(expected[name], abs=most), (search, found)


@pytest.mark.parametrize("way", ["fsdp", "fsdp, flat parameters", "fsdp2"])
def test_a_size_that_memory_limits_trains_within_the_limit(way, tmp_path):
    settings = {"CUDA_STUB_DEVICES": "2", "CUDA_STUB_GIB": "0.9,0.8"}
    of_ranks = on_stub("cuda_sharded", str(tmp_path), way, "largest", **settings)["largest"]
    for one in of_ranks:
        assert (one["limited_by"], one["verified"], one["steps"]) == ("memory", True, 5)
        assert one["size"] == of_ranks[0]["size"] > SIZE
        # The second device has less, and decides for both.
        assert 0.7 * one["limit_mib"] < one["peak_reserved_mib"] <= one["limit_mib"] < 0.8 * 1024
