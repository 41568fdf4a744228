"""Let a training on one device continue after a batch that does not fit.

If forward or backward of a batch runs out of memory, the batch is split along its first dimension
into 2 parts, or 4, 8 and so on until they fit. Each part runs forward and backward with its share
of the loss, and then the optimizer steps once. Gradients, the loss and logged values are those of
the whole batch, except for the order of sums.

Copy this file, and pass ``callbacks=[OomGuard()]`` to the Trainer. Use it for single batches, such
as those of very long texts: a step in parts takes longer than one of a size that fits.

It raises at the start of the training where parts cannot equal the whole batch: BatchNorm in
training mode, ``accumulate_grad_batches`` above 1, several ranks, manual optimization.

It cannot see the following, so do not use it there:

- a loss, or a logged value, that is not a mean over the samples: a sum, a mean over the tokens of
  padded texts, a loss over pairs of samples;
- a batch whose samples are not the first dimension of its tensors (time first);
- a ``training_step`` that changes something, such as a metric, a buffer, a list or its batch: it
  runs once more for each part, after an attempt that failed;
- hooks around backward or on gradients, which are called for each part;
- dropout and other random numbers: a part draws other ones.

Run it with ``python examples/oom_guard.py``; it takes a few seconds on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from itertools import accumulate, pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.memory import garbage_collection_cuda
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Part:
    """Consecutive samples of a batch.

    Args:
        begin: the number of the first one.
        end: the number after that of the last one.
        samples: the samples of the whole batch.
    """

    begin: int
    end: int
    samples: int

    @property
    def share(self) -> float:
        """Its part of the samples of the batch."""
        return (self.end - self.begin) / self.samples

    def of(self, batch: Any) -> Any:
        """Return these samples. Their tensors are views, so they take no memory."""
        return apply_to_collection(batch, Tensor, lambda tensor: tensor[self.begin : self.end])


class OomGuard(Callback):
    """Runs a batch in parts if it runs out of memory.

    Lightning's closure of a step runs training_step, clears the gradients and runs backward. The
    guard calls it once for each part. While it does, these methods of the module see the part:
    ``training_step`` gets its samples, ``optimizer_zero_grad`` clears the gradients only before the
    first one, and ``log`` passes on the mean over all of them with the last one.

    Attributes:
        oom_splits: batches of this ``fit`` so far that ran in parts.
    """

    def __init__(self) -> None:
        self.oom_splits = 0
        # What runs now: a part, or the whole batch if it is None.
        self._part: Part | None = None
        self._batch: Any = None
        # The sum over the parts that have run, each by its share.
        self._loss: Tensor | float = 0.0
        self._means: dict[str, Tensor | float] = {}
        # The names whose values of the whole batch are logged.
        self._logged: set[str] = set()
        # What the module itself, and not its class, had under the names that are replaced.
        self._replaced: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a training whose batches cannot run in parts."""
        refuse(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Guard the steps from now on, and not those of a search by another callback."""
        # Another callback may have set accumulate_grad_batches.
        refuse(trainer, pl_module)
        self.oom_splits = 0
        makers: dict[str, Callable[[Any], Any]] = {
            "training_step": self._make_training_step,
            "log": self._make_log,
            "optimizer_zero_grad": self._make_zero_grad,
            "optimizer_step": partial(self._make_optimizer_step, pl_module),
        }
        for name, make in makers.items():
            self._replaced[name] = vars(pl_module).get(name)
            setattr(pl_module, name, make(getattr(pl_module, name)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the module its own methods back."""
        for name, method in self._replaced.items():
            if method is None:
                delattr(pl_module, name)
            else:
                setattr(pl_module, name, method)
        self._replaced = {}

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Do the same when a run ends early."""
        self.on_train_end(trainer, pl_module)

    def _make_training_step(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        # Lightning reads the signature, which `wraps` keeps.
        @wraps(training_step)
        def step(batch: Any, *arguments: Any) -> Any:
            self._batch = batch
            part = self._part
            if part is None:
                return training_step(batch, *arguments)
            loss = training_step(part.of(batch), *arguments)
            if not isinstance(loss, Tensor):
                raise TypeError(
                    "training_step must return its loss, a tensor, for OomGuard to run a batch in"
                    f" parts, got {type(loss).__name__}. Use a smaller batch size."
                )
            # The value of the last part is that of the whole batch, for whoever reads the loss of
            # the step. Its gradient is that of the part.
            loss = part.share * loss + self._loss
            self._loss = loss.detach()
            return loss

        return step

    def _make_log(self, log: Callable[..., None]) -> Callable[..., None]:
        @wraps(log)
        def log_mean(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            part = self._part
            if part is None:
                self._logged.add(name)
                log(name, value, *arguments, **options)
                return
            if not isinstance(value, Tensor | float | int):
                raise TypeError(
                    f"log({name!r}) must get a number for OomGuard to run a batch in parts, got"
                    f" {type(value).__name__}. Use a smaller batch size."
                )
            value = value.detach() if isinstance(value, Tensor) else value
            self._means[name] = self._means.get(name, 0.0) + part.share * value
            if part.end < part.samples or name in self._logged:
                return
            # Backward of this part may still fail.
            self._logged.add(name)
            if options.get("batch_size") is not None:
                options["batch_size"] = part.samples
            log(name, self._means[name], *arguments, **options)

        return log_mean

    def _make_zero_grad(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        @wraps(zero_grad)
        def zero_grad_once(*arguments: Any) -> None:
            if self._part is None or self._part.begin == 0:
                zero_grad(*arguments)

        return zero_grad_once

    def _make_optimizer_step(
        self, module: LightningModule, optimizer_step: Callable[..., None]
    ) -> Callable[..., None]:
        @wraps(optimizer_step)
        def step(epoch: int, batch_idx: int, optimizer: Any, closure: Callable[[], Any]) -> None:
            optimizer_step(epoch, batch_idx, optimizer, partial(self._run, module, closure))

        return step

    def _run(self, module: LightningModule, closure: Callable[[], Any]) -> Any:
        """Run forward and backward of a batch, in more and more parts until they fit."""
        self._logged = set()
        num_parts = 1
        try:
            while True:
                try:
                    loss = self._run_parts(closure, num_parts)
                    break
                except torch.OutOfMemoryError as error:
                    samples = samples_in(self._batch) or 0
                    reason = why_not_in_parts(module.trainer, module)
                    if samples == 0:
                        reason = "it holds something other than tensors with one first dimension"
                    elif num_parts == samples:
                        reason = "one sample does not fit"
                    if reason is not None:
                        error.add_note(f"OomGuard cannot split this batch, because {reason}.")
                        raise
                # Only now the error is gone, and with it the tensors of the attempt.
                garbage_collection_cuda()
                num_parts = min(2 * num_parts, samples)
        finally:
            self._batch = None
        if num_parts > 1:
            self.oom_splits += 1
            if self.oom_splits == 1:
                rank_zero_warn(
                    f"OomGuard: a batch ran out of memory, and then ran in {num_parts} parts. Use a"
                    " smaller batch size if this happens often, because parts take longer."
                )
        return loss

    def _run_parts(self, closure: Callable[[], Any], num_parts: int) -> Any:
        if num_parts == 1:
            return closure()
        self._loss = 0.0
        self._means = {}
        samples = samples_in(self._batch) or 0
        bounds = [samples * number // num_parts for number in range(num_parts + 1)]
        try:
            for begin, end in pairwise(bounds):
                self._part = Part(begin, end, samples)
                loss = closure()
        finally:
            self._part = None
        return loss


def samples_in(batch: Any) -> int | None:
    """Return the first dimension of all tensors of a batch; None if there is none.

    A batch may be a tensor, or tensors in dictionaries, lists and tuples. In a batch with anything
    else, such as texts or numbers, it is not known what belongs to which sample.
    """
    leaves = leaves_of(batch)
    if not all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves):
        return None
    sizes = {len(leaf) for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else None


def leaves_of(data: Any) -> list[Any]:
    """Return what dictionaries, lists and tuples hold, at any depth."""
    if isinstance(data, Mapping):
        data = list(data.values())
    if not isinstance(data, list | tuple):
        return [data]
    return [leaf for item in data for leaf in leaves_of(item)]


def why_not_in_parts(trainer: Trainer, module: LightningModule) -> str | None:
    """Return why parts of a batch cannot equal a step of this training; None if they can."""
    if not module.automatic_optimization:
        return "training_step steps the optimizers itself"
    if trainer.accumulate_grad_batches > 1:
        return "a backward that fails has changed the gradients of earlier batches (accumulation)"
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        return f"ranks wait for each other in every step ({type(trainer.strategy).__name__})"
    for name, layer in module.named_modules():
        # Without running means, BatchNorm uses those of the batch in any mode.
        if isinstance(layer, BATCH_NORMS) and (layer.training or layer.running_mean is None):
            return f"BatchNorm ({name}) would normalize each part by itself"
    return None


def refuse(trainer: Trainer, module: LightningModule) -> None:
    """Raise an error if parts of a batch cannot equal a step of this training."""
    reason = why_not_in_parts(trainer, module)
    if reason is not None:
        raise ValueError(
            f"OomGuard cannot run batches in parts, because {reason}. Remove it, and use a batch"
            " size that always fits."
        )


class Network(LightningModule):
    """Three layers that act as if they ran on a small device.

    Args:
        most_samples: with more of them in a batch, memory runs out.
    """

    def __init__(self, most_samples: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        self.most_samples = most_samples

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean square error of one batch."""
        x, y = batch
        loss = functional.mse_loss(self.layers(x), y)
        self.log("train/loss", loss)
        if len(x) > self.most_samples:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Stochastic gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train(network: Network, callbacks: list[Callback]) -> None:
    """Train for two epochs of six batches."""
    x = torch.randn(100, 8)
    ends = list(accumulate([10, 10, 37, 10, 23, 10], initial=0))
    batches = [list(range(begin, end)) for begin, end in pairwise(ends)]
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_sampler=batches)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(network, loader)


def main() -> None:
    """Train once on a device that takes all batches, and once on one that takes 10 samples."""
    seed_everything(0)
    whole = Network(most_samples=100)
    train(whole, [])
    seed_everything(0)
    in_parts = Network(most_samples=10)
    guard = OomGuard()
    train(in_parts, [guard])
    weights = in_parts.state_dict()
    differences = [one - weights[name] for name, one in whole.state_dict().items()]
    difference = max(float(one.abs().max()) for one in differences)
    print(
        f"{guard.oom_splits} of 12 batches ran in parts; weights differ by at most {difference:.0e}"
    )


if __name__ == "__main__":
    main()
