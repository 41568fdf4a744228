"""The data in each figure, read from its lines."""

import pickle
from dataclasses import replace

import matplotlib
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

from lightning_batchmem.plan.figures import plot_memory_over_steps, plot_search
from lightning_batchmem.plan.recipe import Recipe
from lightning_batchmem.plan.records import MIB, Trial, TrialMemory
from tests.helpers.plans import plan_with, trial_with
from tests.plan.test_plan import PLAN as OTHER_PLAN

TRIALS = (
    Trial(2, "ok", TrialMemory({"forward": 104 * MIB}), samples_per_s=2 / 0.012),
    Trial(32, "ok", TrialMemory({"forward": 164 * MIB}), samples_per_s=32 / 0.040),
    Trial(48, "out_of_memory", TrialMemory({"forward": 90 * MIB})),
)
PLAN = replace(OTHER_PLAN, trials=TRIALS, device="host")


def row(step, peak=100, stage="train", **columns):
    return {"step": step, "stage": stage, "peak_allocated_mib": peak, **columns}


def lines(figure, panel=0):
    """Coordinates of the lines, in the order of the legend."""
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in figure.axes[panel].lines
    }


def test_figures_leave_pyplot_and_the_settings_of_matplotlib():
    settings = dict(matplotlib.rcParams)
    plot_memory_over_steps([row(0)])
    plot_search(PLAN)
    assert (dict(matplotlib.rcParams), pyplot.get_fignums()) == (settings, [])


def test_a_figure_has_a_picture_for_notebooks_and_stays_one_of_matplotlib():
    figure = pickle.loads(pickle.dumps(PLAN.plot()))
    assert type(figure) is Figure
    assert figure._repr_png_().startswith(b"\x89PNG")


# --- the steps of a run


def test_memory_over_steps_shows_peaks_and_limit():
    rows = [row(0, 100, peak_reserved_mib=140, limit_mib=300), row(1, None)]
    rows += [row(2, 120, peak_reserved_mib=150, limit_mib=250), row(3, 130)]
    assert lines(plot_memory_over_steps(rows)) == {
        "process": ([0, 2], [140, 150]),
        "tensors": ([0, 2, 3], [100, 120, 130]),
        # It is that of the last row that has one, over the width of the figure.
        "limit 250.0 MiB": ([0, 1], [250, 250]),
    }
    for without in ([], [row(0, None)]):
        with pytest.raises(ValueError, match="no step has a peak of memory"):
            plot_memory_over_steps(without)


@pytest.mark.parametrize(("limit", "top", "shown"), [(150, 160, True), (10**6, 105, False)])
def test_a_limit_far_above_the_data_is_left_out_with_its_name(limit, top, shown):
    figure = plot_memory_over_steps([row(0, 0), row(1, 100, limit_mib=limit)])
    assert figure.axes[0].get_ylim() == (0, pytest.approx(top, abs=5))
    assert any(name.startswith("limit") for name in lines(figure)) == shown


def test_a_flat_line_is_not_cut_by_the_edge():
    figure = plot_memory_over_steps([row(step, 400 + step / 100) for step in range(3)])
    assert figure.axes[0].get_ylim() == (0, pytest.approx(420, abs=1))


def test_a_validation_is_drawn_at_the_training_step_before_it():
    validation = [row(0, 60, stage="validate"), row(1, 50, stage="validate")]
    shown = lines(plot_memory_over_steps([row(0), row(1), *validation, row(2)]))
    assert shown["process, peak of a validation"] == ([1], [60])
    shown = lines(plot_memory_over_steps([row(step, 50 + step, "test") for step in range(3)]))
    assert shown == {"process": ([0, 1, 2], [50, 51, 52])}


# --- a search


def test_a_budget_is_named_on_the_axes():
    figure = plot_search(replace(PLAN, budget_name="max_tokens"))
    assert [panel.get_ylabel() for panel in figure.axes][1] == "throughput (items/s)"
    assert figure.axes[-1].get_xlabel() == "max_tokens"


def test_memory_has_trials_line_limit_and_chosen_size():
    shown = lines(plot_search(PLAN))
    sizes, predicted = shown.pop("tensors, predicted")
    assert (sizes[0], sizes[-1]) == (0, pytest.approx(48 * 1.08))
    assert predicted == pytest.approx([100 + 2 * size for size in sizes])
    assert shown == {
        "process": ([2, 32], [104, 164]),
        # A size that ran out of memory is drawn at the limit: its 90 MiB are no complete peak.
        "did not fit": ([48], [200]),
        "limit 200.0 MiB": ([0, 1], [200, 200]),
        "chosen: 32": ([32, 32], [0, 1]),
    }
    held = trial_with(TRIALS[0], held_peak_bytes=130 * MIB)
    shown = lines(plot_search(replace(PLAN, trials=(held,))))
    assert (shown["process"], shown["tensors"]) == (([2], [130]), ([2], [104]))


def test_the_sizes_that_ran_are_the_ticks_unless_they_are_too_near_to_the_chosen_one():
    near = replace(TRIALS[0], batch_size=30)
    figure = plot_search(replace(PLAN, trials=(*TRIALS, near)))
    assert sorted(figure.axes[0].get_xticks()) == [2, 32, 48]


def test_throughput_is_below_it():
    figure = plot_search(replace(PLAN, recipe=Recipe(ranks=2)))
    shown = lines(figure, 1)
    # The size that ran out of memory has no time.
    (shown,) = [line for name, line in shown.items() if name.startswith("_child0")]
    assert shown == ([2, 32], pytest.approx([2 / 0.012, 32 / 0.040]))
    assert figure.axes[1].lines[0].get_linestyle() == "-"
    title = figure.axes[0].get_title(loc="left")
    assert title == "Memory and throughput of each rank on CPU"
    assert {text.get_text() for text in figure.axes[1].texts} == {"800", "167"}
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


def test_both_have_the_fastest_size_where_it_was_not_chosen():
    figure = plot_search(plan_with(PLAN, fastest_batch_size=2))
    assert lines(figure)["fastest: 2"] == ([2, 2], [0, 1])
    places = [line.get_xdata() for line in figure.axes[1].lines[-2:]]
    assert places == [[32, 32], [2, 2]]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    # Each line has one name.
    assert len(set(texts)) == len(texts)
    assert "fastest: 32" not in lines(plot_search(plan_with(PLAN, fastest_batch_size=32)))


def test_without_times_there_is_memory_only():
    trials = tuple(replace(trial, samples_per_s=None) for trial in TRIALS)
    assert len(plot_search(replace(PLAN, trials=trials)).axes) == 1
    with pytest.raises(ValueError, match="no size of this plan was measured"):
        replace(PLAN, trials=()).plot()
