"""Modules whose memory is measured, with numbers that can be computed by hand."""

from torch import nn
from torch.utils.checkpoint import checkpoint


class Twice(nn.Module):
    """One module runs twice in a step."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU())

    def forward(self, batch):
        return self.body(self.body(batch)).square().mean()


class Checkpointed(nn.Module):
    """Each block is computed again in backward."""

    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(blocks)
        )

    def forward(self, batch):
        for block in self.blocks:
            batch = checkpoint(block, batch, use_reentrant=False)
        return batch.square().mean()
