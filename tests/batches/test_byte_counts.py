"""Samples that a worker sends."""

import pickle

import pytest
import torch
from torch import nn

from lightning_batchmem.batches.byte_counts import pickled


def named(tensor):
    tensor.label = "of the user"
    return tensor


@pytest.mark.parametrize(
    "sample",
    [
        torch.arange(6).view(2, 3),
        torch.rand(2, 3),
        torch.tensor(3.0),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.rand(3).bfloat16(),
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(8)[::2],
        torch.rand(3, requires_grad=True),
        torch.rand(3, dtype=torch.complex64).conj(),
        nn.Parameter(torch.rand(2)),
        named(torch.rand(2)),
        torch.rand(2, 2).to_sparse(),
    ],
)
def test_a_tensor_is_as_before(sample):
    loaded = pickle.loads(pickled({"x": [sample]}))["x"][0]
    assert type(loaded) is type(sample)
    assert (loaded.dtype, loaded.requires_grad) == (sample.dtype, sample.requires_grad)
    assert torch.equal(loaded.to_dense(), sample.to_dense())
    assert vars(loaded) == vars(sample)
    if sample.layout is torch.strided:
        assert loaded.stride() == sample.stride()
        # A batch may be written to.
        loaded.detach().zero_()


def test_plain_tensors_are_small():
    assert len(pickled(torch.zeros(4))) < 250
