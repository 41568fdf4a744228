"""How far a rehearsal of batches of ever new shapes is from a training: plain loops over networks.

For each network, lengths and seed: the largest size at which 40 steps run whose tenth ones have the
longest sample, and the largest at which 300 random steps run, as shares of the size whose tensors
fill the memory. Then of all pairs of a rehearsal and a training: how many trainings fit at each
share of the size of the rehearsal. The networks are none of those of ``benchmarks.ragged``.

    # about half an hour on two cores
    python -m benchmarks.ragged_share
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.common import command_line, machine, markdown
from benchmarks.cuda_search import FORK, in_fork, start_device, start_on_stub

DEVICE_BYTES = 2**30
SAMPLES = 20_000
FEATURES = 16
WIDTH = 128
SEEDS = 5
REHEARSAL_STEPS = 40
LARGEST_EVERY = 10
TRAINING_STEPS = 300
RESOLUTION = 0.02
SHARES = (0.75, 0.8, 0.836, 0.9, 0.95, 1.0)


class Convolutions(nn.Module):
    """Residual convolutions."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(4)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x.mean(2)


class Attention(nn.Module):
    """A block whose attention keeps its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        attended = ((q @ k.transpose(-1, -2)) / 6).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(x)
        return out.mean(1)


class Gated(nn.Module):
    """Gated linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            x = x + F.glu(gate(x))
        return x.mean(1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": Convolutions,
    "attention": Attention,
    "gated": Gated,
}


def uniform(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return generator.uniform(20, 300, SAMPLES).astype(int)


def pareto(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.clip(20 * (1 + generator.pareto(2.5, SAMPLES)), 2, 300).astype(int)


LENGTHS = {"uniform": uniform, "pareto": pareto}


def fails(
    network: str, lengths: str, seed: int, size: int, num_steps: int, largest_every: float
) -> bool:
    """Whether memory runs out in steps on a new device.

    Of ``largest_every`` steps the last one has the longest sample, and the others random ones.
    """
    start_device(DEVICE_BYTES)
    generator = np.random.default_rng(seed)
    sizes = LENGTHS[lengths](generator)
    model = network_on_device(network)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(1, num_steps + 1):
        longest = generator.choice(sizes, size).max()
        if number % largest_every == 0:
            longest = sizes.max()
        try:
            step(model, size, int(longest))
            optimizer.step()
        except torch.OutOfMemoryError:
            return True
    return False


def network_on_device(network: str) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), NETWORKS[network](), nn.Linear(WIDTH, 10)
    ).cuda()


def step(model: nn.Module, size: int, length: int) -> None:
    batch = torch.empty(size, length, FEATURES).cuda()
    model.zero_grad()
    model(batch).square().mean().backward()


def peak_bytes(network: str, length: int, size: int) -> int:
    """Bytes of the tensors of a step on a device with room for all of them."""
    start_device(64 * 2**30)
    step(network_on_device(network), size, length)
    return torch.cuda.max_memory_allocated()


def free_bytes() -> int:
    start_device(DEVICE_BYTES)
    torch.empty(1).cuda()
    return torch.cuda.mem_get_info()[0]


def largest_share(
    network: str, lengths: str, seed: int, full: float, num_steps: int, largest_every: float
) -> float:
    """The largest size without an error, as a share of the one whose tensors fill the memory."""
    low, high = 0.6, 1.1
    while high - low > RESOLUTION:
        middle = (low + high) / 2
        size = int(middle * full)
        if in_fork(fails, network, lengths, seed, size, num_steps, largest_every):
            high = middle
        else:
            low = middle
    return low


def measure(cell: tuple[str, str, int]) -> dict[str, Any]:
    """One rehearsal and one training, whose random choices differ."""
    network, lengths, seed = cell
    length = int(LENGTHS[lengths](np.random.default_rng(seed)).max())
    small, large = (in_fork(peak_bytes, network, length, size) for size in (50, 100))
    full = 50 + 50 * (in_fork(free_bytes) - small) / (large - small)
    row = {
        "network": network,
        "lengths": lengths,
        "seed": seed,
        "rehearsal": largest_share(network, lengths, seed, full, REHEARSAL_STEPS, LARGEST_EVERY),
        "training": largest_share(network, lengths, 100 + seed, full, TRAINING_STEPS, math.inf),
    }
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> None:
    command_line(__doc__).parse_args()
    start_on_stub(None, "benchmarks.ragged_share")
    torch.set_num_threads(1)
    groups = list(itertools.product(NETWORKS, LENGTHS))
    cells = [(*group, seed) for seed in range(SEEDS) for group in groups]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=FORK) as pool:
        rows = list(pool.map(measure, cells))
    ratios = [
        one["training"] / other["rehearsal"]
        for one, other in itertools.product(rows, rows)
        if (one["network"], one["lengths"]) == (other["network"], other["lengths"])
    ]
    table = [
        {
            "size, as a share of that of the rehearsal": share,
            "trainings that fit": f"{sum(ratio >= share for ratio in ratios)} of {len(ratios)}",
        }
        for share in SHARES
    ]
    print(machine(), markdown(table), sep="\n\n")


if __name__ == "__main__":
    main()
