"""Rows of modules, and repeated blocks that share one."""

import io

from rich.console import Console

from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.module_memory import ModuleMemory, PeakByModule
from lightning_batchmem.profile.module_table import module_rows, module_table


def peak_of(*modules, other_bytes=0):
    peak_bytes = sum(module.total_bytes for module in modules) + other_bytes
    return PeakByModule(tuple(modules), peak_bytes, 4)


ENCODER = peak_of(
    ModuleMemory("", "Net", optimizer_state_bytes=MIB),
    ModuleMemory("encoder", "Encoder"),
    ModuleMemory("encoder.0", "Layer", activations_bytes=2 * MIB),
    ModuleMemory("encoder.0.mlp", "MLP", activations_bytes=6 * MIB),
    ModuleMemory("encoder.0.mlp.up", "Linear", parameters_bytes=MIB),
    ModuleMemory("encoder.1", "Layer", activations_bytes=2 * MIB),
    ModuleMemory("encoder.1.mlp", "MLP", activations_bytes=6 * MIB),
    ModuleMemory("head", "Linear", gradients_bytes=3 * MIB),
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


def test_one_row_has_everything_else():
    console = Console(file=io.StringIO(), width=100)
    console.print(module_table(peak_of(ModuleMemory("m", "Linear", 3 * MIB), other_bytes=MIB)))
    rows = [line.split("│")[1:4] for line in console.file.getvalue().splitlines() if "│" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["m (Linear)", "3.0 MiB", "75.0%"],
        ["everything else", "1.0 MiB", "25.0%"],
        ["all", "4.0 MiB", "100.0%"],
    ]


def test_without_a_peak_the_shares_are_those_of_the_modules():
    peak = PeakByModule((ModuleMemory("m", "Linear", 3 * MIB),), None)
    console = Console(file=io.StringIO(), width=100)
    console.print(module_table(peak))
    assert "everything else" not in console.file.getvalue()
    assert "100.0%" in console.file.getvalue()
