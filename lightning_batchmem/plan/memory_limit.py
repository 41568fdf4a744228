"""What a user may write as a limit, and the checks of it."""

from __future__ import annotations

import re
from numbers import Integral

_UNIT_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
"""Source: SI prefixes, and IEC 80000-13 for the binary ones."""

_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*")


def parse_memory_limit(memory_limit: int | float | str | None, budget_bytes: int) -> int:
    """The limit in bytes, as the user wrote it.

    Args:
        memory_limit: bytes as an int, a text such as ``"20GiB"``, a fraction of the budget as a float in (0, 1], or
            ``None`` for the whole budget.
        budget_bytes: what the device can give to this process, what it holds already included.

    Raises:
        ValueError: when ``memory_limit`` is none of these.
    """
    if memory_limit is None:
        return budget_bytes
    if isinstance(memory_limit, str):
        written = _WRITTEN.fullmatch(memory_limit)
        unit = _UNIT_BYTES.get(written[2].upper()) if written else None
        if written is None or unit is None or float(written[1]) <= 0:
            raise ValueError(f'memory_limit must be like "20GiB" or "500MB", got {memory_limit!r}')
        return int(float(written[1]) * unit)
    if isinstance(memory_limit, float) and 0.0 < memory_limit <= 1.0:
        return int(memory_limit * budget_bytes)
    if isinstance(memory_limit, Integral) and not isinstance(memory_limit, bool) and memory_limit > 0:
        return int(memory_limit)
    raise ValueError(
        'memory_limit must be a positive number of bytes, a text such as "20GiB" or a fraction in (0, 1],'
        f" got {memory_limit!r}"
    )


def check_positive(name: str, value: int | None) -> None:
    """Raise a ValueError that names the argument unless ``value`` is None or a positive whole number."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
