"""The data in the figure of a search, read from its lines."""

from dataclasses import replace

import pytest

from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.plan_figure import plot_search
from tests.profile.test_figures import PLAN, TRIALS, lines


def test_memory_has_trials_line_limit_and_chosen_size():
    shown = lines(plot_search(PLAN))
    sizes, predicted = shown.pop("fitted line")
    assert (sizes[0], sizes[-1]) == (0, pytest.approx(1.1 * 48))
    assert predicted == pytest.approx([100 + 2 * size for size in sizes])
    assert shown == {
        "held": ([2, 32], [104, 165]),
        # A size that ran out of memory is drawn at the limit: its 90 MiB are no complete peak.
        "did not fit": ([48], [200]),
        "limit 200.0 MiB": ([0, 1], [200, 200]),
        "chosen: 32": ([32, 32], [0, 1]),
    }
    held = replace(TRIALS[0], peak_held_bytes=130 * MIB)
    shown = lines(plot_search(replace(PLAN, trials=(held,))))
    assert (shown["held"], shown["live (tensors)"]) == (([2], [130]), ([2], [104]))


def test_throughput_is_below_it():
    figure = plot_search(replace(PLAN, ranks=2))
    shown = lines(figure, 1)
    # The size that ran out of memory has no time.
    assert shown["measured"] == ([2, 32], pytest.approx([2 / 0.012, 32 / 0.040]))
    assert figure.axes[1].lines[0].get_linestyle() == "-"
    title = figure.axes[0].get_title(loc="left")
    assert title == "Memory and throughput of each rank on host"
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


def test_both_have_the_fastest_size_where_it_was_not_chosen():
    figure = plot_search(replace(PLAN, fastest_batch_size=2))
    assert lines(figure)["fastest: 2"] == ([2, 2], [0, 1])
    places = [line.get_xdata() for line in figure.axes[1].lines[-2:]]
    assert places == [[32, 32], [2, 2]]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    # Each line has one name.
    assert len(set(texts)) == len(texts)
    assert "fastest: 32" not in lines(plot_search(replace(PLAN, fastest_batch_size=32)))


def test_without_times_there_is_memory_only():
    trials = tuple(replace(trial, samples_per_second=None) for trial in TRIALS)
    assert len(plot_search(replace(PLAN, trials=trials)).axes) == 1
    assert plot_search(replace(PLAN, trials=())) is None
