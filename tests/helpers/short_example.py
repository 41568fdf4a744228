"""Run examples on one core: ``python -m tests.helpers.short_example ddp fsdp2``."""

import runpy
import sys
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    for name in sys.argv[1:]:
        # The line separates the outputs of the examples.
        print(f"example {name}", flush=True)  # noqa: T201
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
