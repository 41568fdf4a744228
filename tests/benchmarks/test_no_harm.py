"""Trainings with and without BatchFinder, and how they are judged."""

import sys

import pytest

from benchmarks import no_harm
from benchmarks.no_harm_projects import PROJECTS

OWN_METRICS = (0.90, 0.92, 0.94)


def training(name="finetuning", way="own", seed=0, metric=0.9, **others):
    row = {
        "project": name,
        "way": way,
        "seed": seed,
        "batch_size": 16,
        "accumulate_grad_batches": 1,
        "steps": 252,
        "metric": metric,
        "samples_per_s": 100.0,
        "search_seconds": 0.0,
        "seconds": 2.0,
        "search_steps": 0,
    }
    if way != "own":
        row |= {"warnings": ["It may end worse."], "first_note": "", "first_row": "training"}
    return row | others


def trainings_of(path, *rows):
    trainings = no_harm.Trainings(path / "no_harm.json")
    for row in rows:
        trainings.add(row)
    return trainings


@pytest.fixture
def own():
    return [training(seed=seed, metric=metric) for seed, metric in enumerate(OWN_METRICS)]


def test_a_metric_is_compared_in_spreads_of_the_own_size(own):
    other = [training(seed=1, metric=0.86)]
    assert no_harm.spread(own) == pytest.approx(0.04)
    assert no_harm.worse_by(own, other, is_loss=False) == pytest.approx(1.5)
    assert no_harm.worse_by(own, other, is_loss=True) == pytest.approx(-1.5)


def test_a_small_harm_on_every_seed_is_counted(own):
    other = [row | {"metric": row["metric"] - 0.01} for row in own]
    assert no_harm.worse_by(own, other, is_loss=False) == pytest.approx(0.25)
    assert no_harm.seeds_worse(own, other, is_loss=False) == 3
    assert no_harm.seeds_worse(own, other, is_loss=True) == 0
    assert no_harm.seeds_worse(own, own, is_loss=False) == 0


def test_a_spread_of_zero_divides_nothing():
    same = [training(metric=1.0)]
    assert no_harm.worse_by(same, same, is_loss=False) == 0
    assert no_harm.worse_by(same, [training(metric=0.685)], is_loss=False) > 1


def test_the_fastest_trainings_of_the_same_seeds_are_compared():
    own = [training(seed=seed, samples_per_s=speed) for seed, speed in enumerate((80, 100))]
    # No training with this seed had a finder.
    own.append(training(seed=2, samples_per_s=500))
    other = [training(seed=seed, samples_per_s=speed) for seed, speed in enumerate((88, 50))]
    assert no_harm.relative_speed(own, other) == 0.88
    assert no_harm.speed_ratios(own, other) == [1.1, 0.5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("BatchFinder: batch size 24\n  training  16 -> 24 samples a step", "training"),
        ("BatchFinder: batch size 24, verified by a\n  rehearsal\n  memory    1 MiB", "memory"),
        ("BatchFinder: batch size 24", ""),
    ],
)
def test_the_first_row_of_a_printed_plan(text, expected):
    assert no_harm.first_row(text) == expected


def test_the_first_note_is_a_warning_if_there_is_one():
    row = training(way="memory", first_note="A remark.")
    assert no_harm.first_note(row) == "warning: It may end worse."
    assert no_harm.first_note(row | {"warnings": []}) == "note: A remark."
    assert no_harm.first_note(row | {"warnings": [], "first_note": ""}) == "none"


def test_harm_that_the_plan_announces_is_told_from_other_harm(own, tmp_path):
    memory = training(way="memory", metric=0.685, steps=40)
    auto = training(way="auto", metric=0.85, steps=168, warnings=[], samples_per_s=80.0)
    recipe = training(way="recipe", metric=OWN_METRICS[0])
    trainings = trainings_of(tmp_path, *own, memory, auto, recipe)
    of_auto, of_recipe, of_memory = no_harm.summary(trainings, ["finetuning"])
    assert of_auto == (
        "auto: worse in 1 of 1 (finetuning), of these not announced 1; slower in 1 of 1"
        " (finetuning); at least 67% of the optimizer steps of the own size; the metric worse in 1,"
        " equal in 0 of 1 trainings"
    )
    assert of_recipe.startswith("recipe: worse in 0 of 1, of these not announced 0; slower in 0")
    assert of_memory.startswith("memory: worse in 1 of 1 (finetuning), of these not announced 0;")
    assert "at least 16% of the optimizer steps of the own size" in of_memory
    assert of_recipe.endswith("the metric worse in 0, equal in 1 of 1 trainings")


def test_only_what_is_missing_is_trained(tmp_path):
    trainings = trainings_of(tmp_path, training(), training(way="auto"))
    again = no_harm.Trainings(tmp_path / "no_harm.json")
    assert again.rows == trainings.rows
    assert list(no_harm.missing(again, ["finetuning"], 2)) == [
        ("finetuning", "recipe", 0),
        ("finetuning", "memory", 0),
        *(("finetuning", way, 1) for way in no_harm.WAYS),
    ]


def test_an_error_is_in_the_notes(own, tmp_path):
    failed = {"project": "finetuning", "way": "auto", "seed": 1, "error": "ValueError: no"}
    trainings = trainings_of(tmp_path, *own, training(way="auto"), failed)
    assert no_harm.summary(trainings, ["finetuning"])[-1] == (
        "finetuning, auto, seed 1: ValueError: no"
    )


def test_a_project_is_trained_in_all_ways(tmp_path, monkeypatch, capsys):
    path = tmp_path / "no_harm.json"
    monkeypatch.setattr(no_harm, "RESULTS", tmp_path / "no_harm.md")
    options = ["--only", "finetuning", "--seeds", "1", "--most-epochs", "2"]
    monkeypatch.setattr(sys, "argv", ["no_harm", *options, "--file", str(path), "--write"])
    no_harm.main()
    printed = capsys.readouterr().out
    assert path.with_suffix(".md").read_text() == printed
    rows = {row["way"]: row for row in no_harm.Trainings(path).rows}
    assert list(rows) == list(no_harm.WAYS)
    own_size = PROJECTS["finetuning"].own_size
    assert [rows[way]["batch_size"] for way in ("own", "recipe")] == [own_size, own_size]
    # Two of the four epochs.
    assert [rows[way]["steps"] for way in ("own", "recipe")] == [126, 126]
    assert rows["recipe"]["metric"] == rows["own"]["metric"]
    assert own_size <= rows["auto"]["batch_size"] <= 1.5 * own_size
    assert 84 <= rows["auto"]["steps"] <= 126
    assert rows["memory"]["batch_size"] == 100
    assert no_harm.is_announced(rows["memory"])
    assert all(rows[way]["search_steps"] > 0 for way in ("auto", "recipe", "memory"))
    assert rows["own"]["search_steps"] == 0
