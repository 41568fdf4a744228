"""A training script for tests of ``simulate``, which knows nothing of it.

    python tests/helpers/simulated_training.py NETWORK [CASE]

The network is one of the group "device" of ``benchmarks.networks``. Run it in the root of the
repository.
"""

import os
import subprocess
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

sys.path.insert(0, os.getcwd())

from benchmarks.networks import group, project
from benchmarks.networks.layers import Block

NETWORKS = group("device")

TRAINER = {"max_epochs": 2, "accelerator": "gpu", "logger": False, "enable_checkpointing": False}


def make() -> LightningModule:
    """The GPT, for ``find --gpu`` and ``check --gpu``."""
    return project(NETWORKS["gpt"])


def make_deeper() -> LightningModule:
    """The GPT with a block more."""
    module = project(NETWORKS["gpt"])
    module.module.blocks.append(one_more_block())
    return module


def one_more_block() -> Block:
    return Block(384, is_causal=True)


class Experts(nn.Module):
    """Four networks, of which a router chooses one for each token."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        chosen = self.router(x).argmax(-1)
        for number, expert in enumerate(self.experts):
            is_chosen = chosen == number
            out[is_chosen] = expert(x[is_chosen])
        return out


def started_program() -> str:
    """What a program that the script starts sees of the simulated GPU."""
    text = "import os; print([name for name in os.environ if 'STUB' in name or 'PRELOAD' in name])"
    return subprocess.check_output([sys.executable, "-c", text], text=True).strip()


def main() -> None:
    name, *cases = sys.argv[1:]
    module = project(NETWORKS[name], batch_size=4)
    arguments = dict(TRAINER)
    if "loggers" in cases:
        arguments.update(logger=True, enable_checkpointing=True)
        sys.stdout.write(f"variables in a program: {started_program()}\n")
    if "ddp" in cases:
        arguments.update(strategy="ddp", devices=1)
    if "experts" in cases:
        for block in module.module.blocks:
            block.mlp = Experts()
    if "compiled" in cases:
        module.module = torch.compile(module.module)
    Trainer(**arguments).fit(module)
    sys.stdout.write("the script went on\n")


if __name__ == "__main__":
    main()
