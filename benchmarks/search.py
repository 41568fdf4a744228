"""Search side by side: every way in fresh processes, under the same cap, and then training at what each found.

Within a workload the ways take turns, so that what else the machine does falls on all of them. What is measured goes
into ``record`` at once, and what is in it already is not measured again: an interrupted run goes on where it was.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.caps import own_group, room_bytes
from benchmarks.oracle import largest_surviving
from benchmarks.survive import attempt

LARGEST_SIZE = 65_536
"""The oracle looks no further, in samples."""


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Args:
        repeats: searches in each way.
        trainings: at each distinct size that a way found.
        timeout_seconds: for each process; one that takes longer failed.
        has_oracle: whether the largest size that survives is looked for.
    """

    repeats: int = 3
    trainings: int = 3
    timeout_seconds: float = 600.0
    has_oracle: bool = True


def compare(
    record: dict[str, Any], names: list[str], ways: list[str], kind: str, extent: Extent, save: Callable[[], None]
) -> None:
    """Measure what ``record`` lacks under one kind of cap, workload by workload.

    Args:
        record: workload -> what is known of it; ``{"unavailable": reason}`` where the cap cannot be set here.
        names: workloads.
        ways: names in ``benchmarks.ways.WAYS``.
        kind: the cap, see ``benchmarks.caps``.
        extent: how much is measured.
        save: called after each search and training.
    """
    try:
        with own_group(kind):
            record.pop("unavailable", None)
    except OSError as error:
        record["unavailable"] = f"{kind}: {error}"
        save()
        return
    for name in names:
        known = record.setdefault(name, {"room_bytes": room_bytes(name), "ways": {}, "trainings": {}})
        for repeat in range(extent.repeats):
            for way in ways:
                found = known["ways"].setdefault(way, [])
                if len(found) <= repeat:
                    found.append(_search(name, way, kind, extent.timeout_seconds))
                    save()
        outcomes = _outcomes(known["trainings"], name, kind, extent.timeout_seconds, save)
        found_sizes = sizes_found(known)
        for count in range(1, extent.trainings + 1):
            for size in found_sizes:
                outcomes(size, count)
        if extent.has_oracle and "oracle" not in known:
            survivals = {int(size): [error is None for error in errors] for size, errors in known["trainings"].items()}
            known["oracle"] = largest_surviving(outcomes, known=survivals, largest=LARGEST_SIZE)
            _say(f"{name}, {kind}, oracle: {known['oracle']}")
            save()


def sizes_found(known: dict[str, Any]) -> list[int]:
    """The distinct sizes that any way found for a workload, in order."""
    return sorted({one["batch_size"] for found in known["ways"].values() for one in found if one.get("batch_size")})


def _search(name: str, way: str, kind: str, timeout_seconds: float) -> dict[str, Any]:
    begin = time.monotonic()
    found = attempt(kind, "benchmarks.ways", name, way, kind, timeout_seconds=timeout_seconds)
    took = f"{time.monotonic() - begin:.0f} s in all"
    _say(f"{name}, {kind}, {way}: {found.get('batch_size')} {found['error'] or ''} ({took})")
    return found


def _outcomes(
    trainings: dict[str, list[str | None]], name: str, kind: str, timeout_seconds: float, save: Callable[[], None]
) -> Callable[[int, int], list[bool]]:
    """(size, count) -> whether each training survived, at least ``count`` of them; those that are missing are run."""

    def outcomes(size: int, count: int) -> list[bool]:
        errors = trainings.setdefault(str(size), [])
        while len(errors) < count:
            train = (name, str(size), kind)
            errors.append(attempt(kind, "benchmarks.survive", *train, timeout_seconds=timeout_seconds)["error"])
            _say(f"{name}, {kind}, training at {size}: {errors[-1] or 'survived'}")
            save()
        return [error is None for error in errors]

    return outcomes


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
