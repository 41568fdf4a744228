"""The training of the README: ``examples/gpt.py`` with the two lines, on a simulated RTX 4090.

A process on the stub runs it: ``python -m tests.helpers.readme_training FOLDER``.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from lightning_batchmem.plan.records import MIB
from lightning_batchmem.simulated_gpu.gpus import CONTEXT_BYTES, gpu_named
from tests.helpers.cuda_stub import output_on_stub

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SCRIPT = ROOT / "examples" / "gpt.py"
GPU = "RTX-4090"


def changed_script() -> str:
    """The script after the change that the README shows.

    Raises:
        ValueError: if the script has not the lines that the README changes.
    """
    (change,) = re.findall(r"^```diff\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    added_import, *lines = change.splitlines()
    before, after = (
        "\n".join(f"    {line[2:]}" for line in lines if line[0] in (" ", sign)) for sign in "-+"
    )
    script = SCRIPT.read_text()
    first_import = "import torch\n"
    for text in (before, first_import):
        if script.count(text) != 1:
            raise ValueError(f"{SCRIPT.name} must have these lines once:\n{text}")
    changed = script.replace(before, after)
    return changed.replace(first_import, f"{first_import}{added_import[2:]}\n")


def what_it_prints(folder: Path) -> str:
    """Run the training on the stub, with its files in ``folder``; returns what it prints."""
    gpu = gpu_named(GPU)
    major, minor = gpu.capability
    settings = {
        "CUDA_STUB_NAME": f"simulated {GPU}",
        "CUDA_STUB_BYTES": gpu.memory_bytes,
        # As `simulate` assumes.
        "CUDA_STUB_CONTEXT_MIB": CONTEXT_BYTES / MIB,
        "CUDA_STUB_CAPABILITY": f"{major}.{minor}",
        "CUDA_STUB_SMS": gpu.multiprocessors,
        "CUDA_STUB_L2_MIB": (gpu.l2_cache_bytes or 0) / MIB,
        # torch is built for 8.6, whose kernels run there.
        "CUDA_STUB_KERNELS": 86,
        # Without a time for each kernel no size is faster than another.
        "CUDA_STUB_TFLOPS": 50,
    }
    variables = {name: str(value) for name, value in settings.items()}
    return output_on_stub("tests.helpers.readme_training", str(folder), **variables)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    exec(compile(changed_script(), str(SCRIPT), "exec"), {"__name__": "__main__"})
