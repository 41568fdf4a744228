"""One rank of tests/gpu/test_cuda_ranks.py: a search and a training on the device of its rank."""

import json
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.common import silence
from benchmarks.cuda_networks import project
from lightning_batchmem import BatchFinder
from tests.helpers.lawful import quiet_trainer


def main(folder: Path) -> None:
    silence()
    finder = BatchFinder(min_steps_per_epoch=None)
    trainer = quiet_trainer(
        finder,
        accelerator="gpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=5,
        limit_val_batches=2,
    )
    module = project("mlp", 0)
    trainer.fit(module)
    outcome = {
        "total_bytes": torch.cuda.mem_get_info(trainer.strategy.root_device)[1],
        "batch_size": module.batch_size,
        "verified": finder.plan.verified,
        "steps": trainer.global_step,
    }
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
