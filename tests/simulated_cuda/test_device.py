import pytest
import torch

from benchmarks.large_networks import NETWORKS
from tests.simulated_cuda.device import SimulatedCuda
from tests.simulated_cuda.search import search
from tests.simulated_cuda.trace import fit, trace_of, workspace_share

GB = 10**9
MLP = trace_of("MLP 8x4096 Adam")
RESNET = trace_of("ResNet-18 SGD")


@pytest.mark.parametrize(
    "name", [network.name for network in NETWORKS if network.name != "GPT 12x768 AdamW"]
)
def test_each_step_leaves_model_gradients_and_state(name):
    device = SimulatedCuda(trace_of(name), 80 * GB)
    model_bytes = device.requested
    device.train_step(4)
    after_first = device.requested
    device.train_step(6)
    device.evaluation_step(8)
    assert device.requested == after_first
    device.drop(device.trace.gradients | device.trace.states)
    assert device.requested == model_bytes


def test_storages_are_affine_in_the_size():
    programs = [{"forward": [(7, 100 + 8 * size, None)]} for size in (2, 3, 5)]
    assert fit(programs) == {"forward": [(7, (100, 8), None)]}
    for other in ((7, 141, None), (8, 140, None)):
        with pytest.raises(AssertionError, match="forward"):
            fit([*programs[:2], {"forward": [other]}])


def test_step_of_the_mlp_by_hand():
    # A step leaves parameters, gradients and two states. Foreach Adam also takes one temporary copy
    # of the parameters.
    parameters_bytes = 8 * (4096 * 4096 + 4096) * 4
    device = SimulatedCuda(MLP, 80 * GB)
    assert device.requested == parameters_bytes
    device.train_step(1)
    assert device.requested == 4 * parameters_bytes
    device.train_step(1)
    assert 0 <= device.peak().requested_bytes - 5 * parameters_bytes <= 10 * 4096 * 4


def test_size_that_fits_with_state_created_first_fails_in_training():
    # Source: https://github.com/pytorch/pytorch/issues/35901
    probed = SimulatedCuda(MLP, 80 * GB)
    training = SimulatedCuda(MLP, 80 * GB)
    probed.train_step(2)
    probed.release_cached()
    for _ in range(20):
        probed.train_step(385_000)
    assert probed.num_alloc_retries == 0
    training.train_step(385_000)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        training.train_step(385_000)


def test_out_of_memory_error_releases_the_step_and_keeps_part_of_adams_state():
    device = SimulatedCuda(MLP, 2 * GB)
    model_bytes = device.requested
    with pytest.raises(torch.cuda.OutOfMemoryError):
        device.train_step(1)
    assert 2 * model_bytes < device.requested < 4 * model_bytes
    with pytest.raises(KeyError):
        device.train_step(1)
    device.drop(device.trace.states)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        device.train_step(1)
    assert device.counters()["num_ooms"] == 2


@pytest.mark.parametrize("expandable", [False, True])
def test_limit_is_enforced_and_restored_without_expandable_segments(expandable):
    device = SimulatedCuda(RESNET, 8 * GB, expandable=expandable)
    expected = (False, 8 * GB) if expandable else (True, 1 * GB)
    with device.limit_enforced(1 * GB) as is_enforced:
        assert (is_enforced, device.budget_bytes()) == expected
    assert device.budget_bytes() == 8 * GB


def test_workspaces_change_with_the_size():
    assert {workspace_share(0, size) for size in range(1, 100)} == {0, 0.25, 1, 2}
    steps = [trace_of("ResNet-18 SGD workspaces").events(size, "steady") for size in range(40, 80)]
    totals = [
        sum(size_bytes for phase in step.values() for _, size_bytes in phase) for step in steps
    ]
    # The totals are not on one line.
    assert any(a - 2 * b + c for a, b, c in zip(totals, totals[1:], totals[2:], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quiet"),
    [("U-Net 256 AdamW", 17), ("GPT 12x768 AdamW bf16", 5), ("ResNet-18 SGD", 276)],
)
def test_a_search_finds_nearly_the_largest_size_that_trains_quietly(name, quiet):
    found = search(SimulatedCuda(trace_of(name), 8 * GB), memory_limit=0.9)
    assert found.trains
    assert found.num_ooms <= 2
    assert found.sizes <= 8
    assert found.steps_at_size <= 40
    assert found.plan.batch_size >= min(0.93 * quiet, quiet - 1)
