"""A training loop in plain PyTorch, whose batch size is computed before its first step.

The images are scikit-learn's digits (1,797 scans of 8 x 8 pixels, shipped inside that package:
nothing is downloaded). Run it with ``python examples/plain_loop.py``; it takes about 20 s on two
cores, and uses a GPU where there is one.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import find_batch_size_of_loop

EPOCHS = 3


def main() -> None:
    """Find the batch size, train with it, and print the accuracy on the training images."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(digits)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = ExponentialLR(optimizer, gamma=0.99)

    def step(batch: list[Tensor]) -> None:
        x, y = (part.to(device) for part in batch)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        # torch does not annotate this method.
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()

    def make_batch(size: int) -> list[Tensor]:
        indices = torch.randint(len(images), (size,))
        return [images[indices], labels[indices]]

    # A step changes the scheduler too. An epoch has at least 10 steps.
    plan = find_batch_size_of_loop(
        step,
        make_batch,
        model=model,
        optimizer=optimizer,
        state=[scheduler],
        memory_limit="1GiB",
        max_batch_size=len(images) // 10,
    )
    data = TensorDataset(images, labels)
    loader = DataLoader(data, batch_size=plan.batch_size, shuffle=True)
    for _ in range(EPOCHS):
        for batch in loader:
            step(batch)
    model.eval()
    with torch.no_grad():
        predicted = model(images.to(device)).argmax(1).cpu()
    accuracy = (predicted == labels).float().mean().item()
    print(f"accuracy {accuracy:.2f} after {EPOCHS * len(loader)} steps of {plan.batch_size} images")


if __name__ == "__main__":
    main()
