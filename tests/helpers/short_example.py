"""Run an example with a smaller network: ``python -m tests.helpers.short_example ddp``."""

import runpy
import sys
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    from quickstart import Classifier

    Classifier.__init__.__defaults__ = (4, 3e-3)
    runpy.run_path(str(EXAMPLES / f"{sys.argv[1]}.py"), run_name="__main__")
