"""The text of searches on simulated GPUs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.recipe import Recipe
from lightning_batchmem.plan.records import Chosen, Trial, TrialMemory
from lightning_batchmem.simulated_gpu.gpus import gpu_named
from lightning_batchmem.simulated_gpu.launch import FoundWorld, Outcome, World
from lightning_batchmem.simulated_gpu.text import (
    HIGHER_SHARE,
    Table,
    how_it_fits,
    needed_bytes,
    smallest_of_range,
    text_of,
)
from tests.helpers.plans import plan_with

GIB = 2**30
MIB = 2**20
CONTEXT_BYTES = 300 * MIB


def plan_of(batch_size=70, limit_gib=22.0, project=16, limited_by="memory", **changes):
    """A plan of a line of 1 GiB and 0.25 GiB a sample, of which the process holds 1.1 times."""
    live_bytes = GIB + batch_size * GIB // 4
    probed = 4 if batch_size == 8 else 8
    held_bytes = int(1.1 * live_bytes)
    plan = Plan(
        Chosen(batch_size, limited_by, "", is_verified=False, largest_batch_size=batch_size),
        trials=(
            Trial(
                probed,
                "ok",
                TrialMemory({"forward": GIB + probed * GIB // 4}, held_peak_bytes=4 * GIB),
            ),
            Trial(
                batch_size,
                "ok",
                TrialMemory({"forward": live_bytes}, held_peak_bytes=held_bytes),
                kind="rehearsal",
            ),
        ),
        limit_bytes=int(limit_gib * GIB),
        device="simulated RTX-4090",
        project_recipe=None if project is None else Recipe(batch_size=project),
        simulated=True,
    )
    return plan_with(plan, **changes)


def outcome_of(**changes):
    assumption = "All are assumed."
    notes = (Note("simulation", assumption), *changes.pop("notes", ()))
    return Outcome(gpu_named("RTX-4090"), plan_of(notes=notes, **changes), (assumption,))


def table_of(*outcomes):
    """The lines of a table, with its remarks."""
    table = Table(outcomes[0], [outcome.gpu.name for outcome in outcomes])
    rows = [table.row(outcome) for outcome in outcomes]
    return "\n".join([table.heading, *rows, "", table.remarks(outcomes, CONTEXT_BYTES)])


def rows_of(text):
    """The cells of the heading and of each row."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def in_a_world(devices, nodes=1, samples=None, asked=True, **changes):
    """An outcome of the first of several ranks."""
    size = changes.get("batch_size", 70)
    ranks = devices * nodes
    recipe = Recipe(size, ranks=ranks, effective_batch_size=samples or ranks * size)
    world = FoundWorld(devices, nodes, 344 * MIB, "NVIDIA/nccl#964", 5 * GIB)
    gpu = gpu_named(changes.pop("gpu", "RTX-4090"))
    plan = replace(plan_of(**changes), recipe=recipe)
    return Outcome(
        gpu,
        plan,
        asked=World(devices, nodes) if asked else World(),
        world=None if ranks == 1 else world,
    )


def test_the_text_answers_both_questions():
    recipes = (Recipe(16, 1, 1, 16, 100), Recipe(70, 1, 1, 70, 23))
    plan = plan_of(
        notes=(Note("training", "A warning."), Note("search", "A note.")),
        project_recipe=recipes[0],
    )
    plan = replace(plan, recipe=recipes[1])
    text = text_of(Outcome(gpu_named("RTX-4090"), plan=plan), CONTEXT_BYTES)
    assert text.splitlines() == [
        "batch size 70 on a simulated RTX-4090, limited by memory, rehearsed on the",
        "  simulated GPU",
        "  training  16 -> 70 samples a step, 100 -> 23 steps",
        "  memory    needs 20.3 of 22.0 GiB; 256.0 MiB a sample",
        "  own size  batch size 16: fits, 6.1 of 22.0 GiB",
        "  range     70 also fits if peaks on the real GPU are 8 % higher",
        "  assumed   300.0 MiB for the CUDA context; nothing else on the GPU",
        "  note      A warning.",
        "  note      A note.",
        "  next      search again on the GPU itself; nothing here ran on one",
    ]
    nearer = plan_of(limit_gib=21)
    text = text_of(Outcome(gpu_named("RTX-4090"), plan=nearer), CONTEXT_BYTES)
    assert "  range     66 to 70: 66 fits if peaks on the real GPU are 8 % higher" in text


def test_a_measured_size_needs_what_it_held_and_another_what_lies_between():
    plan = plan_of()
    assert needed_bytes(plan, 8) == 4 * GIB
    assert needed_bytes(plan, 39) == pytest.approx((4 * GIB + plan.held_peak_bytes) / 2)
    # Beyond the measured sizes the line decides.
    assert needed_bytes(plan, 4) == pytest.approx(1.1 * 2 * GIB)
    assert needed_bytes(plan, 80) == pytest.approx(1.1 * 21 * GIB)
    assert needed_bytes(replace(plan, trials=plan.trials[-1:]), 80) is None


@pytest.mark.parametrize(
    ("batch_size", "changes", "expected"),
    [
        (70, {}, "fits"),
        # The search stops below the largest size that fits.
        (72, {}, "may fit"),
        (80, {}, "too large"),
        (72, {"failed": 72}, "too large"),
        (72, {"failed": 73}, "may fit"),
        (72, {"trials": plan_of().trials[-1:]}, "not known"),
        (72, {"largest_batch_size": 72}, "fits"),
    ],
)
def test_whether_a_size_fits(batch_size, changes, expected):
    failed = changes.pop("failed", None)
    plan = plan_with(plan_of(), **changes)
    if failed is not None:
        plan = replace(plan, trials=(*plan.trials, Trial(failed, "over_limit", TrialMemory())))
    assert how_it_fits(plan, batch_size) == expected


@pytest.mark.parametrize(("outcome", "expected"), [("ok", "fits"), ("over_limit", "too large")])
def test_a_rehearsal_at_a_size_decides(outcome, expected):
    plan = plan_of()
    trial = Trial(72, outcome, TrialMemory({}, held_peak_bytes=21 * GIB), kind="rehearsal")
    plan = replace(plan, trials=(*plan.trials, trial))
    assert how_it_fits(plan, 72) == expected


def test_the_lower_end_is_a_multiple_too():
    plan = plan_of(64, limit_gib=19)
    assert smallest_of_range(plan) == 59
    assert smallest_of_range(plan, multiple_of=8) == 56
    assert smallest_of_range(plan, multiple_of=64) is None


def test_a_size_that_was_not_rehearsed_is_named():
    plan = plan_of(trials=())
    text = table_of(*[Outcome(gpu_named("RTX-4090"), plan, asked=World(n)) for n in (None, 2)])
    assert "- simulated RTX-4090: 70 was not rehearsed" in text
    assert "- simulated RTX-4090 x 2: 70 was not rehearsed" in text


@given(st.integers(1, 10_000), st.floats(1.0, 2.0))
def test_the_lower_end_of_the_range_fits_with_higher_peaks(batch_size, room):
    held_bytes = needed_bytes(plan_of(batch_size), batch_size)
    plan = plan_of(batch_size, limit_gib=room * held_bytes / GIB)
    smallest = smallest_of_range(plan)
    allowed_bytes = plan.limit_bytes / (1 + HIGHER_SHARE)

    def needed(size):
        # As the line of live bytes, and what is held for each of them at the chosen size.
        return held_bytes / plan.measured_peak_bytes * (GIB + size * GIB / 4)

    # Numbers are rounded.
    assert smallest is None or needed(smallest) <= allowed_bytes * (1 + 1e-9)
    if smallest != batch_size:
        assert needed((smallest or 0) + 1) > allowed_bytes * (1 - 1e-9)


def test_a_table_has_a_row_for_each_gpu_in_80_columns():
    nothing = Outcome(gpu_named("8GiB"), nothing_fits="Nothing fits: " + "too large " * 12)
    failed = Outcome(gpu_named("24GiB"), error="train.py ended with exit code 1")
    other_size = outcome_of(project=80, notes=(Note("risk", "It grows."),))
    text = table_of(outcome_of(), other_size, nothing, failed)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert rows_of(text) == [
        ["GPU", "16 fits? (GiB)", "largest", "needs", "+8 %", "limited by"],
        ["RTX-4090", "yes, 6.1 of 22.0", "70", "20.3", "70", "memory"],
        ["RTX-4090", "80: no, 23.1 of 22.0", "70", "20.3", "70", "memory"],
        ["8GiB", "-", "none", "-", "-", "-"],
        ["24GiB", "-", "failed", "-", "-", "-"],
    ]
    assert text.count("- All are assumed.") == 1
    assert text.endswith("\n- a plan has more notes, which simulate prints for a single GPU")
    assert "more notes" not in table_of(outcome_of(), nothing)
    assert "- 8GiB: Nothing fits: too large" in text
    assert "- 24GiB: train.py ended with exit code 1" in text


@pytest.mark.parametrize(
    ("gpu", "limited_by", "shown"),
    [
        ("RTX-4060-Ti-16GB", "min_steps_per_epoch", "| steps per epoch |"),
        ("RTX-6000-Ada-ECC-off", "limit_train_batches", "| train batches |"),
    ],
)
def test_long_names_fit_into_80_columns(gpu, limited_by, shown):
    plan = plan_of(400, limit_gib=140, project=4096, limited_by=limited_by)
    text = table_of(Outcome(gpu_named(gpu), plan))
    assert max(map(len, text.splitlines())) <= 80
    assert shown in text


def test_nothing_fits():
    outcome = Outcome(gpu_named("8GiB"), nothing_fits="Nothing fits.")
    assert text_of(outcome, CONTEXT_BYTES) == "simulated 8GiB: Nothing fits."


def test_a_table_of_several_numbers_of_devices_in_80_columns():
    outcomes = [
        in_a_world(1, gpu="A100-80GB"),
        in_a_world(8, gpu="A100-80GB", batch_size=64),
        in_a_world(8, 8, gpu="A100-80GB", batch_size=64, samples=8192, limited_by="dataset"),
        Outcome(gpu_named("A100-80GB"), error="it cannot be divided", asked=World(3)),
    ]
    text = table_of(*outcomes)
    assert max(map(len, text.splitlines())) <= 80
    assert rows_of(text) == [
        ["GPU", "devices", "16 fits?", "largest", "needs", "samples", "limited by"],
        ["A100-80GB", "1", "yes, 6.1", "70", "20.3", "70", "memory"],
        ["A100-80GB", "8", "yes, 6.1", "64", "18.7", "512", "memory"],
        ["A100-80GB", "8 x 8", "yes, 6.1", "64", "18.7", "8192", "dataset"],
        ["A100-80GB", "3", "-", "failed", "-", "-", "-"],
    ]
    assert "- A100-80GB x 3: it cannot be divided" in text
    assert "- samples: of an optimizer step on all GPUs; sizes and GiB are those of one" in text
    assert "300.0 MiB for the CUDA context, 344.0 MiB for NCCL (NVIDIA/nccl#964);" in text
    assert "+8 %" not in text


def test_later_rows_are_as_wide_where_the_first_one_has_no_size():
    first = Outcome(gpu_named("8GiB"), nothing_fits="Nothing fits.", asked=World(1))
    text = table_of(first, in_a_world(8, gpu="8GiB"))
    assert " 16: yes, 6.1 |" in text
    assert len({len(line) for line in text.splitlines()[:4]}) == 1


def test_what_nccl_takes_is_given_for_each_number_of_ranks():
    outcomes = [in_a_world(2), in_a_world(4), in_a_world(8)]
    of_two = replace(outcomes[0].world, nccl_bytes=200 * 2**20)
    outcomes[0] = replace(outcomes[0], world=of_two)
    text = " ".join(table_of(*outcomes).split())
    assert "200.0 MiB for NCCL (2 ranks: NVIDIA/nccl#964)" in text
    assert "344.0 MiB for NCCL (4/8 ranks: NVIDIA/nccl#964);" in text


@pytest.mark.parametrize("gpu", ["RTX-4060-Ti-16GB", "RTX-6000-Ada-ECC-off"])
def test_a_long_name_takes_the_room_of_what_the_largest_size_needs(gpu):
    outcome = in_a_world(8, gpu=gpu, limited_by="min_steps_per_epoch", project=4096)
    text = table_of(outcome)
    assert max(map(len, text.splitlines())) <= 80
    assert "needs" not in text
    # Every cell but the last is whole.
    assert rows_of(text)[1][:-1] == [gpu, "8", "no, 1127.5", "70", "560"]
    assert "steps per epoch".startswith(rows_of(text)[1][-1])


def test_the_world_of_the_program_is_in_the_table_too():
    text = table_of(in_a_world(8, asked=False), in_a_world(8, asked=False, gpu="A100-80GB"))
    assert [row[:2] for row in rows_of(text)[1:]] == [["RTX-4090", "8"], ["A100-80GB", "8"]]


def test_the_plan_of_one_rank_of_many():
    lines = text_of(in_a_world(8, 8), CONTEXT_BYTES).splitlines()
    assert lines[0].startswith("batch size 70 on each of 64 ranks on a simulated RTX-4090")
    start = next(number for number, line in enumerate(lines) if line.startswith("  ranks"))
    assert lines[start:] == [
        "  ranks     rank 0 of 64; 4,480 samples a step on all of them; a node needs 8",
        "            times the host memory of one process",
        "  memory    needs 20.3 of 22.0 GiB; 256.0 MiB a sample",
        "  gathered  5.0 GiB of weights stay from forward to backward",
        "  own size  batch size 16: fits, 6.1 of 22.0 GiB",
        "  range     70 also fits if peaks on the real GPU are 8 % higher",
        "  assumed   300.0 MiB for the CUDA context, 344.0 MiB for NCCL",
        "            (NVIDIA/nccl#964); nothing else on the GPU",
        "  next      search again on the GPU itself; nothing here ran on one",
    ]


def test_one_device_that_was_asked_for_changes_nothing_in_a_plan():
    outcome = outcome_of()
    asked = replace(outcome, asked=World(1))
    assert text_of(asked, CONTEXT_BYTES) == text_of(outcome, CONTEXT_BYTES)
