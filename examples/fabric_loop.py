"""A training loop with Fabric on two processes, whose batch size is computed before its first step.

Both processes find the same size, and the one with the least room decides. The images are
scikit-learn's digits (1,797 scans of 8 x 8 pixels, shipped inside that package: nothing is
downloaded).

Run it with ``torchrun --nproc-per-node=2 examples/fabric_loop.py``, or with ``python
examples/fabric_loop.py`` where Fabric starts the second process. It takes about 20 s on two cores.
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import find_batch_size_of_loop

RANKS = 2
EPOCHS = 3


def main() -> None:
    """Find the batch size on all ranks, train with it, and print the loss of each rank."""
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32) / 16
    labels = torch.tensor(digits)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
    model, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=1e-2))

    def step(batch: list[Tensor]) -> Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        return loss.detach()

    def make_batch(size: int) -> list[Tensor]:
        indices = torch.randint(len(images), (size,))
        return [images[indices], labels[indices]]

    # The limit holds for each rank. An epoch has at least 10 steps.
    plan = find_batch_size_of_loop(
        step,
        make_batch,
        model=model,
        optimizer=optimizer,
        fabric=fabric,
        memory_limit="1GiB",
        max_batch_size=len(images) // RANKS // 10,
    )
    # Fabric gives each rank its own share of the images.
    data = DataLoader(TensorDataset(images, labels), batch_size=plan.batch_size, shuffle=True)
    loader = fabric.setup_dataloaders(data)
    for _ in range(EPOCHS):
        losses = [step(list(batch)) for batch in loader]
    last = torch.stack(losses).mean()
    print(
        f"rank {fabric.global_rank} trained with the batch size {plan.batch_size},"
        f" and its loss in the last epoch was {last:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
