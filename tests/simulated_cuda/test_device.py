"""What the searches rely on: memory after a step, the order of states, and errors inside steps."""

import pytest
import torch

from benchmarks.large_networks import NETWORKS
from tests.helpers.simulated_cuda.device import SimulatedCuda
from tests.helpers.simulated_cuda.trace import trace_of

GB = 10**9
MLP = trace_of("MLP 8x4096 Adam")


# Tracing the others takes longest, and they have nothing that is not in these.
@pytest.mark.parametrize(
    "name",
    [
        *(network.name for network in NETWORKS if network.name != "GPT 12x768 AdamW"),
        "DCGAN 128 two Adams",
        "Recommender Adam",
    ],
)
def test_each_step_leaves_model_gradients_and_state(name):
    device = SimulatedCuda(trace_of(name), 80 * GB)
    model_bytes = device.requested
    device.train_step(4)
    bytes_after_first_step = device.requested
    device.train_step(6)
    device.evaluation_step(8)
    assert device.requested == bytes_after_first_step
    device.drop(device.trace.gradients | device.trace.states)
    assert device.requested == model_bytes


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
    probed.train_step(2)
    probed.release_cached()
    for _ in range(20):
        probed.train_step(385_000)
    assert probed.num_alloc_retries == 0
    training = SimulatedCuda(MLP, 80 * GB)
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
    device = SimulatedCuda(MLP, 8 * GB, expandable=expandable)
    with device.limit_enforced(1 * GB) as is_enforced:
        assert is_enforced is not expandable
        assert device.budget_bytes() == (8 if expandable else 1) * GB
    assert device.budget_bytes() == 8 * GB


def test_workspaces_put_the_bytes_of_a_step_off_a_line():
    trace = trace_of("ResNet-18 SGD workspaces")
    steps = [trace.events(size, "steady").values() for size in range(40, 80)]
    totals = [sum(size_bytes for phase in step for _, size_bytes in phase) for step in steps]
    assert any(a - 2 * b + c for a, b, c in zip(totals, totals[1:], totals[2:], strict=False))
