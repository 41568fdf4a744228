"""Draw the figure of docs/how-it-works.md: memory over batch size, as others measured it on a GPU.

The points are milabench's of its bench ``lightning``, which trains with Lightning, on an H100
(``benchmarks/published/milabench.json``). A least-squares line through the sizes up to half of the
largest one, as in ``benchmarks.published_law``, gives the largest size below 0.95 of the memory of
the card. Nothing of lightning-batchmem ran on this GPU.

    python -m benchmarks.law_figure
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from benchmarks.common import ROOT, command_line
from benchmarks.published_law import MILABENCH, memory_by_size, small_sizes
from lightning_batchmem.simulated_gpu.gpus import gpu_named

CARD = "H100"
BENCH = "lightning"
LIMIT_SHARE = 0.95
"""Share of the memory of a GPU that BatchFinder uses without ``memory_limit``."""

MIB_OF_GIB = 2**10


@dataclass(frozen=True)
class Theme:
    """The colours of a figure. Source of the colours of data: Okabe and Ito 2008."""

    background: str
    text: str
    used: str
    line: str
    limit: str
    size: str


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#1f2328", "#0072b2", "#d55e00", "#009e73"),
    "dark": Theme("#0d1117", "#e6edf3", "#e6edf3", "#56b4e9", "#e69f00", "#2ac79a"),
}


@dataclass(frozen=True)
class Law:
    """Measured memory, and the line through the small sizes, in GiB."""

    measured_gib: Mapping[int, float]
    intercept_gib: float
    slope_gib: float
    limit_gib: float

    @classmethod
    def of_milabench(cls) -> Law:
        rows = json.loads(MILABENCH.read_text())["cards"][CARD][BENCH]
        measured_gib = {size: mib / MIB_OF_GIB for size, mib in memory_by_size(rows).items()}
        small = small_sizes(measured_gib)
        line = statistics.linear_regression(small, [measured_gib[size] for size in small])
        limit_gib = LIMIT_SHARE * gpu_named(CARD).memory_bytes / 2**30
        return cls(measured_gib, line.intercept, line.slope, limit_gib)

    @property
    def fitted_gib(self) -> dict[int, float]:
        """The measurements that the line was fitted to."""
        return {size: self.measured_gib[size] for size in small_sizes(self.measured_gib)}

    @property
    def chosen_size(self) -> int:
        """The largest size whose predicted memory is within the limit."""
        return int((self.limit_gib - self.intercept_gib) / self.slope_gib)

    def predicted_gib(self, size: float) -> float:
        return self.intercept_gib + self.slope_gib * size


def plot(law: Law, theme: Theme) -> Figure:
    """Plot the points, the line, the limit and the size, all with their names beside them."""
    figure = Figure(figsize=(6, 3.4), layout="constrained", facecolor=theme.background)
    axes = figure.subplots()
    axes.set_facecolor(theme.background)
    last_size = 1.12 * max(law.measured_gib)
    ends = (0, last_size)
    axes.plot(ends, [law.predicted_gib(size) for size in ends], color=theme.line, linewidth=1.8)
    axes.axhline(law.limit_gib, color=theme.limit, linewidth=1.8, linestyle="--")
    chosen = law.chosen_size
    axes.plot([chosen, chosen], [0, law.limit_gib], color=theme.size, linewidth=1.8, linestyle=":")
    later = {size: gib for size, gib in law.measured_gib.items() if size not in law.fitted_gib}
    for points, fill in ((law.fitted_gib, theme.used), (later, theme.background)):
        axes.plot(
            list(points),
            list(points.values()),
            "o",
            color=theme.used,
            markerfacecolor=fill,
            markeredgewidth=1.6,
            markersize=7,
        )
    texts = (
        (300, 21, "measured: the line is fitted to these", theme.used, "left"),
        (490, 53, "measured: the line predicts these", theme.used, "right"),
        (8, law.limit_gib + 2, f"limit: {LIMIT_SHARE} of an 80 GB {CARD}", theme.limit, "left"),
        (chosen - 12, 4, f"batch size {chosen} fits", theme.size, "right"),
    )
    for x, y, text, color, side in texts:
        axes.text(x, y, text, color=color, ha=side, fontsize=11)
    axes.set_xlim(0, last_size)
    axes.set_ylim(0, 92)
    title = f"A Lightning training on an {CARD}, measured by milabench"
    axes.set_title(title, color=theme.text, fontsize=12, loc="left")
    axes.set_xlabel("batch size", color=theme.text, fontsize=11)
    axes.set_ylabel("memory (GiB)", color=theme.text, fontsize=11)
    axes.tick_params(colors=theme.text, labelsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(theme.text)
    return figure


def draw_law(out: Path) -> None:
    """Write the figure in light and in dark."""
    law = Law.of_milabench()
    for name, theme in THEMES.items():
        path = out / f"law-{name}.png"
        plot(law, theme).savefig(path, dpi=200)
        use_palette(path)
    largest = max(law.measured_gib)
    print(
        f"{CARD}, {BENCH}: {law.intercept_gib:.1f} GiB and {1024 * law.slope_gib:.1f} MiB a sample,"
        f" {law.predicted_gib(largest):.1f} GiB predicted at {largest},"
        f" {law.measured_gib[largest]:.1f} GiB measured; {law.chosen_size} samples within the limit"
        f" of {law.limit_gib:.1f} GiB"
    )


def use_palette(path: Path) -> None:
    """Write a PNG again with a palette, which makes the committed file four times smaller."""
    with Image.open(path) as image:
        palette = image.convert("RGB").quantize(
            method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
        )
    palette.save(path, optimize=True)


def main() -> None:
    command_line(__doc__).parse_args()
    draw_law(ROOT / "docs" / "figures")


if __name__ == "__main__":
    main()
