"""Rows of modules, and repeated blocks that share one."""

from dataclasses import replace

import pytest

from lightning_batchmem import Plan
from lightning_batchmem.plan.recipe import Recipe
from lightning_batchmem.plan.records import MIB, Chosen
from lightning_batchmem.profile.module_memory import ModuleMemory, PeakByModule
from lightning_batchmem.profile.step_memory import PeakBetweenSteps
from lightning_batchmem.profile.summary import RunMemory
from lightning_batchmem.profile.text import fits_text, module_rows, module_table


def peak_of(*modules, other_bytes=0):
    peak_bytes = sum(module.total_bytes for module in modules) + other_bytes
    return PeakByModule(tuple(modules), peak_bytes, 4)


ENCODER = peak_of(
    ModuleMemory("", "Net", optimizer_state_bytes=MIB),
    ModuleMemory("encoder.0", "Layer", activations_bytes=2 * MIB),
    ModuleMemory("encoder.0.mlp", "MLP", activations_bytes=4 * MIB),
    ModuleMemory("encoder.0.mlp.0", "Linear", parameters_bytes=MIB),
    ModuleMemory("encoder.1", "Layer", activations_bytes=MIB),
    ModuleMemory("encoder.1.mlp", "MLP", activations_bytes=4 * MIB),
    ModuleMemory("encoder.1.mlp.0", "Conv1d", parameters_bytes=2 * MIB),
    ModuleMemory("head", "Linear", gradients_bytes=3 * MIB),
    other_bytes=2 * MIB,
)


def test_equal_places_of_blocks_share_a_row():
    rows = module_rows(ENCODER)
    shown = [
        (label, sum(module.total_bytes for module in modules) // MIB)
        for label, modules in rows.items()
    ]
    assert shown == [
        ("encoder.*.mlp (MLP)", 8),
        ("encoder.* (Layer)", 3),
        ("head (Linear)", 3),
        ("encoder.*.mlp.0 (Conv1d)", 2),
        ("Net: the step outside its modules", 1),
        ("encoder.*.mlp.0 (Linear)", 1),
    ]


def cells(peak):
    # The first lines are the headings, and the line below them.
    rows = [line.split("|")[1:6] for line in module_table(peak).splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in rows]


def test_a_row_has_the_activations_of_a_sample():
    # 8 MiB of activations are for four samples.
    expected = ["encoder.*.mlp (MLP)", "8.0 MiB", "40.0%", "8.0 MiB", "2.0 MiB"]
    assert cells(ENCODER)[0] == expected


def test_everything_else_is_the_peak_without_the_largest_rows():
    many = [ModuleMemory(f"m{number}", "Linear", number * MIB) for number in range(1, 14)]
    rows = cells(peak_of(*many, other_bytes=MIB))
    assert [row[0] for row in rows[:10]] == [f"m{number} (Linear)" for number in range(13, 3, -1)]
    # It has the modules of 1, 2 and 3 MiB too.
    assert rows[10:] == [
        ["everything else", "7.0 MiB", "7.6%", "", ""],
        ["all", "92.0 MiB", "100.0%", "", ""],
    ]


MEMORY = RunMemory(3, 4, peak_allocated_bytes=300 * MIB)
PLAN = Plan(Chosen(4096, "memory", ""), (), 1024 * MIB)


@pytest.mark.parametrize(
    ("plan", "memory", "start"),
    [
        (PLAN, MEMORY, "batch size 4,096 fits in 300 MiB (a GPU, torch "),
        (PLAN, replace(MEMORY, peak_allocated_bytes=None), ""),
        # The most that was held counts, whenever and on whichever rank.
        (PLAN, replace(MEMORY, peak_reserved_bytes=512 * MIB), "batch size 4,096 fits in 512 MiB"),
        (
            PLAN,
            replace(MEMORY, validation_peak_bytes=513 * MIB),
            "batch size 4,096 fits in 513 MiB",
        ),
        (
            PLAN,
            replace(MEMORY, between_steps=PeakBetweenSteps(720 * MIB, 7)),
            "batch size 4,096 fits in 720 MiB",
        ),
        (
            replace(PLAN, recipe=Recipe(ranks=2)),
            replace(MEMORY, rank_peaks_bytes=(300 * MIB, 900 * MIB)),
            "batch size 4,096 on each of 2 ranks fits in 900 MiB",
        ),
        (replace(PLAN, budget_name="max_tokens"), MEMORY, "max_tokens 4,096 fits in 300 MiB"),
        # From 1 GiB on a tenth is precise enough.
        (
            PLAN,
            replace(MEMORY, peak_reserved_bytes=1024 * MIB + 1),
            "batch size 4,096 fits in 1.1 GiB",
        ),
    ],
)
def test_the_line_to_paste(plan, memory, start):
    text = fits_text(plan, memory, "a GPU", "bf16-mixed")
    assert text.startswith(start)
    assert text.endswith(", bf16-mixed)") == bool(start)


def test_without_a_peak_the_shares_are_those_of_the_modules():
    peak = PeakByModule((ModuleMemory("m", "Linear", 3 * MIB),), None)
    assert [row[:3] for row in cells(peak)] == [
        ["m (Linear)", "3.0 MiB", "100.0%"],
        ["everything else", "0.000 MiB", "0.0%"],
        ["all", "3.0 MiB", "100.0%"],
    ]
