"""Draw the pictures in ``docs/figures`` from a real run.

The run is a search, 60 training steps and an evaluation.

    python -m benchmarks.figures
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image
from torch import Tensor, nn

from benchmarks.common import ROOT, command_line, machine, trainer_for
from benchmarks.workloads import WORKLOADS, Training, Workload
from lightning_batchmem import BatchFinder, MemoryProfiler
from lightning_batchmem.profile.figures import draw as draw_figures
from lightning_batchmem.profile.figures import save
from lightning_batchmem.profile.step_csv import NAME, read_rows

MEMORY_LIMIT = "1500MiB"
STEPS = 30


class PixelNetwork(nn.Module):
    """The same three linear layers for each pixel of an image.

    From about 128 samples on, every activation is so large that the C library maps it by itself,
    and returns it when it is freed. So the process holds little more than its tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        width = 64
        self.pixels = nn.Sequential(
            nn.Linear(3, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        pixels: Tensor = self.pixels(images.flatten(2).mT)
        scores: Tensor = self.head(pixels.mean(1))
        return scores


def draw(out: Path) -> None:
    """Search, train, and write every figure of the run as PNG."""
    finder = BatchFinder(memory_limit=MEMORY_LIMIT, min_steps_per_epoch=None)
    module = Training(Workload(PixelNetwork, WORKLOADS["ConvNet"].sample, room_mib=0))
    with tempfile.TemporaryDirectory() as directory:
        arguments = {
            "default_root_dir": directory,
            "val_check_interval": STEPS // 3,
            "limit_val_batches": 2,
        }
        trainer_for([MemoryProfiler(), finder], STEPS, **arguments).fit(module)
        rows = read_rows(Path(directory) / NAME)
    print(f"{machine()}\nbatch size {module.batch_size}")
    for name, figure in draw_figures(rows, finder.plan).items():
        path = out / f"{name}.png"
        save(figure, path)
        # A palette makes the committed file four times smaller.
        with Image.open(path) as image:
            palette = image.convert("RGB").quantize(
                method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
            )
        palette.save(path, optimize=True)
        print(f"{path} ({path.stat().st_size / 1024:.0f} KiB)")


def main() -> None:
    command_line(__doc__).parse_args()
    draw(ROOT / "docs" / "figures")


if __name__ == "__main__":
    main()
