"""Collectives of the first of four ranks, where the others do not exist."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional

from lightning_batchmem.simulated_gpu.child import set_rank_variables
from lightning_batchmem.simulated_gpu.one_rank import MOST_BYTES, meet_nobody
from lightning_batchmem.simulated_gpu.values import Values
from tests.helpers.cuda_stub import print_case

RANKS = 4
OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)


def enter() -> list[str]:
    """Become the first rank; returns a list of what is refused."""
    refused: list[str] = []
    set_rank_variables(RANKS, RANKS)
    meet_nobody(RANKS, refused.append)
    Values(refused.append).enter()
    # Lightning names the device too.
    distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", 0))
    return refused


def values() -> dict[str, Any]:
    """What each collective gives for two values, or for one part for each rank."""
    enter()
    own = torch.tensor([2.0, 3.0], device="cuda")
    parts = torch.arange(2.0 * RANKS, device="cuda")
    found: dict[str, Any] = {}
    for name in OPERATIONS:
        reduced = own.clone()
        distributed.all_reduce(reduced, getattr(distributed.ReduceOp, name))
        found[name] = reduced.tolist()
    for dtype in DTYPES:
        reduced = own.to(dtype, copy=True)
        distributed.all_reduce(reduced)
        found[str(dtype)] = reduced.tolist()
    gathered = torch.empty(2 * RANKS, device="cuda")
    distributed.all_gather_into_tensor(gathered, own)
    found["all_gather_into_tensor"] = gathered.tolist()
    listed = [torch.empty(2, device="cuda") for _ in range(RANKS)]
    distributed.all_gather(listed, own)
    found["all_gather"] = [one.tolist() for one in listed]
    distributed.gather(own, listed)
    found["gather"] = [one.tolist() for one in listed]
    scattered = torch.empty(2, device="cuda")
    distributed.reduce_scatter_tensor(scattered, parts)
    found["reduce_scatter_tensor"] = scattered.tolist()
    distributed.reduce(own.clone(), dst=0)
    distributed.broadcast(own, src=0)
    found["broadcast"] = own.tolist()
    found["functional"] = functional.all_reduce(own, "sum", distributed.group.WORLD).tolist()
    found["functional gather"] = functional.all_gather_tensor(
        own, 0, distributed.group.WORLD
    ).tolist()
    distributed.gather(own, dst=1)
    uneven = [torch.zeros(2 + rank, device="cuda") for rank in range(RANKS)]
    distributed.all_gather(uneven, own)
    found["uneven"] = uneven[0].tolist()
    objects: list[Any] = [None] * RANKS
    distributed.all_gather_object(objects, {"rank": 0})
    found["objects"] = objects
    large: list[Any] = [None] * RANKS
    distributed.all_gather_object(large, b"x" * 3 * MOST_BYTES)
    found["bytes of large objects"] = [len(one) for one in large]
    received: list[Any] = [None]
    # As under DDP, where no backend has the tensors of the host.
    on_devices = distributed.new_group(backend="nccl")
    sent = [{"for": rank} for rank in range(RANKS)]
    distributed.scatter_object_list(received, sent, group=on_devices)
    found["scattered object"] = received
    scattered_part = torch.empty(2, device="cuda")
    distributed.scatter(scattered_part, list(parts.view(RANKS, 2).unbind()))
    found["scatter"] = scattered_part.tolist()
    on_host = torch.tensor([2.0])
    distributed.all_reduce(on_host)
    found["host"] = on_host.tolist()
    distributed.barrier()
    distributed.monitored_barrier(distributed.new_group(backend="gloo"))
    # Lightning calls it in this way, after `prepare_data`.
    distributed.new_group(backend="gloo").monitored_barrier()
    pair = torch.zeros(8, device="cuda")
    distributed.all_gather_into_tensor(pair[:4], own, group=distributed.new_group([0, 1]))
    found["of a pair"] = pair.tolist()
    others = distributed.new_group([1, 2])
    distributed.all_reduce(on_host, group=others)
    found["of others"] = on_host.tolist()
    return found


def unknown() -> dict[str, Any]:
    """Values of large tensors, and of weights, are not known after an exchange."""
    enter()
    large = torch.full((MOST_BYTES,), 7.0, device="cuda")
    distributed.all_reduce(large)
    weight = torch.nn.Parameter(torch.full((2,), 7.0, device="cuda"))
    gathered = torch.empty(2 * RANKS, device="cuda")
    distributed.all_gather_into_tensor(gathered, weight.detach() @ torch.ones(2, 2, device="cuda"))
    exchanged = torch.empty(RANKS, device="cuda")
    distributed.all_to_all_single(exchanged, torch.full((RANKS,), 7.0, device="cuda"))
    sent = torch.full((MOST_BYTES,), 7.0, device="cuda")
    distributed.all_gather_into_tensor(torch.empty(RANKS * MOST_BYTES, device="cuda"), sent)
    return {"large": large[0].item(), "exchanged": exchanged.tolist(), "sent": sent[0].item()}


def refused() -> dict[str, Any]:
    """What depends on the other ranks."""
    sentences = enter()
    own = torch.zeros(RANKS, device="cuda")
    distributed.all_to_all_single(torch.zeros(RANKS, device="cuda"), own)
    assert sentences == []
    distributed.all_to_all_single(
        torch.zeros(RANKS, device="cuda"), own, [1, 1, 2, 0], [0, 1, 1, 2]
    )
    distributed.send(own, 1)
    distributed.broadcast_object_list([None], src=1)
    distributed.scatter_object_list([None], src=RANKS - 1)
    return {"sentences": sentences}


def memory() -> dict[str, Any]:
    """What NCCL takes of the device: at the first exchange of each group of several ranks."""
    enter()
    free_bytes = [torch.cuda.mem_get_info()[0]]

    def note() -> None:
        free_bytes.append(torch.cuda.mem_get_info()[0])

    own = torch.zeros(1, device="cuda")
    note()
    distributed.all_reduce(own)
    note()
    distributed.all_reduce(own)
    note()
    half = distributed.new_group([0, 1])
    distributed.all_reduce(own, group=half)
    note()
    alone = distributed.new_group([0])
    distributed.all_reduce(own, group=alone)
    note()
    return {"taken_mib": [(free_bytes[1] - one) // 2**20 for one in free_bytes[1:]]}


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    print_case(globals())
