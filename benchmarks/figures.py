"""Draw the pictures in ``docs/figures``, and print the plan that README.md shows, all of one run.

The run is the second training of ``examples/quickstart.py``: a search, four epochs and their
validations. A line has what the search cost.

    python -m benchmarks.figures
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image
from torch import Tensor

from benchmarks.common import ROOT, command_line, machine, trainer_for
from lightning_batchmem import BatchFinder, MemoryProfiler
from lightning_batchmem.__main__ import draw as draw_figures

# The examples are scripts, which import each other in this way.
sys.path.insert(0, str(ROOT / "examples"))
from quickstart import Batch, Classifier, Digits, limit_bytes

EPOCHS = 4


class CountedClassifier(Classifier):
    """Counts its training steps and their samples."""

    steps_run = 0
    samples_run = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        # A search restores the attributes of a module, but not those of its class.
        CountedClassifier.steps_run += 1
        CountedClassifier.samples_run += len(batch[0])
        return super().training_step(batch, batch_idx)


class SearchCost(Callback):
    """Prints what the search took; it comes after the finder."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.start_seconds = time.process_time()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = time.process_time() - self.start_seconds
        samples = CountedClassifier.samples_run
        print(
            f"search: {CountedClassifier.steps_run} training steps of {samples} samples in all,"
            f" {seconds:.1f} s of CPU time"
        )


def draw(out: Path) -> None:
    """Search, train, and write every figure of the run as PNG."""
    # As in the quickstart.
    torch.set_num_threads(1)
    finder = BatchFinder(memory_limit=limit_bytes(), lr_scaling="sqrt")
    profiler = MemoryProfiler()
    with tempfile.TemporaryDirectory() as directory:
        trainer = trainer_for(
            [profiler, finder, SearchCost()],
            -1,
            max_epochs=EPOCHS,
            log_every_n_steps=5,
            default_root_dir=directory,
        )
        trainer.fit(CountedClassifier(), datamodule=Digits())
        # The log directory has files with the steps and the plan.
        exit_code = draw_figures(Path(directory), out)
    assert exit_code == 0
    assert finder.plan is not None
    assert profiler.summary is not None
    steps = profiler.summary.steps
    print(f"training: {steps} steps of {finder.plan.batch_size} samples\n{machine()}")
    for path in sorted(out.glob("*.png")):
        # A palette makes the committed file four times smaller.
        with Image.open(path) as image:
            palette = image.convert("RGB").quantize(
                method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
            )
        palette.save(path, optimize=True)


def main() -> None:
    command_line(__doc__).parse_args()
    draw(ROOT / "docs" / "figures")


if __name__ == "__main__":
    main()
