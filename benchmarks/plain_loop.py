"""Sizes of a loop without a Trainer, next to the sizes of a Trainer with the same network.

    python -m benchmarks.plain_loop
    python -m benchmarks.plain_loop --only "small CNN" --repeats 1

Each search runs in a new process, with the room of its network beyond the memory in use before. The
code of a Trainer takes memory of the host, so a step of a training comes first in both ways. The
table has the sizes of all searches, the ratio of their medians, and the live bytes that a sample
adds. Sizes on the host differ between equal searches too, because held bytes do.
"""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from benchmarks.common import (
    command_line,
    emit,
    in_fresh_process,
    markdown,
    report,
    silence,
    trainer_for,
)
from benchmarks.networks import MIB, Sample, group, host_training
from lightning_batchmem import Plan, find_batch_size, find_batch_size_of_loop
from lightning_batchmem.devices import device_memory_for

NETWORKS = group("host, quick")
WAYS = ("Trainer", "loop")

# Samples that are repeated in a batch of the loop.
SAMPLES = 16


def search(name: str, way: str) -> Plan:
    """Search in this process."""
    silence()
    network = NETWORKS[name]
    trainer_for([], 1, limit_val_batches=0).fit(host_training(network))
    module = host_training(network)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device_memory = device_memory_for(device)
    assert device_memory is not None
    limit_bytes = network.room_bytes
    if device.type == "cpu":
        limit_bytes += device_memory.current().allocated_bytes
    if way == "Trainer":
        trainer = trainer_for([], 1, limit_val_batches=0)
        return find_batch_size(
            trainer, module, memory_limit=limit_bytes, min_steps_per_epoch=None, objective="memory"
        )
    module.to(device)
    optimizer = module.configure_optimizers()
    data = module.train_dataloader().dataset
    samples = [data[index] for index in range(SAMPLES)]

    def make_batch(size: int) -> Sample:
        batch: Sample = network.collate([samples[index % SAMPLES] for index in range(size)])
        return batch

    def step(batch: tuple[Tensor, ...]) -> None:
        optimizer.zero_grad()
        # torch does not annotate this method.
        module.loss([part.to(device) for part in batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return find_batch_size_of_loop(
        step, make_batch, model=module.module, optimizer=optimizer, memory_limit=limit_bytes
    )


def main() -> None:
    """Search in new processes, or in this one."""
    parser = command_line(__doc__, NETWORKS, writes=True)
    parser.add_argument("--repeats", type=int, default=3, help="searches in each way")
    parser.add_argument("--way", choices=WAYS, help="search in this process, in this way")
    arguments = parser.parse_args()
    if arguments.way is not None:
        plan = search(arguments.only[0], arguments.way)
        assert plan.memory is not None
        line = plan.memory.lines[plan.memory.phase_at(plan.batch_size)]
        emit(batch_size=plan.batch_size, slope_mib=line.slope / MIB)
        return
    rows = []
    for name in arguments.only:
        row: dict[str, object] = {"network": name}
        medians: dict[str, float] = {}
        for way in WAYS:
            results = [
                in_fresh_process("benchmarks.plain_loop", "--only", name, "--way", way)
                for _ in range(arguments.repeats)
            ]
            row[way] = ", ".join(str(one["error"] or one["batch_size"]) for one in results)
            sizes = [one["batch_size"] for one in results if one["error"] is None]
            if sizes:
                medians[way] = statistics.median(sizes)
                slopes = [one["slope_mib"] for one in results if one["error"] is None]
                row[f"{way}: MiB a sample"] = f"{statistics.median(slopes):.4f}"
        if len(medians) == len(WAYS):
            row["loop / Trainer"] = f"{medians['loop'] / medians['Trainer']:.3f}"
        rows.append(row)
    report("plain_loop", markdown(rows), write=arguments.write)


if __name__ == "__main__":
    main()
