"""A plan of an earlier run is used again where nothing that matters has changed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_batchmem import BatchFinder, Plan
from tests.lawful import MIB, OLD_PLAN, Evaluated, Lawful, found_size, law

BUDGET = 500 * MIB
FOUND = found_size(BUDGET)
NOT_USED = "The earlier plan was not used: "


@pytest.fixture
def earlier(fit: Any, fake_device: Any) -> Plan:
    finder, device_memory = BatchFinder(), fake_device(budget_bytes=BUDGET)
    fit(Lawful(device_memory, law), finder, device_memory)
    assert finder.plan is not None
    return finder.plan


def again(fit: Any, device_memory: Any, plan: Any, module: Any = None, **arguments: Any) -> Plan:
    finder = BatchFinder(plan=plan, **arguments.pop("finder", {}))
    module = module or Lawful(device_memory, law)
    fit(module, finder, device_memory, **arguments)
    assert finder.plan is not None
    assert finder.plan.batch_size == module.batch_size
    return finder.plan


def kinds(plan: Plan, since: int = 0) -> list[tuple[str, int]]:
    return [(trial.kind, trial.batch_size) for trial in plan.trials[since:]]


def test_only_a_rehearsal_is_run(fit: Any, fake_device: Any, earlier: Plan, tmp_path: Path) -> None:
    run = tmp_path / "lightning_logs" / "version_0"
    run.mkdir(parents=True)
    (run / "batch_plan.json").write_text("of an older run")
    os.utime(run / "batch_plan.json", (1, 1))
    (run / "batch_plan_1.json").write_text(earlier.to_json())
    for given in (earlier, run / "batch_plan_1.json", str(tmp_path)):
        device_memory = fake_device(budget_bytes=BUDGET)
        used: list[int] = []

        def recording(size: int, used: list[int] = used) -> int:
            used.append(size)
            return law(size)

        plan = again(fit, device_memory, given, Lawful(device_memory, recording))
        assert (used[0], max(used)) == (FOUND, FOUND)
        assert not {2, 8} & set(used)  # the probes of a search
        assert (plan.batch_size, plan.verified, plan.notes) == (FOUND, True, earlier.notes)
        assert plan.measured_peak_bytes == law(FOUND)
        assert kinds(plan) == [*[one for one in kinds(earlier) if one != ("rehearsal", FOUND)], ("rehearsal", FOUND)]
        assert plan.reason == f"{FOUND} samples: the size of an earlier plan, which passed a rehearsal again."
        assert plan.conditions == earlier.conditions
        assert Plan.from_json(plan.to_json()) == plan


def changed_module(device_memory: Any) -> Lawful:
    module = Lawful(device_memory, law)
    module.more = torch.nn.Linear(3, 1)
    return module


def frozen(device_memory: Any) -> Lawful:
    module = Lawful(device_memory, law)
    module.layer.bias.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("change", "budget", "module", "arguments", "note"),
    [
        ({"device": "another GPU"}, BUDGET, Lawful, {}, "it was found on another GPU and this is host."),
        ({}, 600 * MIB, Lawful, {}, "the limit was 475.0 MiB and is 570.0 MiB."),
        ({}, 450 * MIB, Lawful, {}, "it held 443.0 MiB and the limit is 427.5 MiB."),
        ({}, BUDGET, changed_module, {}, "parameters was '2 in 2 tensors (*)' and is '6 in 4 tensors (*)'."),
        ({}, BUDGET, frozen, {}, "parameters was '2 in 2 tensors (*)' and is '2 in 2 tensors (*)'."),
        ({}, BUDGET, Lawful, {"precision": "bf16-mixed"}, "precision was '32-true' and is 'bf16-mixed'."),
        ({}, BUDGET, Lawful, {"finder": {"multiple_of": 5}}, "multiple_of was None and is 5."),
        ({"verified": False}, BUDGET, Lawful, {}, "it was not verified by a fit of this version."),
        ({"conditions": None}, BUDGET, Lawful, {}, "it was not verified by a fit of this version."),
        (
            {"limited_by": "dataset", "batch_size": 100},
            BUDGET,
            Lawful,
            {},
            "its size was limited by dataset to 100 and may now be 500.",
        ),
        (
            {"batch_size": 6000},
            BUDGET,
            Lawful,
            {},
            "it has 6000 samples, and sizes from 2 to 500 are allowed: min_steps_per_epoch allows no more than 500"
            " samples.",
        ),
        ({"batch_size": 500}, BUDGET, Lawful, {}, "500 samples ran out of memory (*)."),
    ],
)
def test_otherwise_a_search_with_the_reason(
    fit: Any, fake_device: Any, earlier: Plan, change: Any, budget: int, module: Any, arguments: Any, note: str
) -> None:
    device_memory = fake_device(budget_bytes=budget)
    made = module(device_memory, law) if module is Lawful else module(device_memory)
    plan = again(fit, device_memory, replace(earlier, **change), made, **arguments)
    (reason,) = [one.removeprefix(NOT_USED) for one in plan.notes if one.startswith(NOT_USED)]
    start, _, rest = note.partition("(*)")
    assert reason.startswith(start)
    assert reason.endswith(rest.rpartition("(*)")[2])
    multiple_of = arguments.get("finder", {}).get("multiple_of")
    assert plan.batch_size == found_size(budget, multiple_of=multiple_of)
    assert kinds(plan)[0] == ("probe", multiple_of or 2)


def test_a_file_that_cannot_be_read(fit: Any, fake_device: Any, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[]")
    for path, why in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "batch_plan.json"),
        (tmp_path / "other.json", "Plan"),
    ):
        plan = again(fit, fake_device(budget_bytes=BUDGET), path)
        assert plan.batch_size == FOUND
        assert any(note.startswith(f"{NOT_USED}it cannot be read (") and why in note for note in plan.notes)
    with pytest.raises(ValueError, match="plan must be a Plan, a path or None, got 3"):
        BatchFinder(plan=3)  # type: ignore[arg-type]


def test_validation_of_its_own_size(fit: Any, fake_device: Any) -> None:
    device_memory, options = fake_device(budget_bytes=BUDGET), {"eval_batch_arg_name": "eval_batch_size"}
    first = BatchFinder(**options)
    fit(Evaluated(device_memory, "eval_batch_size"), first, device_memory)
    plan = again(fit, device_memory, first.plan, Evaluated(device_memory, "eval_batch_size"), finder=options)
    assert first.plan is not None
    assert first.plan.evaluation is not None
    assert plan.evaluation is not None
    assert plan.evaluation.batch_size == first.plan.evaluation.batch_size
    assert plan.evaluation.reason.endswith("the size of an earlier plan, which passed a rehearsal again.")


def test_a_plan_of_an_earlier_version_has_no_conditions() -> None:
    import json

    assert Plan.from_json(json.dumps(OLD_PLAN)).conditions is None
