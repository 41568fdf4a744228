"""Traces of checkpointed blocks, of two optimizers, and of tables that fill the device."""

from collections import Counter
from functools import partial

import pytest
import torch

from benchmarks.held_out_networks import HELD_OUT_NETWORKS, checkpointed_gpt
from benchmarks.large_networks import TransformerBlock
from tests.helpers.simulated_cuda.device import SimulatedCuda
from tests.helpers.simulated_cuda.trace import Trace, trace_of

GB = 10**9
BY_NAME = {network.name: network for network in HELD_OUT_NETWORKS}
GPT = BY_NAME["Checkpointed GPT 6x1024 AdamW"]
GAN = "DCGAN 128 two Adams"


def trace_of_gpt(layers):
    return Trace(GPT._replace(module=partial(checkpointed_gpt, layers, 1000)))


@pytest.fixture(scope="module")
def checkpointed():
    return [trace_of_gpt(layers) for layers in (2, 3)]


def bytes_of_step(trace, size):
    """Requested bytes after the forward pass, and at the peak of the backward pass.

    Both are without the bytes before the step.
    """
    device = SimulatedCuda(trace, 80 * GB)
    device.train_step(size)
    device.drop(trace.gradients)
    start_bytes = device.requested
    device.begin_step(size)
    device.run_phase("forward")
    forward_bytes = device.requested
    device.reset_peak()
    device.run_phase("backward")
    return forward_bytes - start_bytes, device.peak().requested_bytes - start_bytes


def test_a_checkpointed_block_keeps_its_input_and_computes_the_rest_again(checkpointed):
    size = 4
    input_bytes = size * 1024 * 1024 * 4
    scores_bytes = size * 16 * 1024 * 1024 * 4
    (forward, peak), (forward_of_more, peak_of_more) = (
        bytes_of_step(t, size) for t in checkpointed
    )
    assert forward_of_more - forward == input_bytes
    # One block at a time has its scores again, several of that size at once.
    assert peak > forward + 3 * scores_bytes
    parameters_bytes = sum(checkpointed[1].persistent_bytes) - sum(checkpointed[0].persistent_bytes)
    assert peak_of_more - peak <= input_bytes + parameters_bytes


def test_the_backward_pass_of_checkpointed_blocks_has_the_storages_of_plain_ones_twice(
    checkpointed, monkeypatch
):
    monkeypatch.setattr("benchmarks.held_out_networks.Checkpointed", TransformerBlock)
    plain = trace_of_gpt(2)
    sizes = {}
    for name, trace in (("plain", plain), ("checkpointed", checkpointed[0])):
        for phase in ("forward", "backward"):
            events = trace.events(4, "steady")[phase, 0]
            sizes[name, phase] = Counter(size_bytes for _, size_bytes in events if size_bytes)
    assert sizes["checkpointed", "forward"] == sizes["plain", "forward"]
    again = sizes["checkpointed", "backward"] - sizes["plain", "backward"]
    scores_bytes = 4 * 16 * 1024 * 1024 * 4
    assert again[scores_bytes] == sizes["plain", "forward"][scores_bytes]
    assert not again - sizes["plain", "forward"]


def test_each_of_two_optimizers_has_its_gradients_and_states():
    device = SimulatedCuda(trace_of(GAN), 80 * GB)
    with torch.device("meta"):
        generator, discriminator = device.trace.network.module().children()
    generator_bytes = sum(parameter.nbytes for parameter in generator.parameters())
    discriminator_bytes = sum(parameter.nbytes for parameter in discriminator.parameters())
    model_bytes = device.requested
    images_bytes = 4 * 3 * 128 * 128 * 4
    for number in range(2):
        if number == 0:
            device.begin_step(4)
        for phase in ("forward", "backward", "optimizer_step"):
            device.run_phase(phase, number)
        # The gradients and two states of each optimizer remain, and the images until the end.
        if number == 0:
            assert device.requested == model_bytes + 3 * generator_bytes + images_bytes
    assert device.requested == model_bytes + 3 * (generator_bytes + discriminator_bytes)


def test_an_error_in_the_step_of_the_second_optimizer_leaves_the_states_of_the_first():
    trace = trace_of(GAN)
    reference = SimulatedCuda(trace, 80 * GB)
    reference.begin_step(64)
    for phase in ("forward", "backward", "optimizer_step"):
        reference.run_phase(phase, 0)
    device = SimulatedCuda(trace, 80 * GB)
    model_bytes = device.requested
    device.limit_bytes = reference.reserved
    # The discriminator has two batches, and needs more than the generator.
    with pytest.raises(torch.cuda.OutOfMemoryError):
        device.train_step(64)
    images_bytes = 64 * 3 * 128 * 128 * 4
    assert device.requested == reference.requested - images_bytes > model_bytes
    device.limit_bytes = 80 * GB
    device.train_step(2)
    device.train_step(2)
    for phase in ("forward", "backward", "optimizer_step"):
        reference.run_phase(phase, 1)
    assert device.requested == reference.requested


@pytest.mark.parametrize("gigabytes", [8, 80])
def test_parameters_and_states_of_the_recommender_fill_most_of_the_device(gigabytes):
    trace = trace_of("Recommender Adam", gigabytes)
    device = SimulatedCuda(trace, gigabytes * GB)
    device.train_step(2)
    device.drop(trace.gradients)
    assert 0.75 <= device.requested / device.capacity_bytes <= 0.9


@pytest.mark.parametrize("gigabytes", [8, 80])
@pytest.mark.parametrize("name", ["Recommender Adam", "DLRM 26 tables Adam"])
def test_the_optimizer_step_of_large_tables_needs_most_of_the_device(name, gigabytes):
    device = SimulatedCuda(trace_of(name, gigabytes), gigabytes * GB)
    device.train_step(2)
    device.train_step(2)
    assert 0.8 <= device.peak().requested_bytes / device.capacity_bytes <= 0.9
