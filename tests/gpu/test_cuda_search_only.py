"""A search by itself, and then a training at its size, on two ranks with gloo."""

import signal
from importlib.util import find_spec

import pytest

from tests.helpers.cuda_search_only import KILLED_ABOVE, RANKS, SAMPLES, WAYS
from tests.helpers.cuda_stub import needs_stub, on_stub

pytestmark = needs_stub

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs DeepSpeed, the extra `deepspeed`"
)
PEAK_SHARE = 0.03


def way(name):
    return pytest.param(name, marks=[needs_deepspeed] if "deepspeed" in name else [])


def search_and_train(folder, name, case="", ranks=RANKS):
    """Search and train; returns what was found, after the checks that hold in every case."""
    settings = {"CUDA_STUB_DEVICES": str(ranks), "CUDA_STUB_GIB": "3"}
    # What DeepSpeed asks for where no compiler of CUDA is found.
    settings |= {"DS_IGNORE_CUDA_DETECTION": "1", "DS_SKIP_CUDA_CHECK": "1"}
    result = on_stub("cuda_search_only", str(folder), name, case, str(ranks), **settings)
    last = result["starts"][-1]
    assert last["codes"] == [0] * ranks, last["outputs"]
    # No rank went on behind `fit`, and no trials are left.
    assert result["left"] == [*(f"{rank}.out" for rank in range(ranks)), "plan.json"]
    plan = result["plan"]
    assert (plan["verified"], plan["limited_by"]) == (True, "memory")
    assert result["training"]["codes"] == [0] * ranks, result["training"]["outputs"]
    peaks = [one["trained_mib"] for one in result["found"]]
    expected_mib = plan["rehearsed_mib"] + plan["buckets_mib"]
    assert max(peaks) == pytest.approx(expected_mib, rel=PEAK_SHARE)
    # Nothing enforces the limit of the package in the training: more would be an allocator's error.
    assert max(peaks) <= 1.01 * plan["limit_mib"]
    assert [one["size"] for one in result["found"]] == [plan["size"]] * ranks
    return result


def steps_of(size, ranks=RANKS):
    return 2 * -(-SAMPLES // (size * ranks))


@pytest.mark.parametrize("name", [way(name) for name in WAYS if "offload" not in name])
def test_a_size_that_a_search_by_itself_finds_trains_within_the_limit(name, tmp_path):
    result = search_and_train(tmp_path, name)
    steps = steps_of(result["plan"]["size"])
    assert [one["steps"] for one in result["found"]] == [steps] * RANKS


@needs_deepspeed
def test_one_process_that_offloads_its_optimizer(tmp_path):
    search_and_train(tmp_path, "deepspeed 2, offload", ranks=1)


@pytest.mark.parametrize("name", ["fsdp2", way("deepspeed 3")])
def test_a_search_goes_on_behind_a_size_in_which_a_rank_was_killed(name, tmp_path):
    result = search_and_train(tmp_path, name, "killed")
    killed = result["starts"][0]
    assert killed["codes"][-1] == -signal.SIGKILL
    assert killed["codes"][0] not in (0, -signal.SIGKILL), killed["outputs"]
    assert len(result["starts"]) > 1
    (size, *_) = result["plan"]["out_of_memory"]
    assert size > KILLED_ABOVE
    assert result["plan"]["size"] < size


@needs_deepspeed
def test_gradient_accumulation_of_deepspeed(tmp_path):
    search_and_train(tmp_path, "deepspeed 2", "accumulate")
