"""Where results are kept, and how a run adds to those of the same day."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def load(path: Path) -> dict[str, Any]:
    """What is there of the day; an empty frame where there is nothing yet."""
    if not path.exists():
        return {"runs": [], "search": {}}
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def save(path: Path, results: dict[str, Any]) -> None:
    """Write in one go, so that an interruption leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(partial, path)


def forget(results: dict[str, Any], names: list[str], ways: list[str], caps: list[str]) -> None:
    """Take out the searches of these ways, so that they are made again. Trainings and oracles do not depend on them."""
    for kind in caps:
        for name, known in results["search"].get(kind, {}).items():
            if name in names:
                for way in ways:
                    known["ways"].pop(way, None)


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``old`` with what ``new`` says; what only ``old`` says stays, at every depth."""
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged
