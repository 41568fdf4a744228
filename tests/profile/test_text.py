"""Rows of modules, and repeated blocks that share one."""

from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.module_memory import ModuleMemory, PeakByModule
from lightning_batchmem.profile.text import module_rows, module_table


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


def test_without_a_peak_the_shares_are_those_of_the_modules():
    peak = PeakByModule((ModuleMemory("m", "Linear", 3 * MIB),), None)
    assert [row[:3] for row in cells(peak)] == [
        ["m (Linear)", "3.0 MiB", "100.0%"],
        ["everything else", "0.000 MiB", "0.0%"],
        ["all", "3.0 MiB", "100.0%"],
    ]
