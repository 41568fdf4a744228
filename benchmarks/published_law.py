"""Is memory a line over the batch size on real GPUs? Arithmetic on measurements of others.

mila-iqia/milabench published the memory of an H100 and an L40S (by NVML, with CUDA context and
cached blocks) and the speed of its benches at many batch sizes. Here a least-squares line through
the sizes up to half of the largest one predicts the memory at the largest. The error is predicted
over measured, less one. Benches with tf32 are left out: they repeat those with fp32 and fp16.

Nothing of lightning-batchmem runs here, so this is no test of it. It shows how far the law holds
that a search starts from; a search also rehearses the size that it chooses.

    python -m benchmarks.published_law
    # write benchmarks/results/published/published_law.md
    python -m benchmarks.published_law --write
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common import ROOT, command_line, markdown, write_page

MILABENCH = ROOT / "benchmarks" / "published" / "milabench.json"
RESULTS = ROOT / "benchmarks" / "results" / "published" / "published_law.md"

FULL_SHARE = 0.8
"""The largest size of a bench fills the card if it takes this share of the highest reading."""
FEWEST_SIZES_OF_A_SPEED = 4
SLOWER_SHARE = 0.95
TOO_LOW_SHARE = 0.05

Rows = Sequence[Sequence[float]]
"""Batch size, MiB and items a second of each measurement."""


@dataclass(frozen=True)
class Prediction:
    """The memory at the largest size of a bench, as a line through small sizes predicts it."""

    bench: str
    sizes: int
    largest_size: int
    predicted_mib: float
    measured_mib: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_mib / self.measured_mib - 1


@dataclass(frozen=True)
class Speed:
    """The speed at the largest size of a bench, and the highest at any of its sizes."""

    bench: str
    largest_size: int
    largest_size_speed: float
    fastest_size: int
    best_speed: float

    @property
    def share(self) -> float:
        """The speed at the largest size over the best."""
        return self.largest_size_speed / self.best_speed


def memory_by_size(rows: Rows) -> dict[int, float]:
    """MiB at each size, smallest size first; of repeated measurements the highest."""
    highest: dict[int, float] = {}
    for size, memory_mib, _ in rows:
        highest[int(size)] = max(memory_mib, highest.get(int(size), 0.0))
    return dict(sorted(highest.items()))


def speed_by_size(rows: Rows) -> dict[int, float]:
    """Items a second at each size, smallest size first; of repeated measurements the highest."""
    highest: dict[int, float] = {}
    for size, _, speed in rows:
        highest[int(size)] = max(speed, highest.get(int(size), 0.0))
    return dict(sorted(highest.items()))


def small_sizes(sizes: Iterable[int], *, smallest_size: int = 1) -> list[int]:
    """The sizes that a line is fitted to: those up to half of the largest one."""
    known = list(sizes)
    return [size for size in known if smallest_size <= size <= max(known) / 2]


def prediction(bench: str, rows: Rows, *, smallest_size: int = 1) -> Prediction | None:
    """Predict the largest size from those up to half of it; ``None`` with fewer than two.

    Sizes below ``smallest_size`` are left out. Source: :func:`statistics.linear_regression`.
    """
    memory_mib = memory_by_size(rows)
    largest_size = max(memory_mib)
    small = small_sizes(memory_mib, smallest_size=smallest_size)
    if len(small) < 2:
        return None
    line = statistics.linear_regression(small, [memory_mib[size] for size in small])
    return Prediction(
        bench=bench,
        sizes=len(small),
        largest_size=largest_size,
        predicted_mib=line.intercept + line.slope * largest_size,
        measured_mib=memory_mib[largest_size],
    )


def speed(bench: str, rows: Rows, card_mib: float) -> Speed | None:
    """Compare the speed of the largest size with the best of a bench.

    ``None`` if the largest size does not fill the card, or there are too few sizes.
    """
    speeds = speed_by_size(rows)
    memory_mib = memory_by_size(rows)
    largest_size = max(speeds)
    is_full = memory_mib[largest_size] >= FULL_SHARE * card_mib
    if len(speeds) < FEWEST_SIZES_OF_A_SPEED or not is_full:
        return None
    fastest_size = max(speeds, key=speeds.__getitem__)
    return Speed(bench, largest_size, speeds[largest_size], fastest_size, speeds[fastest_size])


def quantile(values: Iterable[float], share: float) -> float:
    """The value with this share of the values below it, between two neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def error_text(errors: Sequence[float]) -> str:
    """Median, 90th percentile and largest of the absolute errors."""
    absolute = [abs(error) for error in errors]
    return (
        f"absolute error: median {statistics.median(absolute):.1%},"
        f" 90th percentile {quantile(absolute, 0.9):.1%}, largest {max(absolute):.1%}"
    )


def predictions_of(benches: Mapping[str, Rows], *, smallest_size: int = 1) -> dict[str, Prediction]:
    """The predictions of a card by the name of the bench, without those of tf32."""
    found = {
        name: prediction(name, rows, smallest_size=smallest_size)
        for name, rows in benches.items()
        if "tf32" not in name
    }
    return {name: known for name, known in found.items() if known is not None}


def speeds_of(benches: Mapping[str, Rows]) -> list[Speed]:
    """The speeds of a card, lowest share of the best first."""
    card_mib = max(memory_mib for rows in benches.values() for _, memory_mib, _ in rows)
    found = [speed(name, rows, card_mib) for name, rows in benches.items()]
    return sorted((known for known in found if known is not None), key=lambda known: known.share)


def section(card: str, benches: Mapping[str, Rows]) -> str:
    """The table of a card and its summary."""
    predictions = predictions_of(benches)
    rows = [
        {
            "bench": known.bench,
            "sizes": known.sizes,
            "largest size": known.largest_size,
            "predicted MiB": f"{known.predicted_mib:,.0f}",
            "measured MiB": f"{known.measured_mib:,.0f}",
            "error %": f"{100 * known.error:+.1f}",
        }
        for known in predictions.values()
    ]
    errors = [known.error for known in predictions.values()]
    too_low = [known.bench for known in predictions.values() if known.error < -TOO_LOW_SHARE]
    without_one = [known.error for known in predictions_of(benches, smallest_size=2).values()]
    speeds = speeds_of(benches)
    slower = [known for known in speeds if known.share < SLOWER_SHARE]
    worst = speeds[0]
    notes = [
        f"{card}: {len(errors)} benches, {error_text(errors)}",
        f"too low by more than {TOO_LOW_SHARE:.0%}: {', '.join(too_low) or 'none'}",
        f"without size 1: {len(without_one)} benches, {error_text(without_one)}",
        f"the largest size is slower than {SLOWER_SHARE} of the best in {len(slower)} of"
        f" {len(speeds)} benches whose largest size fills {FULL_SHARE} of the card, with"
        f" {FEWEST_SIZES_OF_A_SPEED} sizes or more; worst {worst.bench}:"
        f" {worst.best_speed:,.0f} items/s at {worst.fastest_size},"
        f" {worst.largest_size_speed:,.0f} at {worst.largest_size} ({worst.share:.2f})",
    ]
    return f"## {card}\n\n{markdown(rows, notes)}"


def main() -> None:
    chosen = command_line(__doc__, writes=True).parse_args()
    known = json.loads(MILABENCH.read_text())
    head = (
        f"Arithmetic on measurements of {known['source']}, commit {known['commit']}"
        f" ({known['versions']}). Nothing of lightning-batchmem ran, so this is no test of it. A"
        " least-squares line through the sizes up to half of the largest predicts the memory at the"
        " largest."
    )
    text = "\n\n".join([head, *[section(*card) for card in known["cards"].items()]])
    print(text)
    if chosen.write:
        write_page(RESULTS, text)


if __name__ == "__main__":
    main()
