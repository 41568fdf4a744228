"""Rows of modules, and repeated blocks that share one."""

import io

from rich.console import Console

from lightning_batchmem.devices.module_memory import ModuleMemory, PeakByModule
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.module_table import module_rows, module_table


def peak_of(*modules):
    return PeakByModule(tuple(modules), "aten.mm.default", "head", 4)


ENCODER = peak_of(
    ModuleMemory("", "Net", other_bytes=MIB),
    ModuleMemory("encoder", "Encoder"),
    ModuleMemory("encoder.0", "Layer", activations_bytes=2 * MIB),
    ModuleMemory("encoder.0.mlp", "MLP", activations_bytes=6 * MIB),
    ModuleMemory("encoder.0.mlp.up", "Linear", parameters_bytes=MIB),
    ModuleMemory("encoder.1", "Layer", activations_bytes=2 * MIB),
    ModuleMemory("encoder.1.mlp", "MLP", activations_bytes=6 * MIB),
    ModuleMemory("head", "Linear", temporary_bytes=3 * MIB),
)


def test_repeated_blocks_share_a_row_with_their_submodules():
    rows = module_rows(ENCODER)
    assert [(row.label, row.total_bytes // MIB) for row in rows] == [
        ("2 x Layer (encoder)", 17),
        ("head (Linear)", 3),
        ("Net: the step outside its modules", 1),
    ]
    assert sum(row.total_bytes for row in rows) == ENCODER.peak_bytes


def test_containers_and_single_layers_are_no_blocks():
    rows = module_rows(
        peak_of(
            ModuleMemory("stage1", "Sequential"),
            ModuleMemory("stage1.0", "Linear", parameters_bytes=1),
            ModuleMemory("stage1.1", "Linear", parameters_bytes=2),
            ModuleMemory("stage2", "Sequential"),
            ModuleMemory("stage2.0", "Linear", parameters_bytes=3),
        )
    )
    assert [row.label for row in rows] == [
        "stage2.0 (Linear)",
        "stage1.1 (Linear)",
        "stage1.0 (Linear)",
    ]


def test_the_table_adds_up_the_smaller_modules():
    many = [ModuleMemory(f"m{number}", "Linear", number * MIB) for number in range(1, 14)]
    console = Console(file=io.StringIO(), width=100)
    console.print(module_table(peak_of(*many)))
    text = console.file.getvalue()
    assert "m13 (Linear)" in text
    assert "m3 (Linear)" not in text
    assert "3 others" in text
    assert "6.0 MiB" in text


def test_the_table_has_the_activations_of_a_sample_in_each_block():
    console = Console(file=io.StringIO(), width=100)
    console.print(module_table(ENCODER))
    row = next(line for line in console.file.getvalue().splitlines() if "2 x Layer" in line)
    # 16 MiB of activations in two blocks, for four samples.
    assert [cell.strip() for cell in row.split("│")[2:6]] == [
        "17.0 MiB",
        "81.0%",
        "100.0%",
        "2.0 MiB",
    ]
