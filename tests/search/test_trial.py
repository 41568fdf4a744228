"""Trials in a real Trainer on a fake device: what they record, and what a rehearsal finds."""

import itertools
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.policy import SearchPolicy, StepPolicy
from lightning_batchmem.plan.records import Trial, TrialMemory, mib
from lightning_batchmem.search import rehearsal
from lightning_batchmem.search.limits import RAGGED_SHARE
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.rehearsal import SHORT_REHEARSAL
from lightning_batchmem.search.trial import TrialRunner, _outcome
from tests.helpers.fake_program import FakeProgram
from tests.helpers.lawful import MIB, SAMPLES, Evaluated, Lawful, law
from tests.helpers.plans import search_notes


class Stepping(Lawful):
    """Calls ``during(size, number)`` inside each training step.

    The steps of each size are numbered from 1.
    """

    def __init__(self, device_memory, during=lambda size, number: None):
        super().__init__(device_memory, law)
        steps = {}

        # This is a function, since the search restores the contents of other attributes.
        def count(size):
            steps[size] = steps.get(size, 0) + 1
            during(size, steps[size])

        self.count = count

    def training_step(self, batch, batch_idx):
        self.count(len(batch[0]))
        return super().training_step(batch, batch_idx)


class InTurn(Stepping):
    """Calls of its step hold these numbers of MiB in turn, at any batch size."""

    def __init__(self, device_memory, mib):
        super().__init__(device_memory)
        numbers = itertools.cycle(mib)

        def use(size):
            device_memory.use(next(numbers) * MIB)
            device_memory.free()

        self.use = use


@pytest.fixture
def policy():
    """The tests count the steps of the package's own numbers."""
    return SearchPolicy()


@pytest.fixture
def device(device):
    device.enforces_limits = True
    return device


FASTEST = {"objective": "throughput", "max_batch_size": 16}


def rehearsed(plan):
    return [trial for trial in plan.trials if trial.kind == "rehearsal"]


def test_what_trials_record(search, device):
    budgets = {}

    def during(size, number):
        budgets.setdefault(size, set()).add(device.budget)

    plan = search(
        Stepping(device, during), policy=SearchPolicy(steps=StepPolicy(timed_seconds=0.0))
    )
    # 376 samples fill the limit of 475 MiB. After 0.9 of them, 0.6 of the way to 0.97 is rehearsed.
    assert [(trial.batch_size, trial.kind) for trial in plan.trials] == [
        (2, "probe"),
        (8, "probe"),
        (169, "probe"),
        (338, "rehearsal"),
        (354, "rehearsal"),
    ]
    assert {trial.outcome for trial in plan.trials} == {"ok"}
    for trial in plan.trials:
        assert list(trial.memory.phase_peak_bytes) == ["forward", "backward", "optimizer_step"]
        assert trial.memory.peak_bytes == law(trial.batch_size)
    # A probe has a warm-up step and one that is measured. A rehearsal has two warm-up steps, three
    # steady ones, the last batch of the epoch, and a full one of the next epoch.
    assert [trial.full_steps for trial in plan.trials] == [2, 2, 2, 7, 7]
    assert device.num_ooms == 0
    # The enforced limit is restored.
    assert device.budget == 500 * MIB
    assert plan.limit_bytes == 475 * MIB
    assert budgets[2] == budgets[169] == {475 * MIB}
    # A step of the training has this size too.
    assert 475 * MIB in budgets[354]
    assert budgets[338] == {475 * MIB}


def test_a_step_that_looks_for_collectives_is_no_step_of_a_trial(device):
    begun = []
    program = FakeProgram(device, law)
    runner = TrialRunner(program, device, Ranks(0, 1), SearchPolicy(), lambda: begun.append(1))
    assert not runner.calls_collectives(2)
    # The steps of two epochs.
    assert (program.sizes, begun) == ([2, 2], [])


def test_a_step_that_runs_out_of_memory_is_an_outcome(search, device):
    def during(size, number):
        if size > 300 and number == 3:
            device.use(10**12)

    plan = search(Stepping(device, during))
    # Each size is 0.6 of the way from the largest that ran to the smallest that failed: 270 ran.
    assert plan.batch_size == 294
    failed = [trial for trial in plan.trials if trial.outcome != "ok"]
    assert [(trial.batch_size, trial.outcome) for trial in failed] == [
        (338, "out_of_memory"),
        (310, "out_of_memory"),
    ]
    assert failed[0].error.startswith("OutOfMemoryError: CUDA out of memory")


def test_a_half_made_optimizer_state_is_dropped(search, device):
    class Half(Stepping):
        def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
            closure()
            state = optimizer.state[self.layer.weight]
            if self.sizes[-1] == 2 and not state:
                # The state is as if Adam ran out of memory before exp_avg exists.
                state["step"] = torch.tensor(0.0)
                device.use(10**12)
            optimizer.step()

    plan = search(Half(device), options={"min_batch_size": 1})
    assert [(trial.batch_size, trial.outcome) for trial in plan.trials] == [
        (2, "out_of_memory"),
        (1, "ok"),
        (1, "ok"),
    ]


def test_a_retry_of_the_allocator_fails_a_rehearsal_once_optimizers_have_state(search, device):
    def retry_in_step(first, wanted):
        def during(size, number):
            if size == first and number == wanted:
                device.num_alloc_retries += 1

        return during

    # The sixth full step comes after the smaller batch.
    for number in (3, 6):
        steady = search(Stepping(device, retry_in_step(338, number)))
        outcomes = [trial.outcome for trial in rehearsed(steady)]
        assert outcomes == ["allocator_retry", "ok", "ok", "ok"]
        assert steady.batch_size == 326
    # The first step makes the optimizer state, and the allocator settles in the next.
    for number in (1, 2):
        settling = search(Stepping(device, retry_in_step(338, number)))
        assert [trial.outcome for trial in rehearsed(settling)] == ["ok", "ok"]
    # The limit alone makes expandable segments retry, and only that of the user is enforced later.
    device.has_expandable_segments = True
    expandable = search(Stepping(device, retry_in_step(338, 3)))
    assert [trial.outcome for trial in rehearsed(expandable)] == ["ok", "ok"]
    limited = search(Stepping(device, retry_in_step(338, 3)), options={"memory_limit": 475 * MIB})
    assert rehearsed(limited)[0].outcome == "allocator_retry"
    device.has_expandable_segments = False
    # A change of the size may lead to a retry, which comes once an epoch.
    last = SAMPLES % 338
    changing = search(Stepping(device, retry_in_step(last, 1)))
    assert [trial.outcome for trial in rehearsed(changing)] == ["ok", "ok"]


@pytest.mark.parametrize("is_enforced", [True, False])
def test_expandable_segments_may_exceed_an_enforced_limit_by_a_page(search, device, is_enforced):
    device.enforces_limits = is_enforced
    # The largest size holds a little more than the limit, of which the last page is in part free.
    device.reserved_ratio = 1.06
    outcomes = [trial.outcome for trial in rehearsed(search(Stepping(device)))]
    assert ("over_limit" in outcomes) is not is_enforced


def test_steps_that_differ_leave_room_for_a_larger_one_and_the_plan_says_so(search, device):
    def during(size, number):
        if number % 5 == 0:
            device.use(law(size) + size * MIB // 4)
            # Each new shape may lead to a retry near the limit.
            device.num_alloc_retries += size > 100

    plan = search(Stepping(device, during), max_steps=120)
    assert rehearsed(plan)[0].outcome == "out_of_memory"
    assert "allocator_retry" not in {trial.outcome for trial in plan.trials}
    largest = next(trial for trial in rehearsed(plan) if trial.batch_size == plan.batch_size)
    highest_bytes = law(plan.batch_size) + plan.batch_size * MIB // 4
    assert largest.memory.differing_bytes == (highest_bytes, law(plan.batch_size))
    assert largest.memory.peak_bytes <= RAGGED_SHARE * plan.limit_bytes
    (note,) = [
        note for note in search_notes(plan) if note.startswith("Steps on equal batches took")
    ]
    assert f"took {mib(law(plan.batch_size))} to {mib(highest_bytes)}: something" in note
    assert plan.verified


def test_steps_that_hardly_differ_have_no_note_of_it(search, device):
    plan = search(Stepping(device, lambda size, number: device.use(law(size) + number % 4 * MIB)))
    assert {trial.memory.differing_bytes for trial in plan.trials} == {()}
    assert not [note for note in search_notes(plan) if note.startswith("Steps on equal")]
    assert next(trial.full_steps for trial in rehearsed(plan)) == 7


@pytest.mark.parametrize("is_expandable", [True, False])
def test_an_error_that_a_steady_step_catches_itself_counts_as_a_retry(
    search, device, is_expandable
):
    """So does cuDNN, which then takes a slower algorithm."""
    device.has_expandable_segments = is_expandable

    def catch(wanted):
        def during(size, number):
            if size == 338 and number == wanted:
                with suppress(torch.cuda.OutOfMemoryError):
                    device.use(10**12)

        return during

    steady = search(Stepping(device, catch(3)))
    assert rehearsed(steady)[0].outcome == "allocator_retry"
    # At the first step of a shape, libraries try their algorithms.
    first = search(Stepping(device, catch(1)))
    assert rehearsed(first)[0].outcome == "ok"


@pytest.fixture
def long_training(monkeypatch):
    """A training of any length counts as long."""
    monkeypatch.setattr(rehearsal, "SHORT_TRAINING", 0)


class Scaling(Stepping):
    """Skips its first optimizer steps, as a gradient scaler does."""

    skipped = 4

    def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
        closure()
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen > self.skipped:
            optimizer.step()


class NeverStepping(Scaling):
    skipped = 10**6


@pytest.mark.usefixtures("long_training")
def test_skipped_optimizer_steps_prolong_the_warm_up(search, device):
    assert [trial.full_steps for trial in rehearsed(search(Scaling(device)))] == [10, 10]
    plan = search(NeverStepping(device))
    # 20 of these steps are the warm-up.
    assert [trial.full_steps for trial in rehearsed(plan)] == [25, 25]
    assert any(
        "An optimizer did not step in the first steps" in note for note in search_notes(plan)
    )


def test_slow_steps_are_timed_less_often_than_quick_ones(search, device):
    def during(size, number):
        time.sleep(0.1 if size == 16 else 0.001)

    options = {**FASTEST, "min_batch_size": 8}
    plan = search(Stepping(device, during), options=options, policy=SearchPolicy())
    # There is one step of warm-up. Three steps at 16 take longer than 0.25 s.
    steps = {t.batch_size: t.full_steps for t in plan.trials if t.kind == "probe"}
    assert steps[16] == 4
    assert steps[8] > 4


class Different(Stepping):
    """Every other step needs less."""

    def __init__(self, device_memory):
        super().__init__(device_memory)
        numbers = iter(range(10**6))

        def use(size):
            device_memory.use(law(size // (1 + next(numbers) % 2)))
            device_memory.free()

        self.use = use


@pytest.mark.usefixtures("long_training")
def test_steps_that_differ_at_random_are_repeated(search, device):
    passed = [t for t in rehearsed(search(Different(device))) if t.outcome == "ok"]
    assert {trial.full_steps for trial in passed} == {22}


@pytest.mark.parametrize("kind", [Different, NeverStepping])
@pytest.mark.parametrize("is_host", [False, True])
def test_a_rehearsal_of_a_short_training_has_at_most_ten_steps(search, device, kind, is_host):
    if is_host:
        device.as_host()
    plan = search(kind(device))
    assert {trial.full_steps for trial in rehearsed(plan)} <= set(range(7, 11))


def test_an_evaluation_ends_with_its_last_batch(search, device):
    plan = search(Evaluated(device), stage="validate", options={"max_batch_size": 4})
    # There are two warm-up steps, three steady ones and the last batch, and no next epoch.
    assert [trial.full_steps for trial in rehearsed(plan)] == [6]


def test_steps_whose_micro_batches_differ_are_equal_steps(search, device):
    # The gradients of the first micro batch are alive in the second.
    module = InTurn(device, [150, 200])
    plan = search(module, options={"max_batch_size": 4}, accumulate_grad_batches=2)
    assert [trial.full_steps for trial in rehearsed(plan)] == [7]


class Padded(Stepping):
    """Its samples have lengths from 1 to 640; ``during(size, length)`` is called in each step."""

    def training_step(self, batch, batch_idx):
        self.count(len(batch), batch.shape[1])
        self.use(len(batch))
        return self.layer(batch[:, :1]).mean()

    def __init__(self, device_memory, during):
        super().__init__(device_memory)
        self.count = during

    def train_dataloader(self):
        samples = [torch.zeros(1 + i) for i in range(640)]
        collate = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        return DataLoader(samples, self.batch_size, collate_fn=collate)


def test_a_rehearsal_of_ragged_batches_begins_with_random_ones(search, device):
    lengths = {}
    plan = search(Padded(device, lambda size, length: lengths.setdefault(size, []).append(length)))
    probe = plan.trials[0].batch_size
    rehearsal = rehearsed(plan)[0].batch_size
    # A probe uses only the longest samples.
    assert set(lengths[probe]) == {640}
    # It begins as a training does, and the largest batch meets the blocks of the others.
    begin = lengths[rehearsal][:SHORT_REHEARSAL]
    assert len(set(begin)) > 2
    assert begin[0] < begin[-1] == 640


@pytest.mark.parametrize("has_retries", [False, True])
def test_a_share_stays_free_once_ragged_batches_made_the_allocator_retry(
    search, device, has_retries
):
    budgets = []

    def note(size, length):
        budgets.append(device.budget)
        if has_retries and length == 640:
            device.num_alloc_retries += 1

    device.enforces_limits = True
    before_bytes = device.budget
    plan = search(Padded(device, note))
    assert (plan.verified, device.budget) == (True, before_bytes)
    expected = {plan.limit_bytes}
    if has_retries:
        expected.add(plan.limit_bytes - int((1 - RAGGED_SHARE) * plan.limit_bytes))
    # The training follows, which has all of the memory.
    assert set(budgets) - {before_bytes} == expected


class Indexed(Evaluated):
    """Notes the indices of the batches of its validation, which has two of each size."""

    def __init__(self, device_memory, note):
        super().__init__(device_memory, samples=4)
        self.note = lambda *values: note(values)

    def validation_step(self, batch, batch_idx):
        self.note(len(batch[0]), batch_idx)
        return super().validation_step(batch, batch_idx)


def test_batches_of_a_validation_have_their_own_indices(search, device):
    seen = []
    search(Indexed(device, seen.append), options={"max_batch_size": 2}, max_steps=1)
    assert {index for size, index in seen} == {0, 1}


@pytest.mark.parametrize(
    ("kind", "batch_size", "outcome"),
    [("rehearsal", 3, "over_limit"), ("rehearsal", 2, "ok"), ("probe", 3, "ok")],
)
def test_a_checkpoint_has_room_beside_a_rehearsal_above_the_smallest_size(
    kind, batch_size, outcome
):
    limits = SearchLimits(100, 2, 8, "dataset", is_host=True)
    trial = Trial(
        batch_size, "ok", TrialMemory({"forward": 60}, held_peak_bytes=80, set_aside_bytes=21), kind
    )
    assert _outcome(trial, limits, [], is_limit_enforced=False) == outcome
    # The smallest size may be larger than min_batch_size.
    threes = replace(limits, options=SearchOptions(multiple_of=3))
    assert _outcome(trial, threes, [], is_limit_enforced=False) == "ok"


def test_ragged_steps_that_ranks_take_together_leave_a_share_free():
    limits = SearchLimits(100, 2, 8, "dataset", fragmented_bytes=12)
    trial = Trial(
        4, "ok", TrialMemory({"forward": 60}, held_peak_bytes=90, needed_bytes=90), "rehearsal"
    )
    assert _outcome(trial, limits, [], is_limit_enforced=False) == "ok"
    together = replace(limits, steps_are_collective=True)
    assert _outcome(trial, together, [], is_limit_enforced=False) == "over_limit"
