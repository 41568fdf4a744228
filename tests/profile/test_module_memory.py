"""The memory of a step by module, from numbers that can be computed by hand."""

import pytest
import torch
from torch import nn

from lightning_batchmem.profile.module_memory import ModuleBytes
from tests.helpers.measured_modules import Checkpointed, Twice

HOST = torch.device("cpu")


class Tied(nn.Module):
    """The head has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, batch):
        return self.head(self.embedding(batch)).square().mean()


def measured(module, batch, peak_bytes=None):
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        counted = ModuleBytes(module, HOST, [batch])
        if step == 1:
            counted.begin()
        loss = module(batch)
        counted.end_forward()
        loss.backward()
        optimizer.step()
    peak = counted.peak([optimizer], peak_bytes, 8)
    return peak, {module.name: module for module in peak.modules}


def test_activations_belong_to_the_module_that_saves_them():
    peak, by_name = measured(Twice(), torch.ones(512, 64), peak_bytes=2**20)
    size = 512 * 64 * 4
    # The linear layer saves its input, which is the batch or what the activation function has made.
    assert by_name["body.0"].activations_bytes == size
    # The activation function saves its input twice, and the square saves its last output.
    assert by_name["body.1"].activations_bytes == 2 * size
    assert by_name[""].activations_bytes == size
    weights = (64 * 64 + 64) * 4
    layer = by_name["body.0"]
    assert layer.parameters_bytes == layer.gradients_bytes == layer.optimizer_state_bytes == weights
    assert peak.other_bytes == 2**20 - 3 * weights - 4 * size


def test_a_checkpointed_block_keeps_only_its_input():
    _, by_name = measured(Checkpointed(blocks=3), torch.ones(2048, 64))
    assert all(module.activations_bytes == 0 for name, module in by_name.items() if name)


def test_a_weight_of_two_modules_counts_once():
    _, by_name = measured(Tied(), torch.zeros(8, 4, dtype=torch.int64))
    assert by_name["embedding"].parameters_bytes == 50 * 32 * 4
    assert "head" not in by_name or by_name["head"].parameters_bytes == 0
    assert by_name["embedding"].gradients_bytes == 50 * 32 * 4


@pytest.mark.parametrize("ends", [1, 2])
def test_nothing_stays_behind(ends):
    module = Twice()
    counted = ModuleBytes(module, HOST, None)
    counted.begin()
    for _ in range(ends):
        counted.end_forward()
    loss = module(torch.ones(2, 64))
    assert counted.peak([], None, None).modules[-1].activations_bytes == 0
    loss.backward()


def test_a_gradient_may_take_the_place_of_an_activation():
    module = nn.Linear(4, 4, bias=False)
    counted = ModuleBytes(module, HOST, None)
    counted.begin()
    saved = torch.ones(4, 4, requires_grad=True)
    saved.square()
    counted.end_forward()
    # An allocator reuses the addresses of activations that backward has freed.
    module.weight.grad = saved.detach()
    (found,) = counted.peak([], None, None).modules
    assert (found.activations_bytes, found.gradients_bytes) == (64, 64)
