"""A network of three equal blocks, which a new process can import."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x):
        return self.layers(x)


class BlockNet(LightningModule):
    def __init__(self):
        super().__init__()
        self.batch_size = 2
        self.blocks = nn.Sequential(Block(), Block(), Block())

    def training_step(self, batch, batch_idx):
        return self.blocks(batch[0]).square().mean()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(100, 8)), batch_size=self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
