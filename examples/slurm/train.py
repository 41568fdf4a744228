"""The digits of the quickstart as a task of a SLURM job: ``sbatch examples/slurm/train.sbatch``.

All tasks of the job find the same batch size. The first one writes the plan to
``logs/slurm/batch_plan.json``, and a later job of a sweep runs only a rehearsal at its size.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything

# The quickstart is in the folder above.
sys.path.append(str(Path(__file__).parents[1]))

from quickstart import Classifier, Digits

from lightning_batchmem import BatchFinder

PLAN = Path("logs/slurm/batch_plan.json")


def main() -> None:
    """Find the batch size on all tasks, or use that of an earlier job, and train."""
    seed_everything(0)
    finder = BatchFinder(plan=PLAN, memory_limit="1GiB", max_batch_size=64)
    trainer = Trainer(
        # Lightning reads the ranks from SLURM's variables itself, and checks these two numbers.
        devices=int(os.environ["SLURM_NTASKS_PER_NODE"]),
        num_nodes=int(os.environ["SLURM_NNODES"]),
        strategy="ddp",
        max_epochs=1,
        enable_progress_bar=False,
        default_root_dir="logs/slurm",
        callbacks=[finder],
    )
    digits = Digits()
    trainer.fit(Classifier(8), datamodule=digits)
    assert finder.plan is not None
    print(f"task {trainer.global_rank} of {trainer.world_size}: {finder.plan.reason}", flush=True)


if __name__ == "__main__":
    main()
