"""The piles of parts: what they add up to, what stands beside and above them, and that nothing covers anything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from lightning_batchmem.measure.breakdown import MemoryBreakdown
from lightning_batchmem.measure.estimate import Estimate
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.report.figures import plot_composition
from tests.drawn import PARTS, SUMMARY, check_layout, labels, line

GIB = 1024 * MIB


def test_the_pile_adds_up_to_the_peak() -> None:
    figure = plot_composition(PARTS)
    bars = figure.axes[0].patches
    assert [(bar.get_y(), bar.get_height()) for bar in bars] == [
        (0, 60), (60, 100), (160, 90), (250, 200), (450, 50), (500, 1500),
    ]  # fmt: skip
    assert labels(figure) == [
        "activations, temporaries\n1,500 MiB, 75.0%",
        "batch\n50.0 MiB, 2.5%",
        "optimizer\n200 MiB, 10.0%",
        "gradients\n90.0 MiB, 4.5%",
        "model (parameters, buffers)\n100 MiB, 5.0%",
        "the rest\n60.0 MiB, 3.0%",
    ]
    assert "2,000 MiB" in figure._suptitle.get_text()
    assert len({bar.get_facecolor() for bar in bars}) == len(bars)
    assert labels(plot_composition(SUMMARY)) == [*labels(figure), "limit 4,096 MiB"]


def test_a_rest_below_0_hangs_below_the_pile() -> None:
    figure = plot_composition(replace(PARTS, other_bytes=-40 * MIB))
    bars = figure.axes[0].patches
    assert (bars[0].get_y(), bars[0].get_height()) == (0, -40)
    assert bars[1].get_y() == 0
    low, high = figure.axes[0].get_ylim()
    assert low <= -40
    assert high >= 1940


ESTIMATE = Estimate(100 * MIB, 100 * MIB, 200 * MIB, 49 * MIB)
CUDA = replace(
    SUMMARY, device="cuda", peak_reserved_bytes=2600 * MIB, limit_bytes=4000 * MIB, outside_bytes=400 * MIB
)  # 600 MiB cached


def piles(figure: Figure) -> dict[str, list[tuple[float, float]]]:
    """Bottom and height of each bar, of the wide pile and of the narrow one."""
    bars = figure.axes[0].patches
    return {
        name: [(bar.get_y(), bar.get_height()) for bar in bars if round(bar.get_width(), 6) == width]
        for name, width in (("measured", 0.8), ("estimate", 0.4))
    }


def test_the_estimate_stands_beside_the_measurement_on_the_same_floor() -> None:
    figure = plot_composition(replace(SUMMARY, estimate=ESTIMATE))
    assert piles(figure)["measured"] == piles(plot_composition(PARTS))["measured"]
    assert piles(figure)["estimate"] == [(60, 100), (160, 100), (260, 200), (460, 49)]
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["measured", "estimate"]
    colours = [bar.get_facecolor() for bar in figure.axes[0].patches]
    assert colours[1:5] == colours[6:]
    assert labels(figure)[1:6] == [
        "batch\n50.0 MiB, 2.5% (estimate 49.0 MiB)",
        "optimizer\n200 MiB, 10.0% (estimate 200 MiB)",
        "gradients\n90.0 MiB, 4.5% (estimate 100 MiB)",
        "model (parameters, buffers)\n100 MiB, 5.0% (estimate 100 MiB)",
        "the rest\n60.0 MiB, 3.0%",
    ]


def test_an_optimizer_without_a_rule_is_left_out_and_that_is_said() -> None:
    figure = plot_composition(replace(SUMMARY, estimate=replace(ESTIMATE, optimizer_state_bytes=None)))
    assert piles(figure)["estimate"] == [(60, 100), (160, 100), (260, 49)]
    assert labels(figure)[2] == "optimizer\n200 MiB, 10.0% (no estimate)"
    assert figure.axes[0].get_xticklabels()[1].get_text().split() == ["estimate", "without", "the", "optimizer"]


def test_an_estimate_too_low_to_be_seen_is_in_the_legend_alone() -> None:
    figure = plot_composition(replace(SUMMARY, estimate=Estimate(3 * MIB, 3 * MIB, 6 * MIB, 3000)))
    assert piles(figure)["estimate"] == []
    assert labels(figure)[1] == "batch\n50.0 MiB, 2.5% (estimate 2.9 KiB)"
    assert list(figure.axes[0].get_xticks()) == []


def test_what_is_cached_and_what_is_outside_lies_above_the_pile() -> None:
    figure = plot_composition(CUDA)
    assert piles(figure)["measured"][-2:] == [(2000, 600), (2600, 400)]
    assert labels(figure)[:2] == ["outside the allocator\n400 MiB", "cached, unused\n600 MiB"]
    assert line(figure, "limit 4,000 MiB\non top of what is outside")[1] == [4400, 4400]
    assert "2,000 MiB" in figure._suptitle.get_text()
    hatches = [bar.get_hatch() for bar in figure.axes[0].patches]
    assert hatches[:6] == [None] * 6
    assert len({*hatches}) == 3
    below = plot_composition(replace(CUDA, breakdown=replace(PARTS, other_bytes=-40 * MIB)))
    assert piles(below)["measured"][-2] == (1940, 600)  # the rest hangs below 0


def test_only_what_is_known_lies_above_the_pile() -> None:
    figure = plot_composition(replace(CUDA, outside_bytes=None))
    assert piles(figure)["measured"][-1] == (2000, 600)
    assert line(figure, "limit 4,000 MiB")[1] == [4000, 4000]
    assert "outside" not in " ".join(labels(figure))
    figure = plot_composition(replace(CUDA, peak_reserved_bytes=None))
    assert piles(figure)["measured"][-1] == (2000, 400)
    assert "cached" not in " ".join(labels(figure))


def test_others_on_the_device_do_not_press_the_pile_to_the_floor() -> None:
    figure = plot_composition(replace(CUDA, outside_bytes=60 * GIB))
    assert piles(figure)["measured"][-1] == (2000, 600)
    assert labels(figure)[0] == "outside the allocator\n60.0 GiB (above)"
    assert line(figure, "limit 4,000 MiB")[1] == [4000, 4000]


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ({}, "Memory of a training step at its peak: 2,000 MiB"),
        ({"stage": "validate"}, "Memory of a validation step at its peak: 2,000 MiB"),
        ({"stage": "predict"}, "Memory of a prediction step at its peak: 2,000 MiB"),
        ({"has_peak": False}, "Memory of a training step as far as it was seen: 2,000 MiB"),
    ],
)
def test_the_title_says_which_step_it_was(change: dict[str, object], title: str) -> None:
    assert plot_composition(replace(SUMMARY, **change))._suptitle.get_text() == title  # type: ignore[arg-type]


def test_the_formula_names_every_part_of_the_pile() -> None:
    figure = plot_composition(PARTS)
    total, *breakdown = figure._supxlabel.get_text().replace(" = ", " + ").split(" + ")
    assert total == "total"
    assert sorted(breakdown) == sorted(label.split("\n")[0].split(" (")[0].split(",")[0] for label in labels(figure))


def test_a_share_that_is_not_0_is_not_called_0() -> None:
    figure = plot_composition(replace(PARTS, batch_bytes=3000, parameters_bytes=0))
    assert labels(figure)[1] == "batch\n2.9 KiB, <0.1%"
    assert labels(figure)[4] == "model (parameters, buffers)\n0.0 MiB, 0.0%"


def test_without_parts_it_is_an_error_with_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"^parts must be known"):
        plot_composition(replace(SUMMARY, breakdown=None))


HUNDREDS = MemoryBreakdown(*[100 * GIB] * 5, -5 * GIB)
FIGURES = {
    "host": SUMMARY,
    "host, estimate": replace(SUMMARY, estimate=ESTIMATE),
    "all there is": replace(CUDA, estimate=ESTIMATE),
    "unknown optimizer": replace(CUDA, estimate=replace(ESTIMATE, optimizer_state_bytes=None)),
    "large cache": replace(CUDA, estimate=ESTIMATE, peak_reserved_bytes=5900 * MIB, limit_bytes=24 * GIB),
    "tiny batch": replace(
        CUDA, estimate=replace(ESTIMATE, batch_bytes=3000), breakdown=replace(PARTS, batch_bytes=3000)
    ),
    "many others": replace(CUDA, estimate=ESTIMATE, outside_bytes=60 * GIB),
    "long": replace(SUMMARY, limit_bytes=1500 * GIB, breakdown=HUNDREDS),
    "long, all": replace(
        CUDA,
        limit_bytes=1500 * GIB,
        breakdown=HUNDREDS,
        peak_bytes=HUNDREDS.peak_bytes,
        peak_reserved_bytes=700 * GIB,
        outside_bytes=100 * GIB,
        estimate=Estimate(*[100 * GIB] * 4),
        stage="validate",
        has_peak=False,
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_overlaps_and_nothing_is_cut_off(name: str) -> None:
    check_layout(plot_composition(FIGURES[name]))
