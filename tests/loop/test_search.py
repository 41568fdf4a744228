"""Searches of a loop: sizes, texts, errors, and earlier plans."""

import re
from unittest import mock

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_batchmem import BatchFinder, find_batch_size_of_loop
from tests.helpers.lawful import MIB, Lawful, found_size, law, loader
from tests.helpers.loops import Loop, scheduled, seeded, sgd
from tests.helpers.plans import search_notes


def found(loop, **options):
    return find_batch_size_of_loop(
        loop.step,
        loop.make_batch,
        model=loop.model,
        optimizer=loop.optimizer,
        state=loop.state,
        **options,
    )


@pytest.fixture
def use_device(device, monkeypatch):
    monkeypatch.setattr("lightning_batchmem.loop.search.device_memory_for", lambda _: device)
    return device


@pytest.fixture
def lawful(use_device):
    """A loop whose memory follows the law, and the sizes of its steps."""
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(layer.parameters())
    loop = Loop(layer, optimizer, None, lambda size: torch.zeros(size, 1))
    loop.sizes = []

    def step(x):
        loop.sizes.append(len(x))
        use_device.free()
        use_device.use(law(len(x)))
        use_device.free()
        optimizer.zero_grad()
        layer(x).mean().backward()
        optimizer.step()

    loop.step = step
    return loop


def test_the_size_follows_memory_and_options(lawful, use_device):
    assert found(lawful).batch_size == found_size(500 * MIB)
    limited = found(lawful, memory_limit=300 * MIB, multiple_of=8)
    assert limited.batch_size == found_size(500 * MIB, memory_limit=300 * MIB, multiple_of=8)
    lawful.sizes.clear()
    plan = found(lawful, min_batch_size=24, max_batch_size=48, objective="throughput")
    assert plan.limited_by in ("max_batch_size", "throughput")
    assert (plan.trials[0].batch_size, max(lawful.sizes)) == (24, 48)
    assert plan.effective_batch_size is None
    assert plan.measured_peak_bytes == law(plan.batch_size)
    assert set(plan.trials[0].memory.phase_peak_bytes) == {"forward", "backward", "optimizer_step"}


def test_smaller_batches_are_multiples_too(lawful):
    lawful.sizes.clear()
    plan = found(lawful, multiple_of=48)
    assert plan.batch_size == 336
    assert {size % 48 for size in lawful.sizes} == {0}
    # A half of 336 is no multiple of 48.
    assert 144 in lawful.sizes


def without_times(text):
    """The lines of a plan without times, and without notes about the project's own size."""
    others = (
        r"  sizes|\||  details|BatchFinder: (searching|\d+ s, )"
        r"|  training|  note +(An optimizer step has|If you compute|\d+ samples train)"
    )
    # A line that begins with so many spaces continues the one before it.
    rows = text.replace("\n" + " " * 12, " ")
    # Lightning 2.5 prints an empty line.
    return [line for line in rows.splitlines() if line and not re.match(others, line)]


@pytest.mark.parametrize("verbose", [False, True])
def test_the_text_is_that_of_batch_finder(lawful, verbose, fit, use_device, capsys):
    options = {"max_batch_size": 64, "verbose": verbose}
    plan = found(lawful, **options)
    printed = capsys.readouterr().out
    assert printed.endswith(f"{plan}\n" if verbose else f"{plan.short_text()}\n")
    finder = BatchFinder(objective="memory", **options)
    fit(Lawful(use_device, law), finder, use_device, limit_val_batches=0)
    assert without_times(printed) == without_times(capsys.readouterr().out)


def test_an_earlier_plan_is_only_rehearsed(lawful, tmp_path):
    plan = found(lawful)
    (tmp_path / "plan.json").write_text(plan.to_json())
    lawful.sizes.clear()
    again = found(lawful, plan=tmp_path / "plan.json")
    assert again.batch_size == plan.batch_size
    assert again.reason.endswith("which passed a rehearsal on this device.")
    assert max(lawful.sizes) == plan.batch_size
    assert 2 not in lawful.sizes
    other = found(lawful, plan=plan, multiple_of=5)
    assert "multiples of 5" in other.notes[0].text


class Phased(Lawful):
    """Backward takes twice as much as forward."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        size = len(batch[0])
        loss.register_hook(lambda _: self.use(2 * size))
        return loss


def test_trials_are_those_of_a_trainer(use_device, search):
    module = Phased(use_device, law)
    optimizer = module.configure_optimizers()

    def step(x):
        optimizer.zero_grad()
        module.training_step((x,), 0).backward()
        optimizer.step()

    loop = Loop(module, optimizer, step, lambda size: torch.zeros(size, 1))
    plans = [found(loop, multiple_of=1), search(Phased(use_device, law), limit_val_batches=0)]
    in_loop, in_trainer = (
        [(trial.batch_size, trial.kind, trial.memory.phase_peak_bytes) for trial in plan.trials]
        for plan in plans
    )
    assert in_loop == in_trainer
    assert in_loop[0][2] == {"forward": law(2), "backward": law(4), "optimizer_step": 0}
    assert [plan.verified for plan in plans] == [True, True]


def test_nothing_fits(lawful, use_device):
    with pytest.raises(RuntimeError, match=r"Nothing fits.*At 2 samples"):
        found(lawful, memory_limit=50 * MIB)


def test_an_error_of_a_step_is_raised_and_everything_is_restored():
    loop = seeded(sgd)
    before = loop.left()["weights"][0]["0.weight"].clone()
    step = loop.step

    def failing(batch):
        step(batch)
        if len(batch[0]) > 2:
            raise LookupError("of the user")

    loop.step = failing
    backward = torch.autograd.backward
    with pytest.raises(LookupError, match="of the user") as raised:
        found(loop)
    assert raised.value.__notes__ == ["This error occurred in the search, at batch size 8."]
    assert torch.equal(loop.model[0].weight, before)
    assert not loop.optimizer.state
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert torch.autograd.backward is backward


def test_an_error_in_a_step_that_all_ranks_take_reaches_no_exchange(lawful, monkeypatch):
    """The other ranks wait in their step, so they could not take part in an exchange."""
    failures = []

    def gather(rows, row):
        failures.append(row[0])
        rows[:] = [row] * len(rows)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    lawful.model = nn.Sequential(lawful.model, nn.SyncBatchNorm(1))
    lawful.step = mock.Mock(side_effect=LookupError("of the user"))
    with pytest.raises(LookupError, match="of the user") as raised:
        found(lawful)
    assert "all ranks take together" in raised.value.__notes__[0]
    assert set(failures) == {None}


def test_a_step_that_runs_out_of_memory_ends_its_trial(lawful):
    step = lawful.step

    def failing(batch):
        step(batch)
        if len(batch) == 8:
            raise torch.OutOfMemoryError("made up")

    lawful.step = failing
    plan = found(lawful, max_batch_size=8)
    assert [t.outcome for t in plan.trials if t.batch_size == 8] == ["out_of_memory"]
    assert 2 <= plan.batch_size < 8


ARGUMENTS = {
    "step": (None, "step must be a function, got None"),
    "make_batch": (3, "make_batch must be a function, got 3"),
    "model": ([], r"model must be a torch Module or a sequence of them, got \[\]"),
    "optimizer": ("Adam", "optimizer must be a torch Optimizer or a sequence of them, got 'Adam'"),
    "fabric": (1, "fabric must be a Fabric of lightning.fabric or None, got 1"),
    "plan": (1, "plan must be a Plan, a path or None, got 1"),
    "memory_limit": ("much", "memory_limit must be a whole number of bytes"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_wrong_arguments(name):
    value, message = ARGUMENTS[name]
    loop = sgd()
    options = {"model": loop.model, "optimizer": loop.optimizer}
    positional = {"step": loop.step, "make_batch": loop.make_batch}
    (positional if name in positional else options)[name] = value
    with pytest.raises(ValueError, match=message):
        find_batch_size_of_loop(*positional.values(), **options)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([], {"max_size": 8}, r"has no argument max_size\. Did you mean max_batch_size\?$"),
        ([None], {}, r"takes its arguments by name, such as model=\.\.\., got None$"),
    ],
)
def test_the_names_of_arguments(arguments, options, message):
    with pytest.raises(TypeError, match=f"^find_batch_size_of_loop {message}"):
        find_batch_size_of_loop(print, print, *arguments, **options)


def test_models_without_weights_here():
    loop = sgd()
    loop.model = nn.Tanh()
    with pytest.raises(ValueError, match="model must have parameters on a device, got none"):
        found(loop)


def test_a_device_without_a_peak_counter(monkeypatch):
    monkeypatch.setattr("lightning_batchmem.loop.search.device_memory_for", lambda _: None)
    with pytest.raises(ValueError, match="find_batch_size_of_loop cannot search, because cpu"):
        found(sgd())


def test_batches_that_do_not_follow_the_size_are_named(lawful, recwarn):
    samples = torch.zeros(20, 1)
    lawful.make_batch = lambda size: samples[:size]
    found(lawful, max_batch_size=20)
    assert not any("as much data" in str(warning.message) for warning in recwarn)
    found(lawful, max_batch_size=80)
    (warning,) = [str(one.message) for one in recwarn if "as much data" in str(one.message)]
    assert re.search(r"make_batch\(80\) as from make_batch\(\d+\), so it cannot", warning)


def test_what_cannot_be_restored_is_named(lawful):
    lawful.state = [iter([1, 2]), loader(4)]
    with pytest.warns(UserWarning, match=r"state\[1\] \(DataLoader\); state\[0\] \(list_iterator"):
        found(lawful, max_batch_size=4)


def test_only_what_is_in_the_state_is_restored():
    loop = seeded(sgd)
    of_loop = loop.step
    loop.state = []
    others = []

    def step(batch):
        loop.state.append(of_loop(batch).item())
        others.append(batch)

    loop.step = step
    found(loop, max_batch_size=8)
    # A list may be the state itself.
    assert loop.state == []
    assert len(others) > 10


def test_a_scheduler_that_was_not_passed_is_named():
    loop = seeded(scheduled)
    loop.state = []
    with (
        pytest.warns(UserWarning, match=r"Pass state=\[scheduler\] if a step"),
        pytest.raises(ValueError, match="Tried to step"),
    ):
        found(loop, max_batch_size=8)


def test_a_limit_that_the_device_cannot_provide(lawful):
    with pytest.warns(UserWarning, match="more than the GPU can provide, 500.0 MiB"):
        found(lawful, memory_limit=10**12, max_batch_size=4)


def test_a_fabric_without_ranks(lawful, use_device):
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(lawful.model, lawful.optimizer)

    def step(x):
        use_device.use(law(len(x)))
        use_device.free()
        optimizer.zero_grad()
        fabric.backward(model(x).mean())
        optimizer.step()

    before = model.weight.clone()
    plan = find_batch_size_of_loop(
        step, lawful.make_batch, model=model, optimizer=optimizer, fabric=fabric
    )
    assert plan.batch_size == found_size(500 * MIB)
    assert set(plan.trials[0].memory.phase_peak_bytes) == {"forward", "backward", "optimizer_step"}
    assert not any("did not step" in note for note in search_notes(plan))
    assert torch.equal(model.weight, before)
    assert not lawful.optimizer.state
