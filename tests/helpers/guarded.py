"""Trainings that run out of memory at chosen places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import OomGuard
from tests.helpers.lawful import quiet_trainer

STEPS = 20

# The samples of each batch in an epoch. Those of five and more do not fit, and none is as large as
# one before it, so that each of them fails as a whole first.
SIZES = (4, 3, 4, 9, 4, 4, 3, 8, 7, 6, 4, 5, 4, 4)
FITS = 4

# The places of the errors in the batches that do not fit.
FAILS = {3: "forward", 7: "backward", 8: "backward", 9: "start", 11: "backward"}


def fail() -> None:
    """Raise an error as a full device does."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


class Failing(LightningModule):
    """A network in float64 whose steps fail if they have more than some samples.

    Args:
        fails: the number of a batch -> the place of the error in it and its parts: ``"start"``,
            ``"forward"``, ``"logged"`` (after ``self.log``), ``"backward"`` (when half of the
            gradients exist).
        reduction: that of the loss.
    """

    def __init__(
        self,
        fails: Mapping[int, str] | None = None,
        reduction: str = "mean",
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.fails = fails or {}
        self.reduction = reduction
        layers = (nn.Linear(6, 16), norm(16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))
        self.layers = nn.Sequential(*layers).double()
        # It gets no gradient.
        self.unused = nn.Linear(1, 1)
        self.place: str | None = None
        self.samples: list[int] = []
        self.hooks: list[str] = []

    def read(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return x, y

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = self.read(batch)
        self.place = None
        if len(x) > FITS:
            self.place = self.fails.get(self.trainer.fit_loop.total_batch_idx)
        self.samples.append(len(x))
        self.arrive_at("start")
        hidden = self.layers[:3](x)
        hidden.register_hook(lambda _: self.arrive_at("backward"))
        errors = (self.layers[3:](hidden) - y).square().squeeze(1)
        loss = errors.mean() if self.reduction == "mean" else errors.sum()
        self.arrive_at("forward")
        self.log_values(loss, errors.detach())
        self.arrive_at("logged")
        return loss

    def arrive_at(self, place: str) -> None:
        if place == self.place:
            fail()

    def log_values(self, loss: Tensor, errors: Tensor) -> None:
        """A subclass logs values here."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=300)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.hooks.append("zero_grad")

    def on_after_backward(self) -> None:
        self.hooks.append("after")


class Steps(Callback):
    """The gradients, outputs and learning rates of each batch."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.gradients: list[list[Tensor | None]] = []
        self.rates: list[float] = []
        self.hooks: list[str] = []

    def on_before_zero_grad(self, *_: Any) -> None:
        self.hooks.append("zero_grad")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.hooks.append("after")
        gradients = [parameter.grad for parameter in pl_module.parameters()]
        self.gradients.append([None if one is None else one.clone() for one in gradients])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.outputs.append(outputs)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def loader(seed: int = 1, sizes: Sequence[int] = SIZES) -> DataLoader[Any]:
    """Batches of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 6, generator=generator, dtype=torch.float64)
    y = torch.randn(sum(sizes), 1, generator=generator, dtype=torch.float64)
    ends = list(accumulate(sizes))
    batches = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    return DataLoader(TensorDataset(x, y), batch_sampler=batches)


def trained(
    make: Callable[..., Failing],
    guard: OomGuard | None,
    *callbacks: Callback,
    loaders: Any = None,
    **arguments: Any,
) -> tuple[Trainer, Any, Steps]:
    """Train for 20 optimizer steps."""
    seed_everything(5, verbose=False)
    steps = Steps()
    guards = [] if guard is None else [guard]
    options = {"max_steps": STEPS, **arguments}
    trainer = quiet_trainer(steps, *callbacks, *guards, **options)
    module = make()
    trainer.fit(module, loader() if loaders is None else loaders)
    return trainer, module, steps
