"""Run an example whose second trial runs out of memory, and in whose third trial nothing fits.

``python -m tests.helpers.failing_sweep NAME`` prints how each training starts, and how many tensors
of the trials before are alive then.
"""

import runpy
import sys
import weakref
from pathlib import Path
from typing import ClassVar

import torch

from lightning_batchmem import BatchFinder

EXAMPLES = Path(__file__).parents[2] / "examples"
# Run 0 is the search before the sweep.
OUT_OF_MEMORY_AT_STEP = {2: 3}
NOTHING_FITS = {3}


class Watch:
    """What the patched methods have seen."""

    runs = 0
    is_out_of_memory = False
    tensors: ClassVar[list] = []


def main(name):
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    from quickstart import Classifier, Digits

    Classifier.__init__.__defaults__ = (4, 3e-3)
    init = Digits.__init__
    training_step = Classifier.training_step
    on_train_batch_start = BatchFinder.on_train_batch_start

    def counting_init(digits, *arguments):
        alive = sum(tensor() is not None for tensor in Watch.tensors)
        # The test reads what this file prints.
        print(f"run {Watch.runs}: {alive} of {len(Watch.tensors)} tensors alive")  # noqa: T201
        Watch.tensors = []
        Watch.is_out_of_memory = Watch.runs in NOTHING_FITS
        Watch.runs += 1
        init(digits, *arguments)

    def failing_step(module, batch, batch_idx):
        loss = training_step(module, batch, batch_idx)
        tensors = [loss, *batch, *module.parameters()]
        Watch.tensors += [weakref.ref(tensor) for tensor in tensors]
        if Watch.is_out_of_memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB (made up)")
        return loss

    def noting_start(finder, trainer, module, batch, batch_idx):
        # A search calls no hooks of callbacks, so this is a batch of the training.
        on_train_batch_start(finder, trainer, module, batch, batch_idx)
        if batch_idx == 0:
            plan = finder.plan
            print(f"training: {plan.batch_size}, {len(batch[0])}, {plan.reason}")  # noqa: T201
        Watch.is_out_of_memory = OUT_OF_MEMORY_AT_STEP.get(Watch.runs - 1) == batch_idx

    Digits.__init__ = counting_init
    Classifier.training_step = failing_step
    BatchFinder.on_train_batch_start = noting_start
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
