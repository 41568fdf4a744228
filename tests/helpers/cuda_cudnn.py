"""Cases of ``tests/gpu/test_cuda_cudnn.py``: what cuDNN plans for the device of the stub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.helpers.cuda_stub import print_case


def peak_bytes(run: Callable[[], object]) -> int:
    """Bytes of the highest peak of a call, above what was allocated before it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def convolution() -> dict[str, Any]:
    """Peaks of two steps of a convolution, of which each has its three directions."""
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda")
    images = torch.empty(16, 64, 56, 56, device="cuda", requires_grad=True)

    def step() -> None:
        layer(images).sum().backward()

    step()
    return {
        "steps": [peak_bytes(step), peak_bytes(step)],
        "is_on": torch.backends.cudnn.enabled,
    }


def recurrent_and_normalized() -> dict[str, Any]:
    """Whether layers that cuDNN cannot plan without a device run, and leave the switch as it is."""
    inputs = torch.empty(12, 4, 8, device="cuda", requires_grad=True)
    for layer in (nn.LSTM(8, 8), nn.GRU(8, 8, bidirectional=True), nn.RNN(8, 8)):
        layer.to("cuda")(inputs)[0].sum().backward()
    nn.LSTMCell(8, 8).to("cuda")(inputs[0])
    images = torch.empty(4, 8, 6, 6, device="cuda", requires_grad=True)
    for layer in (nn.BatchNorm2d(8), nn.InstanceNorm2d(8, affine=True, track_running_stats=True)):
        layer.to("cuda")
        for mode in (True, False):
            layer.train(mode)(images).sum().backward()
        layer(images.detach().to(memory_format=torch.channels_last))
    grid = torch.empty(4, 3, 3, 2, device="cuda")
    functional.grid_sample(images, grid, align_corners=True).sum().backward()
    lengths = torch.full((4,), 12)
    classes = torch.empty(12, 4, 8, device="cuda", requires_grad=True).log_softmax(2)
    labels = torch.ones(4 * 3, dtype=torch.int32)
    functional.ctc_loss(classes, labels, lengths.int(), torch.full((4,), 3).int()).backward()
    return {"is_on": torch.backends.cudnn.enabled}


def attention() -> dict[str, Any]:
    """Whether torch prefers cuDNN's attention, and whether it runs in both directions."""
    query = torch.empty(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    # A private name in torch 2.5 to 2.14; it returns an SDPBackend.
    choice = torch._fused_sdp_choice(query, query, query, is_causal=True)
    cudnn = int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value)
    return {"prefers_cudnn": choice == cudnn, "has_gradient": query.grad is not None}


def older_interface() -> dict[str, Any]:
    """A function of cuDNN with a handle, which ends the process."""
    torch._C._set_cudnn_enabled(True)
    torch.cudnn_grid_sampler(
        torch.empty(1, 1, 4, 4, device="cuda"), torch.empty(1, 4, 4, 2, device="cuda")
    )
    return {}


def scripted() -> dict[str, Any]:
    """TorchScript calls the operator itself, which ends the process."""
    layer = torch.jit.script(nn.BatchNorm2d(8)).to("cuda")
    layer(torch.empty(4, 8, 6, 6, device="cuda"))
    return {}


CASES = {
    "scripted": scripted,
    "convolution": convolution,
    "recurrent_and_normalized": recurrent_and_normalized,
    "attention": attention,
    "older_interface": older_interface,
}

if __name__ == "__main__":
    print_case(CASES)
