"""The phases of a step without Lightning."""

import pytest
import torch
from torch import nn

from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.loop.search import marked_phases


class Calls(PhasePeaks):
    """The phases in the order in which they begin, in a step that begins with forward."""

    def __init__(self, device):
        super().__init__(device)
        self.order = []

    def enter(self, phase):
        self.order.append(phase)
        super().enter(phase)


@pytest.fixture
def phases(device):
    return Calls(device)


@pytest.fixture
def run(phases):
    """Run a step as a search does; returns the phases in the order in which they begin."""

    def marked(step, *optimizers):
        phases.watch(optimizers)
        with marked_phases(phases, optimizers):
            phases.start("forward")
            step()
            peaks = phases.stop()
        phases.unwatch()
        assert set(peaks.phase_peak_bytes) == {"forward", *phases.order}
        return phases.order

    return marked


@pytest.fixture
def layer():
    return nn.Linear(2, 1)


@pytest.fixture
def optimizer(layer):
    return torch.optim.SGD(layer.parameters(), lr=0.1)


def loss_of(layer):
    return layer(torch.ones(3, 2)).mean()


BOTH = ["backward", "optimizer_step", "forward"]


def test_backward_and_the_step(run, layer, optimizer):
    def step():
        loss_of(layer).backward()
        optimizer.step()

    assert run(step, optimizer) == BOTH
    # Nothing is marked after the body.
    run_again = torch.autograd.backward
    step()
    assert torch.autograd.backward is run_again
    assert run_again.__module__ == "torch.autograd"


def test_two_optimizers(run, layer, optimizer):
    other = torch.optim.Adam(layer.parameters())

    def step():
        for one in (optimizer, other):
            torch.autograd.backward([loss_of(layer)])
            one.step()

    assert run(step, optimizer, other) == BOTH * 2


def test_micro_batches(run, layer, optimizer):
    def step():
        loss_of(layer).backward()
        loss_of(layer).backward()
        optimizer.step()

    assert run(step, optimizer) == ["backward", *BOTH]


def test_a_closure(run, layer):
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=2)

    def closure():
        loss = loss_of(layer)
        loss.backward()
        return loss

    def step():
        optimizer.step(closure=closure)
        # This pass belongs to the next step.
        loss_of(layer).backward()

    order = run(step, optimizer)
    assert order[:2] == ["backward", "optimizer_step"]
    assert order[-2:] == ["forward", "backward"]


def test_gradients_without_backward_are_part_of_forward(run, layer, optimizer):
    def step():
        parameters = list(layer.parameters())
        gradients = torch.autograd.grad(loss_of(layer), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    assert run(step, optimizer) == ["optimizer_step", "forward"]


def test_a_compiled_network_keeps_its_graph(run, layer, optimizer):
    compiled = torch.compile(layer, backend="eager", fullgraph=True)

    def step():
        loss_of(compiled).backward()
        optimizer.step()

    assert run(step, optimizer) == BOTH
    torch.compiler.reset()
