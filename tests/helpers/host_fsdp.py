"""FSDP1 on the host, where Lightning's strategy refuses it."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module


class HostFSDPStrategy(FSDPStrategy):
    """FSDPStrategy on the host.

    Lightning refuses the host for the class itself, and not for one that is derived from it. torch
    takes the host only where it is named.
    """

    def _setup_model(self, model: Module) -> Module:
        # Lightning leaves a model with wrapped parts as it is.
        if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
            return super()._setup_model(model)
        return FullyShardedDataParallel(
            module=model,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )
