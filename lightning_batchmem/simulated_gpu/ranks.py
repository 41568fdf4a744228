"""The ranks of a training of which the first one runs, and what their weights take."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_batchmem._lightning.strategies import exchanges_buckets, has_engine
from lightning_batchmem.devices.tensors import bytes_of
from lightning_batchmem.plan.records import mib
from lightning_batchmem.search.ranks import Ranks


class EqualRanks(Ranks):
    """The first of many ranks, which all hold what it holds, and do not exist.

    Args:
        size: how many ranks there are.
        ends_together: whether an error in a step ends the process.
    """

    def __init__(self, size: int, *, ends_together: bool) -> None:
        super().__init__(0, size, goes_on=True)
        self.ends_together = ends_together

    def on_this_host(self) -> int:
        """This process only: the memory of this host is not that of a node."""
        return 1

    def _gather(self, failure: str | None, value: Any) -> list[Any]:
        return [(failure, value)] * self.size


class GatheredWeights:
    """The weights that a rank has gathered in forward, and frees in backward.

    Args:
        model: returns the network, as the strategy has wrapped it.
        ranks: how many ranks share its weights.
    """

    def __init__(self, model: Callable[[], torch.nn.Module], ranks: int) -> None:
        self._model = model
        self._ranks = ranks
        self._backward = torch.autograd.backward
        self.most_bytes = 0
        # All weights, on all ranks.
        self._whole_bytes = 0

    def backward(self, *arguments: Any, **keywords: Any) -> None:
        """Run ``torch.autograd.backward``, and measure before and after."""
        before = self._bytes_by_name()
        self._backward(*arguments, **keywords)
        after = self._bytes_by_name()
        gathered = [count for name, count in before.items() if count > after.get(name, 0)]
        self.most_bytes = max(self.most_bytes, sum(gathered))
        self._whole_bytes = self._ranks * sum(after.values())

    def _bytes_by_name(self) -> dict[str, int]:
        model = self._model()
        found = {name: bytes_of([weight]) for name, weight in model.named_parameters()}
        # FSDP1 shows its shards again after forward, even where it keeps what it has gathered.
        # These names are private in torch 2.13 and 2.14.
        for number, part in enumerate(FullyShardedDataParallel.fsdp_modules(model)):
            flat = getattr(part._handle, "flat_param", None)
            gathered = getattr(flat, "_full_param_padded", None)
            if gathered is not None:
                found[f"gathered {number}"] = gathered.untyped_storage().nbytes()
        return found

    @property
    def notes(self) -> list[str]:
        """A sentence if most weights stay gathered."""
        if 2 * self.most_bytes <= self._whole_bytes:
            return []
        return [
            f"Gathered weights of {mib(self.most_bytes)} stay from forward to backward. If you do"
            " not want that, shard the layers (auto_wrap_policy under FSDP1), and then the whole"
            " module too (fully_shard(model) under FSDP2)."
        ]


def notes_about_ranks(trainer: Trainer) -> list[str]:
    """What is assumed of the other ranks; nothing where there is one."""
    if trainer.world_size == 1:
        return []
    notes = ["Rank 0 ran, and the others are taken to be equal to it."]
    if has_engine(trainer):
        notes.append("Under DeepSpeed another rank may need 4 % more than rank 0.")
    if exchanges_buckets(trainer):
        notes.append(
            "DDP may hold its buckets of gradients twice for a moment, and the search leaves room"
            " for one copy."
        )
    return notes


def found_world(trainer: Trainer, gathered: GatheredWeights) -> dict[str, Any] | None:
    """The ranks, and what NCCL has taken; ``None`` for one rank."""
    if trainer.world_size == 1:
        return None
    nccl_bytes = ctypes.CDLL(None).cuda_stub_nccl_bytes
    nccl_bytes.restype = ctypes.c_size_t
    return {
        "devices": trainer.num_devices,
        "nodes": trainer.num_nodes,
        "nccl_bytes": nccl_bytes(),
        "gathered_bytes": gathered.most_bytes or None,
    }
