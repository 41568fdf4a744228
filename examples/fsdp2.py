"""The digits of the quickstart, with the network sharded over two processes.

The strategy is Lightning's ModelParallelStrategy with FSDP2.

Each rank holds half of the parameters, gradients and optimizer state, and gathers the other half of
a block when it needs it; what that takes is in the steps that the search measures.

Run it with ``python examples/fsdp2.py`` or ``torchrun --nproc-per-node=2 examples/fsdp2.py``. It
takes about a minute on two cores, uses GPUs where there are two, and writes to ``logs/fsdp2``.
"""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from quickstart import Classifier, Digits
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_batchmem import BatchFinder, MemoryProfiler

try:
    from torch.distributed.fsdp import fully_shard

    NEEDS_CUDA = False
except ImportError:
    # torch 2.5 has the function here. Its first step on a CPU fails with "FSDP requires CUDA for
    # streams". mypy takes the import for a private one, because the package has no ``__all__``.
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]

    NEEDS_CUDA = True

RANKS = 2


class ShardedClassifier(Classifier):
    """The quickstart's network, sharded block by block."""

    def configure_model(self) -> None:
        """Shard over all ranks; Lightning calls it once the processes are connected."""
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for block in self.network:
            if isinstance(block, (nn.Sequential, nn.Linear)):
                fully_shard(block, mesh=mesh)
        fully_shard(self.network, mesh=mesh)


def main() -> None:
    """Find the batch size on all ranks, train, and print what each of them used."""
    on_cuda = torch.cuda.device_count() >= RANKS
    if NEEDS_CUDA and not on_cuda:
        print(
            f"FSDP2 of torch {torch.__version__} needs {RANKS} GPUs; torch 2.13 shards on a CPU too"
        )
        return
    seed_everything(0)
    # The limit holds for each rank.
    finder = BatchFinder(memory_limit="1GiB")
    trainer = Trainer(
        accelerator="cuda" if on_cuda else "cpu",
        devices=RANKS,
        strategy=ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1),
        max_epochs=3,
        log_every_n_steps=1,
        logger=CSVLogger("logs", name="fsdp2"),
        callbacks=[finder, MemoryProfiler()],
    )
    digits = Digits()
    classifier = ShardedClassifier(8)
    trainer.fit(classifier, datamodule=digits)
    assert finder.plan is not None
    parameters = list(classifier.parameters())
    own = sum(
        parameter.to_local().numel() for parameter in parameters if isinstance(parameter, DTensor)
    )
    held = f"{own:,} of {sum(parameter.numel() for parameter in parameters):,} parameters"
    print(
        f"rank {trainer.global_rank} trained with the batch size {digits.batch_size}, holding"
        f" {held}",
        flush=True,
    )
    # All ranks have printed their line before the first rank prints the last one.
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        print(
            f"samples per optimizer step over {trainer.world_size} ranks:"
            f" {finder.plan.effective_batch_size}"
        )


if __name__ == "__main__":
    main()
