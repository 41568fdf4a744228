"""The searches as Markdown. Pure: it reads what ``benchmarks.search`` recorded."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

MIB = 2**20
HEAD = (
    "workload", "room MiB", "way", "size", "of the oracle", "out-of-memory errors", "sizes run",
    "samples run / size", "search s", "ms / sample of the size", "trainings survived",
)  # fmt: skip
SUMMARY_HEAD = (
    "way", "searches with a size", "of the oracle", "out-of-memory errors", "samples run / size",
    "search time per sample, BatchFinder's is 1", "trainings survived",
)  # fmt: skip
NONE = "none"
KILLED = "killed"
"""How the error of a process begins that went over the limit of its control group."""


def table(record: dict[str, Any], titles: dict[str, str]) -> str:
    """What was found under one kind of cap, medians with the range, and below it what went wrong, in its own words.

    Args:
        record: workload -> what ``benchmarks.search.compare`` put there.
        titles: way -> what it is called.
    """
    if "unavailable" in record:
        return f"Not measured: {record['unavailable']}"
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    notes: list[str] = []
    for name, known in record.items():
        room = f"{known['room_bytes'] / MIB:,.0f}"
        oracle = known.get("oracle")
        if oracle is not None:
            lines.append(f"| {name} | {room} | *oracle* | {_or_none(oracle['batch_size'])} |" + " |" * (len(HEAD) - 4))
            notes.append(f"- {name}, oracle: {_spread(oracle)}")
        for way, found in known["ways"].items():
            cells = _cells(found, known["trainings"], oracle)
            lines.append(f"| {name} | {room} | {titles[way]} | " + " | ".join(cells) + " |")
            notes += [f"- {name}, {titles[way]}, {said}" for said in _errors(found, known["trainings"])]
    return "\n".join([*lines, "", *notes])


def summary(record: dict[str, Any], titles: dict[str, str], *, reference: str = "ours") -> str:
    """Each way over all workloads: medians of a workload's median, and the range over them.

    Args:
        record: as of :func:`table`; there has to be one workload at least.
        titles: way -> what it is called.
        reference: the way whose search time is 1.
    """
    has_oracle = any(one.get("oracle") for one in record.values())
    lines = ["| " + " | ".join(SUMMARY_HEAD) + " |", "|" + "---|" * len(SUMMARY_HEAD)]
    for way, title in titles.items():
        known = [one for one in record.values() if way in one["ways"]]
        searches = [search for one in known for search in one["ways"][way]]
        if not searches:
            continue
        killed = sum((search["error"] or "").startswith(KILLED) for search in searches)
        errors = sum(len(search.get("out_of_memory", ())) for search in searches)
        survivals = [survived(_sizes(one["ways"][way]), one["trainings"]) for one in known]
        shares, samples, times = [], [], []
        for one in known:
            found, best = one["ways"][way], (one.get("oracle") or {}).get("batch_size")
            size = _median(_sizes(found))
            shares.append(size / best if size and best else None)
            samples.append(_median([_per_size(s, sum(s["samples_by_size"].values())) for s in found if _sizes([s])]))
            own, others = _seconds_per_sample(found), _seconds_per_sample(one["ways"].get(reference, []))
            times.append(own / others if own and others else None)
        cells = [
            f"{sum(bool(_sizes([search])) for search in searches)} of {len(searches)}",
            over_searches([share for share in shares if share], "{:.0%}".format) if has_oracle else "not measured",
            f"{errors}" + (f", and {killed} killed" if killed else ""),
            over_searches([one for one in samples if one], "{:.1f}".format),
            over_searches([one for one in times if one], "{:.1f}".format),
            "/".join(str(sum(numbers)) for numbers in zip(*survivals, strict=True)),
        ]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _sizes(found: Sequence[dict[str, Any]]) -> list[int]:
    return [one["batch_size"] for one in found if one.get("batch_size")]


def _seconds_per_sample(found: Sequence[dict[str, Any]]) -> float | None:
    return _median([_per_size(one, one["search_seconds"]) for one in found if _sizes([one])])


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def over_searches(values: Sequence[float | None], write: Callable[[float], str]) -> str:
    """The median and, where they differ, the range; values that are missing are left out and counted."""
    there = [value for value in values if value is not None]
    if not there:
        return NONE
    low, high = write(min(there)), write(max(there))
    text = write(statistics.median(there)) + ("" if low == high else f" ({low} to {high})")
    return text if len(there) == len(values) else f"{text}, {len(there)} of {len(values)}"


def survived(sizes: Sequence[int], trainings: dict[str, list[str | None]]) -> tuple[int, int]:
    """How many of the trainings at these sizes survived, and how many there were."""
    errors = [error for size in sorted(set(sizes)) for error in trainings.get(str(size), [])]
    return errors.count(None), len(errors)


def _cells(found: list[dict[str, Any]], trainings: dict[str, Any], oracle: dict[str, Any] | None) -> list[str]:
    sizes = [one.get("batch_size") for one in found]
    there = [size for size in sizes if size is not None]
    best = None if oracle is None else oracle["batch_size"]
    answered = [one for one in found if "samples_by_size" in one]  # of a killed search nothing is known
    k, n = survived(there, trainings)
    return [
        over_searches(sizes, _count) if there else _without_size(found),
        "unknown" if best is None else over_searches([size and size / best for size in sizes], "{:.0%}".format),
        over_searches([len(one["out_of_memory"]) for one in answered], _count) if answered else "unknown",
        over_searches([len(one["samples_by_size"]) for one in answered], _count) if answered else "unknown",
        over_searches([_per_size(one, sum(one["samples_by_size"].values())) for one in answered], "{:.1f}".format),
        over_searches([one["search_seconds"] if one["batch_size"] else None for one in answered], "{:.1f}".format),
        over_searches([_per_size(one, one["search_seconds"], 1e3) for one in answered], "{:,.0f}".format),
        f"{k}/{n}" if n else NONE,
    ]


def _without_size(found: list[dict[str, Any]]) -> str:
    return KILLED if any((one["error"] or "").startswith(KILLED) for one in found) else NONE


def _per_size(one: dict[str, Any], amount: float, factor: float = 1.0) -> float | None:
    return factor * amount / one["batch_size"] if one["batch_size"] else None


def _errors(found: list[dict[str, Any]], trainings: dict[str, list[str | None]]) -> list[str]:
    searches = Counter(one["error"] for one in found if one["error"])
    said = [f"search ({count} of {len(found)}): {error}" for error, count in searches.items()]
    for size in sorted({one["batch_size"] for one in found if one.get("batch_size")}):
        errors = trainings.get(str(size), [])
        for error, count in Counter(error for error in errors if error).items():
            said.append(f"training at {size} ({count} of {len(errors)}): {error}")
    return said


def _spread(oracle: dict[str, Any]) -> str:
    survived_once, failed_once = _or_none(oracle["survived_once"]), _or_none(oracle["failed_once"])
    return (
        f"{_or_none(oracle['batch_size'])} survives 5 of 5; the largest that survived once is {survived_once}, "
        f"the smallest that failed once {failed_once}"
    )


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _or_none(value: int | None) -> str:
    return NONE if value is None else _count(value)
