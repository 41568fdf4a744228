"""Allocators other than torch's own, and settings of torch's own."""

import pytest

from tests.helpers.cuda_stub import needs_stub, on_stub, require

pytestmark = needs_stub


@pytest.fixture(scope="module")
def pluggable():
    """The errors of trainings with an allocator that counts nothing."""
    found = on_stub("cuda_allocators", "pluggable")
    require(found["plain"] == "", found)
    for name in ("profiler", "finder"):
        error = found[name]
        require(error == "" or "getDeviceStats" in error or "BatchFinder" in error, found)
    return found


def test_the_profiler_does_not_end_a_training_with_a_pluggable_allocator(pluggable):
    assert pluggable["profiler"] == "", pluggable


def test_the_finder_refuses_a_pluggable_allocator_with_a_sentence(pluggable):
    assert "BatchFinder" in pluggable["finder"], pluggable


def test_a_search_with_the_allocator_of_the_driver():
    """It has no snapshot, so a search cannot read whether there are CUDA graphs."""
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    found = on_stub("cuda_allocators", "of_driver", **settings)
    assert found == {"backend": "cudaMallocAsync", "error": ""}


def test_the_finder_refuses_an_allocator_without_a_cache():
    found = on_stub("cuda_allocators", "no_cache", PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    # Such an allocator counts nothing, so that a search measures 0 bytes at each size.
    require("BatchFinder" in found["error"] or set(found["peaks_mib"]) == {0}, found)
    assert "BatchFinder" in found["error"], found


def test_ragged_batches_leave_a_share_free_unless_segments_can_grow():
    found = on_stub("cuda_allocators", "ragged", CUDA_STUB_GIB="1")
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_STUB_GIB": "1"}
    expandable = on_stub("cuda_allocators", "ragged", **settings)
    for one in (found, expandable):
        assert (one["verified"], one["steps"]) == (True, 150), one
    (note,) = (note for note in found["notes"] if "expandable_segments:True about" in note)
    advised = int(note.rpartition("about ")[2].split()[0].replace(",", ""))
    assert found["size"] < advised, found
    # No note advises a setting that is in force.
    assert not any("expandable_segments" in note for note in expandable["notes"]), expandable
    assert expandable["size"] >= 0.95 * advised, (found, expandable)


def test_the_snapshot_is_read_once_and_without_events():
    found = on_stub("cuda_allocators", "snapshot")
    assert len(found["events"]) <= 1, found
    assert sum(found["events"]) == 0, found
