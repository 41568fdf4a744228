"""A plan of an earlier run is used again where nothing that matters has changed."""

import json
import os
from dataclasses import replace

import pytest
import torch

from lightning_batchmem import BatchFinder, Plan
from tests.helpers import lawful
from tests.helpers.lawful import MIB, Lawful, found_size, law
from tests.helpers.plans import plan_with, search_notes

# The fixture `device` has a budget of 500 MiB.
FOUND = found_size(500 * MIB, multiple_of=1)
NOT_USED = "The earlier plan was not used: "

_plans = []


@pytest.fixture
def earlier(search, device):
    """The plan of one search."""
    if not _plans:
        _plans.append(search(Lawful(device, law)))
    return _plans[0]


@pytest.fixture
def again(search, device):
    """Search with an earlier plan."""

    def run(plan, module=None, options=None, **arguments):
        module = module or Lawful(device, law)
        found = search(module, options={"plan": plan, **(options or {})}, **arguments)
        assert found.batch_size == module.batch_size
        return found

    return run


SAVED_PLAN = Plan.from_json(json.dumps(lawful.SAVED_PLAN))


def kinds(plan, since=0):
    return [(trial.kind, trial.batch_size) for trial in plan.trials[since:]]


@pytest.mark.usefixtures("compares_speeds")
def test_the_speeds_of_an_earlier_plan_are_not_compared(again, device, earlier):
    assert again(earlier, Lawful(device, law)).speeds == ()


def test_only_a_rehearsal_is_run(again, device, earlier, tmp_path):
    run = tmp_path / "lightning_logs" / "version_0"
    run.mkdir(parents=True)
    (run / "batch_plan.json").write_text("of an older run")
    os.utime(run / "batch_plan.json", (1, 1))
    (run / "batch_plan_1.json").write_text(earlier.to_json())
    os.utime(run / "batch_plan_1.json", (2, 2))
    # The newest file is the plan of an evaluation, which cannot be used again.
    (run / "batch_plan_2.json").write_text(replace(earlier, parameters="").to_json())
    # A run was killed while it wrote its plan, and other things have such a name.
    (run / "batch_plan_3.json").write_text(earlier.to_json()[:200])
    (run / "batch_plan_4.json").mkdir()
    (run / "batch_plan_5.json").symlink_to(run / "deleted")
    for given in (earlier, run / "batch_plan_1.json", str(tmp_path)):
        used = []

        def recording(size, used=used):
            used.append(size)
            return law(size)

        plan = again(given, Lawful(device, recording))
        assert (used[0], max(used)) == (FOUND, FOUND)
        # No probe of a search was run.
        assert not {2, 8} & set(used)
        assert (plan.batch_size, plan.verified, search_notes(plan)) == (
            FOUND,
            True,
            search_notes(earlier),
        )
        assert plan.measured_peak_bytes == law(FOUND)
        rehearsal = ("rehearsal", FOUND)
        others = [trial for trial in kinds(earlier) if trial != rehearsal]
        assert kinds(plan) == [*others, rehearsal]
        reason = "the size of an earlier plan, which passed a rehearsal on this device."
        assert plan.reason == f"{FOUND} samples: {reason}"
        assert plan.parameters == earlier.parameters == "2 in 2 tensors"
        assert Plan.from_json(plan.to_json()) == plan


def test_a_file_that_is_missing_is_written_for_the_next_search(again, device, tmp_path):
    path = tmp_path / "sweep" / "plan.json"
    first = again(str(path))
    assert not any(note.startswith(NOT_USED) for note in search_notes(first))
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]
    assert Plan.from_json(path.read_text()) == first
    second = again(path)
    assert second.reason.startswith(f"{FOUND} samples: the size of an earlier plan")
    # A file that cannot be used stays, and the first note has the reason.
    module = Lawful(device, law)
    module.another = torch.nn.Linear(1, 1)
    third = again(path, module)
    assert search_notes(third)[0].startswith(f"{NOT_USED}the number of parameters was")
    assert Plan.from_json(path.read_text()) == first


def test_a_file_that_cannot_be_written_is_a_warning(again, tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="The plan could not be written to .*plan.json: "):
        again(tmp_path / "file" / "plan.json")


def test_the_size_of_a_simulated_plan_is_rehearsed_on_the_real_device(again, earlier):
    simulated = plan_with(earlier, device="simulated RTX-4090", verified=False, simulated=True)
    plan = again(simulated)
    assert (plan.verified, plan.simulated, plan.device) == (True, False, earlier.device)
    # Its trials were none of this device.
    assert kinds(plan) == [("rehearsal", FOUND)]
    assert plan.reason.startswith(f"{FOUND} samples: the size of an earlier plan, which passed")


def test_a_simulated_plan_of_another_memory_is_not_used(again, earlier):
    simulated = plan_with(
        earlier, limit_bytes=2 * earlier.limit_bytes, verified=False, simulated=True
    )
    plan = again(simulated)
    assert kinds(plan)[0] != ("rehearsal", FOUND)
    assert "The earlier plan was not used: the limit was" in " ".join(search_notes(plan))


def changed_module(device, law):
    module = Lawful(device, law)
    module.more = torch.nn.Linear(3, 1)
    return module


@pytest.mark.parametrize(
    "arguments", [{"precision": "bf16-mixed"}, {"options": {"min_steps_per_epoch": 1}}]
)
def test_other_arguments_are_judged_by_the_rehearsal(again, earlier, arguments):
    plan = again(earlier, **arguments)
    assert kinds(plan, since=-1) == [("rehearsal", FOUND)]
    assert "earlier plan" in plan.reason


LIMITED = {"limited_by": "dataset", "batch_size": 100}


@pytest.mark.parametrize(
    ("change", "budget_mib", "module", "arguments", "note"),
    [
        (
            {"device": "another GPU"},
            500,
            Lawful,
            {},
            "the device was another GPU and is CPU.",
        ),
        ({}, 600, Lawful, {}, "the limit was 475.0 MiB and is 570.0 MiB."),
        ({}, 452, Lawful, {}, f"{FOUND} samples ran out of memory (*)."),
        (
            {},
            500,
            changed_module,
            {},
            "the number of parameters was 2 in 2 tensors and is 6 in 4 tensors.",
        ),
        (
            {},
            500,
            Lawful,
            {"options": {"multiple_of": 5}},
            f"it has {FOUND} samples, and multiples of 5 from 5 to 5,000 are allowed: (*).",
        ),
        ({"verified": False}, 500, Lawful, {}, "it was not verified by a fit of this version."),
        (
            {"parameters": SAVED_PLAN.parameters},
            500,
            Lawful,
            {},
            "it was not verified by a fit of this version.",
        ),
        (
            LIMITED,
            500,
            Lawful,
            {},
            "100 samples were limited by dataset, and larger sizes are allowed now.",
        ),
        (
            {"batch_size": 6000},
            500,
            Lawful,
            {},
            "it has 6,000 samples, and sizes from 2 to 5,000 are allowed: (*).",
        ),
        ({"batch_size": 500}, 500, Lawful, {}, "500 samples ran out of memory (*)."),
    ],
)
def test_otherwise_a_search_with_the_reason(
    again, device, earlier, change, budget_mib, module, arguments, note
):
    device.budget = budget_mib * MIB
    plan = again(plan_with(earlier, **change), module(device, law), **arguments)
    (reason,) = [
        one.removeprefix(NOT_USED) for one in search_notes(plan) if one.startswith(NOT_USED)
    ]
    start, _, rest = note.partition("(*)")
    assert reason.startswith(start)
    assert reason.endswith(rest.rpartition("(*)")[2])
    multiple_of = arguments.get("options", {}).get("multiple_of", 1)
    assert plan.batch_size == found_size(device.budget, multiple_of=multiple_of)
    assert kinds(plan)[0] == ("probe", max(2, multiple_of))


def test_after_a_rehearsal_that_fails_the_search_starts_from_the_restored_state(
    again, device, earlier
):
    states = []

    class Watched(Lawful):
        def training_step(self, batch, batch_idx):
            is_new = self.trainer.optimizers[0].state == {}
            states.append((len(batch[0]), self.layer.bias.item(), is_new))
            return super().training_step(batch, batch_idx)

    def law_that_grows(size):
        if size == FOUND and len(states) > 2:
            return 2 * law(size)
        return law(size)

    module = Watched(device, law_that_grows)
    bias = module.layer.bias.item()
    again(earlier, module)
    # The rehearsal had trained before it failed.
    assert states[1][1] != bias
    first_probe = next(state for state in states if state[0] == 2)
    assert first_probe == (2, bias, True)


def test_a_file_that_cannot_be_read(again, tmp_path):
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "wrong.json").write_text(json.dumps(lawful.saved_plan_of("64")))
    (tmp_path / "large.json").write_text(json.dumps({**lawful.SAVED_PLAN, "limit_bytes": 10**400}))
    (tmp_path / "empty.json").write_text(json.dumps(lawful.saved_plan_of(0)))
    # To open it would take forever.
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "huge.json").write_bytes(b" " * (16 * 2**20) + b"{}")
    (tmp_path / "latin.json").write_bytes(b"\xe9")
    trials = [{**lawful.SAVED_PLAN["trials"][0], "batch_size": -1}]
    (tmp_path / "negative.json").write_text(json.dumps({**lawful.SAVED_PLAN, "trials": trials}))
    for name, why in (
        ("none", "No such file"),
        ("", "batch_plan.json"),
        ("other.json", "Plan"),
        ("wrong.json", "Plan"),
        ("large.json", "Plan"),
        ("empty.json", "batch_size of a plan must be at least 1, got 0"),
        ("pipe", "it is not a regular file"),
        ("device", "it is not a regular file"),
        ("huge.json", "it is larger than 16 MiB"),
        ("latin.json", "can't decode byte 0xe9"),
        ("negative.json", "batch_size of a plan must be at least 1, got -1"),
        ("\x00", "embedded null"),
        ("long" * 1000, "File name too long"),
    ):
        plan = again(tmp_path / name)
        assert plan.batch_size == FOUND
        start = f"{NOT_USED}{tmp_path / name} cannot be read ("
        assert any(note.startswith(start) and why in note for note in search_notes(plan))
    for given in (3, ""):
        with pytest.raises(
            ValueError, match=f"plan must be a Plan, a path or None, got {given!r}$"
        ):
            BatchFinder(plan=given, objective="memory")


@pytest.mark.parametrize(
    "changes", [{"outcome": "killed"}, {"kind": "climb"}, {"outcome": "", "kind": "\x1b[2J"}]
)
def test_a_trial_that_this_version_does_not_know_is_a_note(again, earlier, tmp_path, changes):
    plan = replace(earlier, trials=(replace(earlier.trials[0], **changes), *earlier.trials))
    path = tmp_path / "batch_plan.json"
    path.write_text(plan.to_json())
    for given in (plan, path, tmp_path):
        found = again(given)
        assert found.batch_size == FOUND
        (note,) = [note for note in search_notes(found) if note.startswith(NOT_USED)]
        assert note.startswith(f"{NOT_USED}this version does not know a run of the kind ")
        assert note.isprintable()
