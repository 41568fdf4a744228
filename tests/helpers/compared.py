"""The trainings that the tests compare bit for bit: ``python -m tests.helpers.compared``.

It prints the lists of ``docs/compared.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tests.helpers.contract_cases import CASES
from tests.helpers.loops import LOOPS


def compared_lists() -> str:
    """The names of all cases, as Markdown."""
    return (
        f"## With a Trainer ({len(CASES)})\n\n{_listed(CASES)}\n\n"
        f"## Loops of your own ({len(LOOPS)})\n\n{_listed(LOOPS)}\n"
    )


def _listed(names: Iterable[str]) -> str:
    return "\n".join(f"- {name.replace('_', ' ')}" for name in sorted(names))


if __name__ == "__main__":
    sys.stdout.write(compared_lists())
