"""One rank of tests/gpu/test_cuda_ranks.py: a search and a training on the device of its rank.

Its arguments are the folder of the result, the network, and the bytes that size the network.
"""

import json
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.common import silence
from benchmarks.cuda_networks import project
from lightning_batchmem import BatchFinder
from tests.helpers.lawful import quiet_trainer


class PeakOfTraining(Callback):
    """The reserved peak of the training, without the search before it."""

    def on_train_start(self, *_: object) -> None:
        torch.cuda.reset_peak_memory_stats()


def main(folder: Path, network: str, network_bytes: int) -> None:
    silence()
    finder = BatchFinder(min_steps_per_epoch=None)
    trainer = quiet_trainer(
        finder,
        PeakOfTraining(),
        accelerator="gpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=5,
        limit_val_batches=2,
    )
    module = project(network, network_bytes)
    trainer.fit(module)
    outcome = {
        "total_bytes": torch.cuda.mem_get_info(trainer.strategy.root_device)[1],
        "batch_size": module.batch_size,
        "verified": finder.plan.verified,
        "steps": trainer.global_step,
        "limit_bytes": finder.plan.limit_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "gradient_bytes": sum(parameter.nbytes for parameter in module.parameters()),
    }
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
