"""cuDNN's attention is compiled for a bounded number of shapes; here with another operator."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_batchmem.simulated_gpu.assumptions import MOST_SHAPES, CudnnAttention

aten = torch.ops.aten


def test_shapes_are_counted_once_and_bounded(capsys):
    sentences = []
    attention = CudnnAttention(sentences)
    # The context manager restores the switch.
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        for _ in range(2):
            for size in range(1, MOST_SHAPES):
                found = attention.count(aten.exp.default, (torch.zeros(size),), {})
                # It runs as any other operator.
                assert found is NotImplemented
        assert torch.backends.cuda.cudnn_sdp_enabled()
        assert sentences == []
        for size in (MOST_SHAPES, MOST_SHAPES + 1):
            attention.count(aten.exp.default, (torch.zeros(size),), {})
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert sentences == [
        f"cuDNN's attention was compiled for {MOST_SHAPES} shapes, and all others ran on"
        " PyTorch's own kernels"
    ]
    assert capsys.readouterr().err.count("cuDNN compiles its attention") == 1


def test_another_type_or_layout_is_another_shape(capsys):
    attention = CudnnAttention([])
    tensors = [torch.zeros(4, 6), torch.zeros(6, 4).T, torch.zeros(4, 6).half()]
    for tensor in tensors:
        attention.count(aten.sum.dim_IntList, (tensor, [1]), {})
    attention.count(aten.sum.dim_IntList, (tensors[0], [0]), {})
    assert len(attention._compiled) == 4
