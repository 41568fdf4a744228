"""CUDA graphs, whose memory the allocator counts as free between two replays."""

from __future__ import annotations

import sys

import torch


def replays_graphs(device: torch.device) -> bool:
    """Whether ``torch.compile`` has recorded CUDA graphs on a device.

    Their memory lies in private pools of the allocator. A replay allocates nothing, so counters of
    allocated bytes miss it. Reserved bytes have it.
    """
    # The module is private in torch 2.5.1 to 2.14, and is imported when the first graph is made.
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or device.type != "cuda":
        return False
    return trees.get_manager(device.index, create_if_none_exists=False) is not None
