"""Train a GPT with 86 million parameters on bytes of Python's own standard library.

It does not use lightning-batchmem, like a script of your own:

    python -m lightning_batchmem simulate RTX-4090,A100-80GB examples/gpt.py
    LIGHTNING_BATCHMEM=find python examples/gpt.py

Nothing is downloaded. The second command searches and then trains, for which you want a GPU.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

BYTES_A_SAMPLE = 512
# The library of Python 3.11 has about 9,000.
SAMPLES = 8_000
WIDTH = 768


class SourceCode(Dataset[Tensor]):
    """Pieces of the modules of the standard library, each of 513 bytes."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        """The number of pieces."""
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        """One piece, and the byte that follows it."""
        start = index * BYTES_A_SAMPLE
        return self.text[start : start + BYTES_A_SAMPLE + 1].long()


class Block(nn.Module):
    """Causal attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.project_in = nn.Linear(WIDTH, 3 * WIDTH)
        self.project_out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape, samples x bytes x width."""
        query, key, value = self.project_in(self.norms[0](x)).unflatten(-1, (36, -1)).split(12, 2)
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        x = x + self.project_out(attended.transpose(1, 2).flatten(2))
        changed: Tensor = self.feed_forward(self.norms[1](x))
        return x + changed


class Gpt(LightningModule):
    """Twelve blocks, which predict the next byte."""

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(BYTES_A_SAMPLE, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(12)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The cross entropy of the next byte."""
        places = torch.arange(BYTES_A_SAMPLE, device=self.device)
        scores = self.head(self.blocks(self.bytes(batch[:, :-1]) + self.places(places)))
        return functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    def train_dataloader(self) -> DataLoader[Tensor]:
        """All pieces, shuffled."""
        return DataLoader(SourceCode(), batch_size=self.batch_size, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def main() -> None:
    """Train for an epoch."""
    trainer = Trainer(max_epochs=1, precision="bf16-mixed")
    trainer.fit(Gpt())


if __name__ == "__main__":
    main()
