"""The table of the modules that hold the most memory at the peak of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rich.table import Table

from lightning_batchmem.plan.records import mib
from lightning_batchmem.profile.module_memory import ModuleMemory, PeakByModule

_MAX_ROWS = 10

# Two of these are seldom alike.
_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")


@dataclass(frozen=True)
class ModuleRow:
    """One row: a module without its submodules, or all blocks of one class with theirs.

    Args:
        label: for example ``"6 x TransformerEncoderLayer (encoder.layers)"``.
        num_blocks: how many blocks the row adds up; 1 for a single module.
        modules: the modules whose bytes are added up.
    """

    label: str
    num_blocks: int
    modules: tuple[ModuleMemory, ...]

    @property
    def activations_bytes(self) -> int:
        """Tensors that the forward pass keeps for backward."""
        return sum(module.activations_bytes for module in self.modules)

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return sum(module.total_bytes for module in self.modules)


def module_rows(peak: PeakByModule) -> list[ModuleRow]:
    """Return every module that holds memory in one row, the largest row first.

    Repeated blocks are modules with submodules that have the same class and the same parent. The
    outermost ones share a row.
    """
    blocks = _repeated_blocks(peak)
    rows: dict[tuple[str, str], list[ModuleMemory]] = {}
    for module in peak.modules:
        row = (module.name, module.class_name)
        for block, group in blocks.items():
            if module.name == block or module.name.startswith(f"{block}."):
                row = group
                break
        rows.setdefault(row, []).append(module)
    sizes = Counter(blocks.values())
    all_rows = [
        ModuleRow(_label(*key, sizes[key]), max(1, sizes[key]), tuple(modules))
        for key, modules in rows.items()
    ]
    with_bytes = [row for row in all_rows if row.total_bytes]
    return sorted(with_bytes, key=lambda row: -row.total_bytes)


def module_table(peak: PeakByModule) -> Table:
    """Return the largest modules, in MiB and per cent of the peak and of the activations.

    The last column has the activations of one sample, in one of the blocks of a row.
    """
    table = Table(title="Memory by module at the peak of a step", title_justify="left")
    # A name is the only way to find a module, so it is never cut off.
    table.add_column("module", overflow="fold")
    for heading in ("memory", "peak", "activations", "a sample"):
        table.add_column(heading, justify="right")
    rows = module_rows(peak)
    rows_bytes = sum(row.total_bytes for row in rows)
    peak_bytes = max(1, rows_bytes if peak.peak_bytes is None else peak.peak_bytes)
    all_activations_bytes = max(1, sum(row.activations_bytes for row in rows))
    for row in rows[:_MAX_ROWS]:
        each = ""
        if peak.batch_size:
            each = mib(row.activations_bytes / row.num_blocks / peak.batch_size)
        table.add_row(
            row.label,
            mib(row.total_bytes),
            f"{row.total_bytes / peak_bytes:.1%}",
            f"{row.activations_bytes / all_activations_bytes:.1%}",
            each,
        )
    others = rows[_MAX_ROWS:]
    if others:
        other_bytes = sum(row.total_bytes for row in others)
        activations_bytes = sum(row.activations_bytes for row in others)
        table.add_row(
            f"{len(others)} others",
            mib(other_bytes),
            f"{other_bytes / peak_bytes:.1%}",
            f"{activations_bytes / all_activations_bytes:.1%}",
            "",
        )
    if peak.other_bytes is not None:
        share = f"{peak.other_bytes / peak_bytes:.1%}"
        table.add_row("everything else", mib(peak.other_bytes), share, "", "")
    table.add_section()
    table.add_row("all", mib(peak_bytes), "100.0%", "", "")
    return table


def _label(name: str, class_name: str, num_blocks: int) -> str:
    if num_blocks > 1:
        return f"{num_blocks} x {class_name} ({name})"
    if not name:
        return f"{class_name}: the step outside its modules"
    return f"{name} ({class_name})"


def _repeated_blocks(peak: PeakByModule) -> dict[str, tuple[str, str]]:
    """Return the outermost repeated blocks, each with the name of its parent and its class."""
    parents = {module.name.rpartition(".")[0] for module in peak.modules}
    groups: dict[tuple[str, str], list[str]] = {}
    for module in peak.modules:
        if module.name in parents and module.class_name not in _CONTAINERS:
            parent = module.name.rpartition(".")[0]
            groups.setdefault((parent, module.class_name), []).append(module.name)
    repeated = {name: group for group, names in groups.items() if len(names) > 1 for name in names}
    return {
        name: group
        for name, group in repeated.items()
        if not any(name.startswith(f"{outer}.") for outer in repeated)
    }
