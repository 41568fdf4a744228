"""A script that trains a Llama 2 with FSDP2 and activation checkpointing, for ``simulate``.

    python -m lightning_batchmem simulate A100-80GB --devices 1,2,4,8 -m benchmarks.sharded_llama
    # how much CPU time and memory of the host a search of many GPUs takes
    python -m benchmarks.sharded_llama --cost

As under any launcher, the number of ranks is in WORLD_SIZE. Weights are made on the meta device.
Source of the shapes: https://arxiv.org/abs/2307.09288, and the configurations of its authors.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

TOKENS = 4096
VOCABULARY = 32_000


class Shape(NamedTuple):
    """What differs between the sizes of Llama 2."""

    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int


SHAPES = {"7B": Shape(4096, 32, 32, 32, 11008), "70B": Shape(8192, 80, 64, 8, 28672)}


class Block(nn.Module):
    """A block without rotations: they need no memory worth counting."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.head_width = width // shape.heads
        key_width = shape.key_heads * self.head_width
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.query = nn.Linear(width, width, bias=False)
        self.key_and_value = nn.Linear(width, 2 * key_width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.gate_and_up = nn.Linear(width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        parts = (self.query(normed), *self.key_and_value(normed).chunk(2, -1))
        query, key, value = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts
        )
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=key.shape[1] != self.heads
        )
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(self.norms[1](x)).chunk(2, -1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class Llama(nn.Module):
    """Blocks whose activations are computed again in backward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(self.norm(x))
        return out


class Training(LightningModule):
    """A pre-training with AdamW."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.batch_size = 1
        self.shape = shape
        self.network: Any = None

    def configure_model(self) -> None:
        if self.network is not None:
            return
        with torch.device("meta"):
            self.network = Llama(self.shape)
        assert self.device_mesh is not None
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        options: dict[str, Any] = {"mesh": self.device_mesh["data_parallel"], "mp_policy": policy}
        for block in self.network.blocks:
            fully_shard(block, **options)
        fully_shard(self.network, **options)
        self.network.to_empty(device=self.trainer.strategy.root_device)

    def train_dataloader(self) -> DataLoader[Any]:
        samples: Any = [torch.zeros(TOKENS, dtype=torch.long)] * 1_000_000
        return DataLoader(samples, self.batch_size, shuffle=True)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(tokens).flatten(0, 1).float(), tokens.flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def train(size: str) -> None:
    """Train on all GPUs of a launcher."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        accelerator="gpu",
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        max_steps=1000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Training(SHAPES[size]))


def cost() -> None:
    """Print what two searches take: 7B on 8 GPUs, and 70B on 64."""
    for size, nodes in (("7B", 1), ("70B", 8)):
        words = ["simulate", "A100-80GB", "--devices", "8", "--nodes", str(nodes), "-m"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "lightning_batchmem", *words, "benchmarks.sharded_llama", size],
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(
            f"{size} on {8 * nodes}: {seconds:.1f} CPU s with imports,"
            f" {time.monotonic() - began:.0f} s, at most {after.ru_maxrss / 2**20:.2f} GiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", nargs="?", choices=SHAPES, default="7B", help="of the network")
    parser.add_argument("--cost", action="store_true", help="search for 7B and 70B")
    chosen = parser.parse_args()
    if chosen.cost:
        cost()
    else:
        train(chosen.size)


if __name__ == "__main__":
    main()
