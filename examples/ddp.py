"""The digits of the quickstart on two processes.

All processes find the same batch size, and the one with the least room decides.

Run it with ``python examples/ddp.py``, where Lightning starts the second process, or with
``torchrun --nproc-per-node=2 examples/ddp.py``, where torchrun starts both. It takes about half a
minute on two cores, uses GPUs where there are two, and writes to ``logs/ddp``.
"""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from quickstart import Classifier, Digits

from lightning_batchmem import BatchFinder, MemoryProfiler

RANKS = 2


def main() -> None:
    """Find the batch size on all ranks, train, and print what each of them used."""
    seed_everything(0)
    # The limit holds for each rank.
    finder = BatchFinder(memory_limit="1GiB")
    trainer = Trainer(
        accelerator="cuda" if torch.cuda.device_count() >= RANKS else "cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=3,
        log_every_n_steps=1,
        logger=CSVLogger("logs", name="ddp"),
        callbacks=[finder, MemoryProfiler()],
    )
    digits = Digits()
    trainer.fit(Classifier(8), datamodule=digits)
    assert finder.plan is not None
    print(f"rank {trainer.global_rank} trained with the batch size {digits.batch_size}", flush=True)
    # All ranks have printed their line before the first rank prints the last one.
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        print(
            f"samples per optimizer step over {trainer.world_size} ranks:"
            f" {finder.plan.effective_batch_size}"
        )


if __name__ == "__main__":
    main()
