"""A training on two ranks: ``simulate`` plans it in one process, and two processes run it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import FSDPStrategy

from benchmarks.common import silence
from tests.helpers.cuda_search_only import RANKS, WAYS, Block, Net
from tests.helpers.cuda_stub import PeakOfTraining, mib
from tests.helpers.lawful import quiet_trainer
from tests.helpers.rank_processes import run_ranks

ALL_WAYS = {
    **WAYS,
    "fsdp": lambda: FSDPStrategy(process_group_backend="gloo", auto_wrap_policy={Block}),
}


class ShardedNet(Net):
    """The parameters of the wrapper are those of this rank under FSDP1."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.trainer.model.parameters(), lr=1e-3)


def fit(way: str, batch_size: int = 4) -> PeakOfTraining:
    """Train for a few steps."""
    silence()
    module = ShardedNet() if way == "fsdp" else Net()
    module.batch_size = batch_size
    peak = PeakOfTraining()
    trainer = quiet_trainer(
        peak, accelerator="gpu", devices=RANKS, strategy=ALL_WAYS[way](), max_steps=4
    )
    trainer.fit(module)
    return peak


def train(rank: int, folder: Path, way: str, batch_size: int, limit_bytes: int) -> None:
    """Train on this rank, whose allocator takes no more than the limit."""
    total_bytes = torch.cuda.get_device_properties(rank).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, rank)
    peak = fit(way, batch_size)
    (folder / f"{rank}.json").write_text(json.dumps(mib(peak.peak_bytes)))


def main(folder: str, way: str, batch_size: str, limit_bytes: str) -> None:
    """Print the exit codes of the ranks, and the MiB that each of them has held."""
    arguments = (Path(folder), way, int(batch_size), int(limit_bytes))
    codes, outputs = run_ranks(train, *arguments, ranks=RANKS)
    paths = [Path(folder) / f"{rank}.json" for rank in range(RANKS)]
    held_mib = [json.loads(path.read_text()) for path in paths if path.exists()]
    result = {"codes": codes, "outputs": outputs, "held_mib": held_mib}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(*sys.argv[1:])
    else:
        fit(sys.argv[1])
