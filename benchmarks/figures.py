"""One of each figure, from a real run: the pictures in ``docs/figures``.

The batch size of a network whose weights, batch and activations can all be seen in the pile is searched for, then it is
trained for 60 steps, with a validation after each epoch. It takes about two minutes on two cores.

    python -m benchmarks.figures                     # writes to docs/figures
    python -m benchmarks.figures --out DIR
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.common import DEVICE_SHARE, machine, trainer_for
from benchmarks.workloads import CLASSES, WORKLOADS, RandomSamples, Training, Workload
from lightning_batchmem import BatchFinder, MemoryProfiler
from lightning_batchmem.report.figures import draw as draw_figures
from lightning_batchmem.report.figures import save
from lightning_batchmem.report.step_csv import NAME, read_rows

SAMPLES = 8192
STEPS = 60


def network() -> nn.Module:
    """Two convolutions for the activations, and a wide layer for the weights."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 16 * 16, 2048), nn.ReLU(), nn.Linear(2048, CLASSES),
    )  # fmt: skip


WORKLOAD = Workload(network, WORKLOADS["convolution"].sample, "1000MiB")


class Validated(Training):
    """The same training, with a validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(RandomSamples(self.sample, SAMPLES // 4), batch_size=self.batch_size)


def draw(out: Path) -> None:
    """Search, train, and write every figure that the run gives as PNG."""
    seed_everything(0)
    finder = BatchFinder(memory_limit=DEVICE_SHARE if torch.cuda.is_available() else WORKLOAD.host_limit)
    profiler = MemoryProfiler()
    module = Validated(WORKLOAD, length=SAMPLES)
    with tempfile.TemporaryDirectory() as directory:
        trainer = trainer_for([profiler, finder], STEPS, Path(directory))
        trainer.fit(module)
        rows = read_rows(Path(directory) / NAME)
    print(f"{machine()}\nbatch size {module.batch_size}")
    for name, figure in draw_figures(rows, finder.plan, profiler.summary).items():
        path = out / f"{name}.png"
        save(figure, path)
        with Image.open(path) as image:  # a quarter of the size, for what is committed; an octree keeps rare colours
            palette = image.convert("RGB").quantize(method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        palette.save(path, optimize=True)
        print(f"{path} ({path.stat().st_size / 1024:.0f} KiB)")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="directory; default: %(default)s")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
