from __future__ import annotations

import pytest
import torch

from tests.simulated_cuda.device import SimulatedCuda
from tests.simulated_cuda.networks import NETWORKS, Network
from tests.simulated_cuda.oracle import largest_quiet, largest_trained, trains
from tests.simulated_cuda.trace import _record, trace_of, workspace_share

GB = 10**9
MLP, GPT, RESNET = "MLP 8x4096 Adam", "GPT 12x768 AdamW", "ResNet-18 SGD"


def with_model(name: str, capacity_bytes: int, **options: bool) -> SimulatedCuda:
    device = SimulatedCuda(trace_of(name), capacity_bytes, **options)
    device.load_model()
    return device


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_storages_at_a_size_that_was_not_recorded(network: Network) -> None:
    trace, size = trace_of(network.name), 11
    first, steady, evaluation = _record(network, size)[3]
    programs = [(first, {"steady": False}), (steady, {}), (evaluation, {"evaluation": True})]
    for program, options in programs:
        for phase, pairs in trace.events(size, **options).items():
            expected = []
            for slot, size_bytes, convolution in program[phase]:
                if convolution is None:
                    expected.append((slot, size_bytes))
                elif share := workspace_share(convolution, size):
                    expected += [(slot, int(share * size_bytes)), (slot, 0)]
            assert pairs == expected


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_each_step_leaves_model_gradients_and_state(network: Network) -> None:
    device = with_model(network.name, 80 * GB)
    model_bytes = device.current().requested_bytes
    device.train_step(4)
    assert device.has_optimizer_state()
    after_first = device.current().requested_bytes
    device.train_step(6)
    device.reset_peak()
    device.train_step(5)
    assert device.peak().requested_bytes == device.trace.peak_bytes(5)
    device.evaluation_step(8)
    assert device.current().requested_bytes == after_first
    device.drop_gradients()
    device.drop_optimizer_state()
    assert device.current().requested_bytes == model_bytes


def test_step_of_the_mlp_by_hand() -> None:
    # SGD has one state and Adam two; foreach Adam also takes one temporary copy of the parameters.
    parameters_bytes = 8 * (4096 * 4096 + 4096) * 4
    assert trace_of(MLP).peak_bytes(1) - 5 * parameters_bytes in range(4096 * 4 * 10)
    device = with_model(MLP, 80 * GB)
    assert device.current().requested_bytes == parameters_bytes
    device.train_step(1)
    assert device.current().requested_bytes == 4 * parameters_bytes


def test_replay_until_nothing_changes_equals_the_full_replay() -> None:
    short, full = with_model(RESNET, 8 * GB), with_model(RESNET, 8 * GB)
    short.train_steps(340, 40)
    for _ in range(40):
        full.train_step(340)
    assert short.num_steps < full.num_steps
    assert (short.current(), short.allocator.state()) == (full.current(), full.allocator.state())


def test_size_that_fits_with_state_created_first_fails_in_training() -> None:
    # https://github.com/pytorch/pytorch/issues/35901
    size, capacity_bytes = 76, 80 * GB
    probed, training = with_model(GPT, capacity_bytes), with_model(GPT, capacity_bytes)
    probed.train_step(2)
    probed.release_cached()
    assert probed.train_steps(size, 20) == 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        training.train_steps(size, 20)


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
    device.drop_gradients()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        device.train_step(1)
    device.fresh()
    assert (device.current().reserved_bytes, device.counters()["num_ooms"]) == (0, 0)


def test_limit_is_enforced_and_restored() -> None:
    device = with_model(RESNET, 8 * GB)
    with device.limit_enforced(1 * GB) as enforced:
        assert enforced
        assert device.budget_bytes() == 1 * GB
        with pytest.raises(torch.cuda.OutOfMemoryError):
            device.train_step(64)
    assert device.budget_bytes() == 8 * GB
    assert device.train_steps(64, 2) == 0
    with SimulatedCuda(trace_of(RESNET), 8 * GB, expandable=True).limit_enforced(1 * GB) as enforced:
        assert not enforced


def test_memory_of_others_lowers_the_budget() -> None:
    device = SimulatedCuda(trace_of(RESNET), 8 * GB, used_by_others_bytes=1 * GB)
    assert (device.budget_bytes(), device.non_torch_bytes()) == (7 * GB, 1 * GB)


@pytest.mark.parametrize("name", [RESNET, "ResNet-18 SGD workspaces"])
def test_largest_sizes_are_boundaries(name: str) -> None:
    trace = trace_of(name)
    trained, quiet = largest_trained(trace, 8 * GB), largest_quiet(trace, 8 * GB)
    device = SimulatedCuda(trace, 8 * GB)
    assert trains(device, trained)
    assert not trains(device, trained + 1)
    assert trains(device, quiet, quietly=True)
    assert 0.85 * trained < quiet <= trained
    assert largest_trained(trace, 7 * GB) < trained


def test_workspaces_change_with_the_size() -> None:
    assert {workspace_share(0, size) for size in range(1, 100)} == {0.0, 0.25, 1.0, 2.0}
    peaks = [trace_of("ResNet-18 SGD workspaces").peak_bytes(size) for size in range(20, 100)]
    assert sorted(peaks) != peaks
