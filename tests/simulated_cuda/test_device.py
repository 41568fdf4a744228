from __future__ import annotations

import pytest
import torch

from tests.simulated_cuda.device import SimulatedCuda
from tests.simulated_cuda.networks import NETWORKS, Network
from tests.simulated_cuda.oracle import largest_quiet, largest_trained, trains
from tests.simulated_cuda.trace import fit, trace_of, workspace_share

GB = 10**9
MLP, RESNET, WORKSPACES = "MLP 8x4096 Adam", "ResNet-18 SGD", "ResNet-18 SGD workspaces"


def with_model(name: str, capacity_bytes: int) -> SimulatedCuda:
    device = SimulatedCuda(trace_of(name), capacity_bytes)
    device.load_model()
    return device


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_each_step_leaves_model_gradients_and_state(network: Network) -> None:
    device = with_model(network.name, 80 * GB)
    model_bytes = device.current().requested_bytes
    device.train_step(4)
    after_first = device.current().requested_bytes
    device.train_step(6)
    device.reset_peak()
    device.train_step(5)
    assert device.peak().requested_bytes == device.trace.peak_bytes(5)
    device.evaluation_step(8)
    assert device.has_optimizer_state()
    assert device.current().requested_bytes == after_first
    device.drop_gradients()
    device.drop_optimizer_state()
    assert device.current().requested_bytes == model_bytes


def test_storages_are_affine_in_the_size() -> None:
    programs = [{"forward": [(7, 100 + 8 * size, None)]} for size in (2, 3, 5)]
    assert fit(programs) == {"forward": [(7, 100, 8, None)]}
    for other in ((7, 141, None), (8, 140, None)):
        with pytest.raises(AssertionError, match="forward"):
            fit([*programs[:2], {"forward": [other]}])


def test_step_of_the_mlp_by_hand() -> None:
    # Parameters, gradients and two states; foreach Adam also takes one temporary copy of the parameters.
    parameters_bytes = 8 * (4096 * 4096 + 4096) * 4
    assert 0 <= trace_of(MLP).peak_bytes(1) - 5 * parameters_bytes <= 10 * 4096 * 4
    device = with_model(MLP, 80 * GB)
    assert device.current().requested_bytes == parameters_bytes
    device.train_step(1)
    assert device.current().requested_bytes == 4 * parameters_bytes


def test_size_that_fits_with_state_created_first_fails_in_training() -> None:
    # https://github.com/pytorch/pytorch/issues/35901
    probed, training = with_model(MLP, 80 * GB), with_model(MLP, 80 * GB)
    probed.train_step(2)
    probed.release_cached()
    assert probed.train_steps(385_000, 20) == 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        training.train_steps(385_000, 20)


def test_out_of_memory_error_releases_the_step_and_keeps_part_of_adams_state() -> None:
    device = with_model(MLP, 2 * GB)
    model_bytes = device.current().requested_bytes
    with pytest.raises(torch.cuda.OutOfMemoryError):
        device.train_step(1)
    assert device.counters()["num_ooms"] == 1
    assert 2 * model_bytes < device.current().requested_bytes < 4 * model_bytes
    with pytest.raises(KeyError):
        device.train_step(1)
    device.drop_optimizer_state()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        device.train_step(1)
    device.fresh()
    assert (device.current().reserved_bytes, device.counters()["num_ooms"]) == (0, 0)


def test_limit_is_enforced_and_restored() -> None:
    device = with_model(RESNET, 8 * GB)
    model_bytes = device.current().requested_bytes
    with device.limit_enforced(1 * GB) as enforced:
        assert enforced
        assert device.budget_bytes() == 1 * GB
        with pytest.raises(torch.cuda.OutOfMemoryError):
            device.train_step(64)
    device.drop_gradients()
    assert device.current().requested_bytes == model_bytes
    assert device.budget_bytes() == 8 * GB
    assert device.train_steps(64, 2) == 0
    with SimulatedCuda(trace_of(RESNET), 8 * GB, expandable=True).limit_enforced(1 * GB) as enforced:
        assert not enforced


def test_memory_of_others_lowers_the_budget() -> None:
    device = SimulatedCuda(trace_of(RESNET), 8 * GB, used_by_others_bytes=1 * GB)
    assert (device.budget_bytes(), device.non_torch_bytes()) == (7 * GB, 1 * GB)


def test_largest_sizes_are_boundaries() -> None:
    trace, device = trace_of(RESNET), SimulatedCuda(trace_of(RESNET), 8 * GB)
    trained, quiet = largest_trained(trace, 8 * GB, num_steps=8), largest_quiet(trace, 8 * GB, num_steps=8)
    assert [trains(device, size, num_steps=8) for size in (trained, trained + 1)] == [True, False]
    assert [trains(device, size, quietly=True, num_steps=8) for size in (quiet, trained)] == [True, False]


def test_workspaces_change_with_the_size() -> None:
    assert {workspace_share(0, size) for size in range(1, 100)} == {0, 0.25, 1, 2}
    steps = [trace_of(WORKSPACES).events(size) for size in range(40, 80)]
    totals = [sum(size_bytes for phase in step.values() for _, size_bytes in phase) for step in steps]
    assert any(a - 2 * b + c for a, b, c in zip(totals, totals[1:], totals[2:], strict=False))  # not on one line
