"""The table in which torch keeps the state of modules that are sharded with ``fully_shard``."""

from __future__ import annotations

from collections.abc import Container

# The table is private in torch 2.5.1 to 2.14.
from torch.distributed._composable_state import _module_state_mapping


class ShardedModules:
    """The entries of the table.

    The entry of a module is no attribute of it. A module that is not sharded, but has an entry,
    cannot be sharded.
    """

    def __init__(self) -> None:
        self._entries = dict(_module_state_mapping)

    def restore(self, restored: Container[int]) -> None:
        """Restore the entries of modules with these ids; the others are not part of a search."""
        for module in list(_module_state_mapping):
            if id(module) in restored and module not in self._entries:
                del _module_state_mapping[module]
        for module, entry in self._entries.items():
            if id(module) in restored:
                _module_state_mapping[module] = entry
