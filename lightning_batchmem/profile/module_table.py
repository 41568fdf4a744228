"""The table of the modules that hold the most memory at the peak of a step."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.table import Table

from lightning_batchmem.plan.records import mib
from lightning_batchmem.profile.module_memory import ModuleMemory, PeakByModule

_MAX_ROWS = 10
# The number of a block that has submodules.
_BLOCK_NUMBER = re.compile(r"\b\d+\.")


def module_rows(peak: PeakByModule) -> dict[str, list[ModuleMemory]]:
    """Return the modules of each row, the largest row first.

    Modules of one class share a row if they are in the same place of several blocks:
    ``layers.*.linear (Linear)`` has ``layers.0.linear``, ``layers.1.linear`` and so on.
    """
    parents = {module.name.rpartition(".")[0] for module in peak.modules}
    rows: dict[str, list[ModuleMemory]] = {}
    for module in peak.modules:
        path = f"{module.name}." if module.name in parents else module.name
        place = _BLOCK_NUMBER.sub("*.", path).removesuffix(".")
        label = f"{place} ({module.class_name})"
        if not module.name:
            label = f"{module.class_name}: the step outside its modules"
        rows.setdefault(label, []).append(module)
    return dict(sorted(rows.items(), key=lambda row: -_total_bytes(row[1])))


def module_table(peak: PeakByModule) -> Table:
    """Return the largest rows, in MiB and per cent of the peak, and one for everything else.

    The last column has the activations of one sample.
    """
    table = Table(title="Memory by module at the peak of a step", title_justify="left")
    # A name is the only way to find a module, so it is never cut off.
    table.add_column("module", overflow="fold")
    for heading in ("memory", "peak", "activations", "a sample"):
        table.add_column(heading, justify="right")
    rows = list(module_rows(peak).items())[:_MAX_ROWS]
    peak_bytes = peak.peak_bytes or max(1, _total_bytes(peak.modules))
    rest_bytes = peak_bytes
    for label, modules in rows:
        row_bytes = _total_bytes(modules)
        rest_bytes -= row_bytes
        activations_bytes = sum(module.activations_bytes for module in modules)
        each = mib(activations_bytes / peak.batch_size) if peak.batch_size else ""
        share = f"{row_bytes / peak_bytes:.1%}"
        table.add_row(label, mib(row_bytes), share, mib(activations_bytes), each)
    table.add_row("everything else", mib(rest_bytes), f"{rest_bytes / peak_bytes:.1%}", "", "")
    table.add_section()
    table.add_row("all", mib(peak_bytes), "100.0%", "", "")
    return table


def _total_bytes(modules: Iterable[ModuleMemory]) -> int:
    return sum(module.total_bytes for module in modules)
