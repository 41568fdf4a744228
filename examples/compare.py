"""What mixed precision and activation checkpointing gain for a small transformer.

python examples/compare.py                             # on a GPU if there is one
python examples/compare.py --limit 700MiB --cpu       # the table of docs/when-memory-is-short.md
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import compare

SAMPLES = 20_000
TOKENS = 64
WORDS = 1_000
WIDTH = 128


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=4, batch_first=True)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Add what both compute."""
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        changed: Tensor = self.feed_forward(self.norms[1](x))
        return x + changed


class Classifier(LightningModule):
    """Six blocks, and the mean of their output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))
        self.head = nn.Linear(WIDTH, 2)
        self.checkpoints_blocks = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute the loss."""
        words, labels = batch
        x = self.embedding(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints_blocks else block(x)
        scores: Tensor = self.head(x.mean(1))
        return nn.functional.cross_entropy(scores, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make() -> tuple[LightningModule, DataLoader[Any]]:
    """Return the model and its data."""
    data = TensorDataset(torch.randint(WORDS, (SAMPLES, TOKENS)), torch.randint(2, (SAMPLES,)))
    return Classifier(), DataLoader(data, batch_size=8)


def checkpoint_blocks(model: Classifier) -> None:
    """Keep only the input of each block, and compute the block again in backward."""
    model.checkpoints_blocks = True


variants: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"transform": checkpoint_blocks},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "both": {"precision": "bf16-mixed", "transform": checkpoint_blocks},
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", default="8GiB", help="memory limit; default: %(default)s")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    options = parser.parse_args()
    base = {"accelerator": "cpu"} if options.cpu else {}
    print(compare(make, variants, base=base, memory_limit=options.limit))
