import json
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_batchmem.plan.notes import Note, NoteKind, in_order
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.printing import printable
from lightning_batchmem.plan.recipe import Recipe
from lightning_batchmem.plan.records import MIB, PHASES, Chosen, Growth, Speed, Trial, TrialMemory
from tests.helpers.plans import plan_with, search_notes, trial_with

FINITE = st.floats(allow_nan=False, allow_infinity=False)


# No size is smaller or larger.
WHOLE = st.integers(1, 2**63 - 1)
TEXT = st.text().map(printable)
STRATEGIES = {
    int: WHOLE,
    int | None: st.none() | WHOLE,
    str: TEXT,
    str | None: st.none() | TEXT,
    tuple[str, ...]: st.lists(TEXT).map(tuple),
    tuple[int, ...]: st.lists(WHOLE).map(tuple),
}


NOTES = st.builds(Note, st.sampled_from(get_args(NoteKind)), TEXT)


def any_of(kind, **strategies):
    """Instances of a dataclass, with every field that has no strategy drawn by its type."""
    types = get_type_hints(kind)
    by_type = {name: STRATEGIES.get(annotation, ...) for name, annotation in types.items()}
    return st.builds(kind, **{**by_type, **strategies})


TIMES = dict.fromkeys(("step_seconds", "samples_per_s"), st.none() | FINITE)
PEAKS = st.dictionaries(st.sampled_from(PHASES), st.integers(0, 2**50))
TRIALS = any_of(
    Trial,
    memory=any_of(TrialMemory, phase_peak_bytes=PEAKS),
    outcome=st.sampled_from(["ok", "over_limit"]) | TEXT,
    notes=st.lists(NOTES).map(tuple),
    growth=st.none() | any_of(Growth, batches=st.none() | st.integers(1, 2**50)),
    **TIMES,
)
RECIPES = any_of(
    Recipe,
    counts_batches=st.booleans(),
    learning_rates=st.lists(FINITE).map(tuple),
    learning_rate=st.none() | FINITE,
    trainer_settings=st.dictionaries(TEXT, WHOLE),
)
SPEEDS = st.lists(any_of(Speed, samples_per_s=st.floats(1, 1e9)), min_size=2, max_size=2).map(tuple)
NO_NOTES = {"notes": st.just(())}
PLANS = any_of(
    Plan,
    chosen=any_of(Chosen, speeds=SPEEDS, **NO_NOTES),
    trials=st.lists(TRIALS, max_size=5).map(tuple),
    recipe=RECIPES,
    project_recipe=st.none() | RECIPES,
    notes=st.lists(NOTES).map(tuple),
)
PLAN = Plan(
    Chosen(
        32,
        "memory",
        "it passed a rehearsal, and the limit leaves little room above it.",
        fastest_batch_size=32,
        largest_batch_size=32,
    ),
    trials=(
        Trial(
            2,
            "ok",
            TrialMemory({"forward": 104 * MIB}),
            step_seconds=0.012,
            samples_per_s=2 / 0.012,
        ),
        Trial(8, "ok", TrialMemory({"forward": 116 * MIB})),
        Trial(
            64,
            "over_limit",
            TrialMemory({"forward": 228 * MIB}, held_peak_bytes=250 * MIB),
            "rehearsal",
        ),
        Trial(
            32,
            "ok",
            TrialMemory({"forward": 164 * MIB}, held_peak_bytes=180 * MIB),
            "rehearsal",
            step_seconds=0.04,
            samples_per_s=32 / 0.04,
        ),
    ),
    limit_bytes=200 * MIB,
)


@settings(deadline=None, max_examples=30)
@given(PLANS)
def test_a_plan_read_from_its_json_is_equal(plan):
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_with_few_fields_is_read():
    chosen = {"batch_size": 64, "limited_by": "memory", "why": "it passed."}
    plan = Plan.from_json(json.dumps({"chosen": chosen, "trials": [], "limit_bytes": 1}))
    assert plan == Plan(Chosen(64, "memory", "it passed."), (), 1)


def test_a_flat_plan_of_an_earlier_version_is_refused():
    data = json.loads(PLAN.to_json())
    chosen = data.pop("chosen")
    flat = {**data, **chosen}
    with pytest.raises(ValueError, match=r"plans of version 0\.5 and older cannot"):
        Plan.from_json(json.dumps(flat))


def test_unknown_keys_are_ignored():
    data = json.loads(PLAN.to_json())
    for part in (data, data["trials"][0]):
        part["of a later version"] = 1
    assert Plan.from_json(json.dumps(data)) == PLAN


@pytest.mark.parametrize("text", ["", "[]", "1", "null", "{}", '{"trials": 3}'])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match=r"text must be the JSON of a Plan, got|Expecting value"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("chosen", "batch_size"), 16.0),
        (("chosen", "batch_size"), True),
        (("limit_bytes",), "1"),
        (("limit_bytes",), 10**400),
        (("trials", 0, "step_seconds"), -(10**400)),
        (("chosen", "limited_by"), None),
        (("chosen", "is_verified"), 1),
        (("notes",), "a note"),
        (("trials",), {}),
        (("trials", 0), "batch_size"),
        (("trials", 0, "outcome"), []),
        (("trials", 0, "step_seconds"), "1"),
        (("trials", 0, "step_seconds"), float("inf")),
    ],
)
def test_a_wrong_type_is_refused(path, value):
    data = json.loads(PLAN.to_json())
    part = data
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(ValueError, match="text must be the JSON of a Plan, got"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_without_samples_is_refused(size):
    trials = (replace(PLAN.trials[0], batch_size=size),)
    for plan in (plan_with(PLAN, batch_size=size), replace(PLAN, trials=trials)):
        with pytest.raises(ValueError, match=f"of a plan must be at least 1, got {size}"):
            Plan.from_json(plan.to_json())


# Clear the screen, set a title, turn the direction, begin a line, and no character at all.
CONTROLS = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\r\n\x00\x7f\ud800"


def with_text(text):
    """A plan that has the text wherever it has one."""
    note = Note(text, text)
    trial = replace(PLAN.trials[0], outcome=text, kind=text, notes=(note,), error=text)
    # The phase of a line, and a trial that no line uses.
    fitted = tuple(Trial(size, "ok", TrialMemory({text: size * MIB})) for size in (1, 2))
    return plan_with(
        PLAN,
        limited_by=text,
        trials=(trial, *fitted),
        why=text,
        device=text,
        notes=(note,),
        parameters=text,
        budget_name=text,
        place=text,
        simulated=True,
    )


@pytest.mark.parametrize("read", [lambda plan: plan, lambda plan: Plan.from_json(plan.to_json())])
def test_no_text_of_a_plan_controls_a_terminal(read):
    plan = read(with_text(f"one{CONTROLS}two"))
    for text in (str(plan), plan.short_text(), repr(plan), plan._repr_markdown_()):
        assert all(line.isprintable() for line in text.split("\n"))
        assert r"one\x1b[2J\x1b]0;title\x07\x9b31m\u202e" in text
    read_again = Plan.from_json(plan.to_json())
    assert all(text.isprintable() for text in (read_again.device, read_again.parameters))
    assert Plan.from_json(read_again.to_json()) == read_again


def test_a_plan_without_some_readings_is_shown():
    """Another program may have written it."""
    slow = replace(PLAN.trials[0], batch_size=64, samples_per_s=0.0)
    plan = plan_with(
        PLAN,
        learning_rate=0.1,
        trials=(*PLAN.trials, slow),
        largest_batch_size=64,
    )
    for text in (str(plan), plan.short_text()):
        assert "learning rate" not in text
    assert "fits 64 (predicted)" in str(plan)


@pytest.mark.parametrize(("verified", "word"), [(True, "verified"), (False, "rehearsed")])
def test_a_size_of_a_plan_that_is_not_verified_is_not_either(verified, word):
    """Later steps may keep more than there is room for."""
    text = str(plan_with(PLAN, verified=verified))
    assert f"fits 32 ({word})" in text
    assert ("not verified" in text) == (not verified)


def test_a_long_text_is_cut_off():
    text = str(with_text(10_000_000 * "x"))
    assert len(text) < 40_000
    assert "x ..." in text


def test_values_of_another_version_are_shown():
    data = json.loads(PLAN.to_json())
    data["chosen"]["limited_by"] = "moon_phase"
    data["trials"][0] |= {"outcome": "killed", "kind": "climb"}
    text = str(Plan.from_json(json.dumps(data)))
    assert "limited by moon_phase" in text
    assert "| climb     | killed " in text


def test_the_text_of_a_plan():
    assert str(PLAN) == "\n".join(
        [
            "batch size 32, limited by memory, verified by a rehearsal",
            "  why       32 samples: it passed a rehearsal, and the limit leaves little room",
            "            above it.",
            "  memory    180.0 of at most 200.0 MiB",
            "  tensors   164.0 MiB; predicted from smaller sizes: 164.0 MiB",
            "  line      100.0 MiB + 2.0 MiB a sample (forward)",
            "  sizes     fits 32 (verified) · fastest 32",
            "| run       | fits | size | tensors MiB | process MiB |   ms | samples/s |",
            "|-----------|------|------|-------------|-------------|------|-----------|",
            "| few steps | yes  |    2 |       104.0 |             | 12.0 |       167 |",
            "| few steps | yes  |    8 |       116.0 |             |      |           |",
            "| rehearsal | no   |   64 |       228.0 |       250.0 |      |           |",
            "| rehearsal | yes  |   32 |       164.0 |       180.0 | 40.0 |       800 |",
        ]
    )


def test_the_text_has_what_else_a_person_should_know():
    plan = plan_with(
        PLAN,
        verified=False,
        limited_by="target_batch_size",
        recipe=Recipe(32, 4, 2, 256, 100, learning_rates=(0.2,)),
        project_recipe=Recipe(16, 4, 2, 128, 200, learning_rates=(0.1,)),
        speeds=(Speed(16, 100.0), Speed(32, 90.0)),
        notes=(Note("training", "a warning"), Note("search", "a note")),
    )
    text = str(plan)
    assert text.startswith(
        "batch size 32 on each of 2 ranks, limited by target_batch_size, not verified"
    )
    for row in (
        "memory    180.0 of at most 200.0 MiB\n",
        "training  128 (2 ranks x 4 x 16) -> 256 (2 ranks x 4 x 32) samples a step, 200\n"
        "            -> 100 steps, learning rate 0.1 -> 0.2\n  note      a warning\n"
        "  why",
        "note      a note\n  speed     200 samples/s at 16 (yours), 180 at 32\n",
    ):
        assert row in text
    assert "predicted" not in str(replace(PLAN, trials=PLAN.trials[-1:]))
    without_held = replace(
        PLAN, trials=(*PLAN.trials[:-1], trial_with(PLAN.trials[-1], held_peak_bytes=None))
    )
    assert "  memory    at most 200.0 MiB\n  tensors   164.0 MiB; pr" in str(without_held)


def test_the_seconds_of_a_training_are_those_of_its_steps():
    plan = replace(PLAN, recipe=Recipe(32, 4, num_steps=100))
    assert plan.training_seconds == pytest.approx(100 * 4 * 0.04)
    assert PLAN.training_seconds is None


def test_a_notebook_shows_the_text_and_a_list_one_line():
    assert PLAN._repr_markdown_() == f"```\n{PLAN}\n```"
    assert repr(PLAN) == "<Plan: batch size 32, limited by memory, verified by a rehearsal>"


def test_no_line_of_a_plan_is_longer_than_80_columns():
    large = Trial(
        1_048_576,
        "over_limit",
        TrialMemory({"backward": 140_000 * MIB}, held_peak_bytes=144_384 * MIB),
        "rehearsal",
        step_seconds=12.3456,
        samples_per_s=70_000.0,
    )
    plan = plan_with(
        PLAN,
        batch_size=large.batch_size,
        budget_name="max_tokens_of_a_batch",
        limited_by="limit_train_batches",
        recipe=Recipe(ranks=16),
        trials=(large,),
        notes=(Note("earlier_plan", f"/{'a' * 100}/plan.json cannot be read."),),
    )
    for text in (str(plan), plan.short_text()):
        first, *others = text.splitlines()
        assert max(map(len, (first, *others))) <= 80
        # What continues a line is indented.
        assert [line for line in others if not line.startswith(("  ", "|"))] == []
        words = "".join(text.split())
        assert "".join(search_notes(plan)[0].split()) in words


def test_the_short_text_has_four_rows_and_all_notes_but_those_about_the_search():
    plan = plan_with(
        PLAN,
        recipe=Recipe(32, 4, 1, 128, 10),
        project_recipe=Recipe(128, 1, 1, 128, 10),
        speeds=(Speed(16, 100.0), Speed(32, 90.0)),
        notes=in_order(
            [
                Note("search", "left out"),
                Note("training", "one"),
                Note("risk", "another"),
                Note("training", "two"),
            ]
        ),
    )
    assert plan.short_text() == "\n".join(
        [
            "BatchFinder: batch size 32, limited by memory, verified by a rehearsal",
            "  training  128 (128 -> 4 x 32) samples a step, 10 steps",
            "  note      one",
            "  note      two",
            "  why       32 samples instead of the project's 128: it passed a rehearsal, and",
            "            the limit leaves little room above it.",
            "  memory    180.0 of at most 200.0 MiB",
            "  note      another",
            "  details   print the plan, or set verbose=True",
        ]
    )
    assert "  note      left out\n" in str(plan)
    nothing_ran = Plan(Chosen(1, "dataset", "", is_verified=False), (), 200 * MIB)
    assert nothing_ran.short_text().splitlines()[1:] == [
        "  memory    at most 200.0 MiB",
        "  details   print the plan, or set verbose=True",
    ]
