"""Trials in a real Trainer on a fake device: what they record, and what a rehearsal finds."""

import itertools
import math
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_batchmem.devices.base import MemoryStats
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.trial import TrialRunner
from tests.helpers.fake_session import FakeSession
from tests.helpers.lawful import MIB, SAMPLES, Evaluated, Lawful, law


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

    plan = search(Stepping(device, during), policy=SearchPolicy(timed_seconds=0.0))
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
        assert list(trial.phase_peak_bytes) == ["forward", "backward", "optimizer_step"]
        assert trial.peak_bytes == law(trial.batch_size)
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
    session = FakeSession(device, law)
    runner = TrialRunner(session, device, Ranks(0, 1), SearchPolicy(), lambda: begun.append(1))
    assert not runner.calls_collectives(2)
    assert (session.sizes, begun) == ([2], [])


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


@pytest.mark.parametrize("is_expandable", [True, False])
def test_expandable_segments_may_exceed_an_enforced_limit_by_a_page(search, device, is_expandable):
    device.enforces_limits = True
    device.has_expandable_segments = is_expandable
    # The largest size holds a little more than the limit, of which the last page is in part free.
    device.reserved_ratio = 1.06
    outcomes = [trial.outcome for trial in rehearsed(search(Stepping(device)))]
    assert ("over_limit" in outcomes) is not is_expandable


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


def test_skipped_optimizer_steps_prolong_the_warm_up(search, device):
    class Scaling(Stepping):
        """Skips its first optimizer steps, as a gradient scaler does."""

        skipped = 4

        def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
            closure()
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen > self.skipped:
                optimizer.step()

    assert [trial.full_steps for trial in rehearsed(search(Scaling(device)))] == [10, 10]
    never = Scaling(device)
    never.skipped = 10**6
    plan = search(never)
    # 20 of these steps are the warm-up.
    assert [trial.full_steps for trial in rehearsed(plan)] == [25, 25]
    assert any("An optimizer did not step in the first 20 steps" in note for note in plan.notes)


def test_slow_steps_are_repeated_less_often(search, device):
    policy = SearchPolicy(slow_step_seconds=0.0)
    plan = search(Stepping(device), options=FASTEST, policy=policy)
    assert {trial.full_steps for trial in plan.trials if trial.kind == "probe"} == {2}


def test_quick_steps_are_timed_more_often(search, device):
    policy = SearchPolicy(timed_seconds=math.inf, max_timed_steps=7)
    plan = search(Stepping(device), options=FASTEST, policy=policy)
    assert {trial.full_steps for trial in plan.trials if trial.kind == "probe"} == {8}


def test_steps_that_differ_at_random_are_repeated(search, device):
    class Different(Stepping):
        def __init__(self, device_memory):
            super().__init__(device_memory)
            numbers = iter(range(10**6))

            def use(size):
                device_memory.use(law(size // (1 + next(numbers) % 2)))
                device_memory.free()

            self.use = use

    passed = [t for t in rehearsed(search(Different(device))) if t.outcome == "ok"]
    assert {trial.full_steps for trial in passed} == {22}


def test_an_evaluation_ends_with_its_last_batch(search, device):
    plan = search(Evaluated(device), stage="validate", options={"max_batch_size": 4})
    # There are two warm-up steps, three steady ones and the last batch, and no next epoch.
    assert [trial.full_steps for trial in rehearsed(plan)] == [6]


def test_steps_whose_micro_batches_differ_are_equal_steps(search, device):
    # The gradients of the first micro batch are alive in the second.
    module = InTurn(device, [150, 200])
    plan = search(module, options={"max_batch_size": 4}, accumulate_grad_batches=2)
    assert [trial.full_steps for trial in rehearsed(plan)] == [7]


@pytest.mark.parametrize(("higher_mib", "full_steps"), [(12, 11), (30, 26)])
def test_steps_on_the_host_are_compared_without_what_was_held_before(
    higher_mib, full_steps, search, device
):
    device.as_host()
    # The interpreter and its libraries take more than the steps.
    device.budget = 3000 * MIB
    device._base_bytes = 2000 * MIB
    device.free()

    def during(size, number):
        # The first step is the warm-up, so this is a steady step.
        device.use((200 + higher_mib * (number == 4)) * MIB)
        device.free()

    plan = search(Stepping(device, during), options={"max_batch_size": 4})
    assert rehearsed(plan)[0].full_steps == full_steps


def test_steady_steps_use_batches_of_other_lengths(search, device):
    lengths = {}

    class Padded(Stepping):
        def training_step(self, batch, batch_idx):
            lengths.setdefault(len(batch), []).append(batch.shape[1])
            self.use(len(batch))
            return self.layer(batch[:, :1]).mean()

        def train_dataloader(self):
            samples = [torch.zeros(1 + i % 4) for i in range(640)]
            pad = torch.nn.utils.rnn.pad_sequence
            collate = partial(pad, batch_first=True)
            return DataLoader(samples, self.batch_size, collate_fn=collate)

    plan = search(Padded(device))
    probe = plan.trials[0].batch_size
    rehearsal = rehearsed(plan)[0].batch_size
    # A probe uses only the longest samples.
    assert set(lengths[probe]) == {4}
    assert len(set(lengths[rehearsal])) > 1


def test_a_reserve_is_kept_for_holes_in_the_heap(search, device):
    device.as_host()
    device._base_bytes = MIB
    device.free()
    plan = search(Stepping(device), options={"max_batch_size": 4})
    trial = rehearsed(plan)[0]
    grown_bytes = trial.held_bytes - MIB
    # The tensors are tiny, so the growth counts as growth and again as holes in the heap.
    assert trial.reserve_bytes / grown_bytes == pytest.approx(2 * 0.12, abs=0.01)


def test_a_reserve_is_kept_for_steps_that_vary(search, device):
    device.as_host()
    device._base_bytes = MIB
    device.free()

    # Every other step of each kind holds 40 MiB more.
    plan = search(InTurn(device, [200, 200, 240, 240]), options={"max_batch_size": 4})
    trial = rehearsed(plan)[0]
    # Half of the steady steps hold 240 MiB, and the mean lies 4 * 20 MiB below the bytes needed.
    needed_bytes = trial.held_bytes + trial.reserve_bytes - 0.12 * 240 * MIB
    assert 295 * MIB < needed_bytes < 310 * MIB


class WithBlocks(Stepping):
    """Training steps of 200 MiB with a block of ``block_mib`` in each of them.

    Step ``higher_step`` holds ``higher_mib`` more. Tensors that last are no such blocks, nor are
    those of validation.
    """

    def __init__(self, device_memory, block_mib, higher_mib, higher_step):
        def during(size, number):
            torch.empty(block_mib * MIB, dtype=torch.uint8)
            self.table.sum()
            device_memory.use((200 + higher_mib * (number == higher_step)) * MIB)
            device_memory.free()

        super().__init__(device_memory, during)
        # These are 16 and 20 MiB.
        self.frozen = torch.nn.Parameter(torch.zeros(4 * MIB), requires_grad=False)
        self.table = torch.zeros(5 * MIB)

    def validation_step(self, batch, batch_idx):
        torch.empty(24 * MIB, dtype=torch.uint8)

    def val_dataloader(self):
        return self.train_dataloader()


@pytest.mark.parametrize(
    ("block_mib", "higher_mib", "higher_step", "kept_mib"),
    [
        (8, 0, 0, 8),
        # Such a block does not lie in the heap.
        (32, 0, 0, 0),
        # A steady step has already held so much more than the others.
        (8, 5, 4, 3),
        # So has a step that comes after the steady ones.
        (8, 100, 7, 0),
    ],
)
def test_a_reserve_is_kept_for_the_largest_block_in_the_heap(
    block_mib, higher_mib, higher_step, kept_mib, search, device
):
    device.as_host()
    device._base_bytes = MIB
    device.free()
    plan = search(
        WithBlocks(device, block_mib, higher_mib, higher_step),
        options={"max_batch_size": 4},
        policy=SearchPolicy(timed_seconds=0.0),
    )
    trial = rehearsed(plan)[0]
    grown_bytes = trial.held_bytes - MIB
    assert grown_bytes == pytest.approx((200 + higher_mib) * MIB, abs=0.1 * MIB)
    reserve_bytes = trial.reserve_bytes - 0.12 * grown_bytes
    # What is held beyond the live bytes counts as holes. The parameter is live before the steps.
    hole_bytes = grown_bytes - (trial.peak_bytes - 16 * MIB)
    assert reserve_bytes == pytest.approx(0.12 * hole_bytes + kept_mib * MIB, abs=0.1 * MIB)


class WithState(Stepping):
    """Steps hold 100 MiB, and from the first one on ``written`` of the optimizer state, 40 MiB."""

    def __init__(self, device_memory, written, monkeypatch, during=lambda size, number: None):
        super().__init__(device_memory, during)
        # The parameter, its gradient and its momentum have 40 MiB each.
        self.table = torch.nn.Parameter(torch.zeros(10 * MIB))
        optimizers = []
        self.optimizers_made = optimizers.append

        def reading(size_bytes):
            has_state = bool(optimizers) and bool(optimizers[-1].state)
            return MemoryStats(size_bytes + int(written * has_state * 40 * MIB), None)

        monkeypatch.setattr(device_memory, "_reading", reading)

        def use(size):
            # A tensor of as many live bytes leaves no holes in the heap.
            torch.empty(100 * MIB, dtype=torch.uint8)
            device_memory.use(100 * MIB)
            device_memory.free()

        self.use = use

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.table.sum()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        self.optimizers_made(optimizer)
        return optimizer


@pytest.mark.parametrize(
    ("written", "without_state_mib", "hole_mib"),
    [
        (1.0, 100, 0),
        # The states are not written as a whole.
        (0.5, 100, 0),
        (0.0, 100, 0),
        # Live bytes besides the states are 140 MiB, with the gradient of 40 MiB.
        (2.5, 160, 20),
    ],
)
def test_no_reserve_is_kept_for_optimizer_states(
    written, without_state_mib, hole_mib, search, device, monkeypatch
):
    device.as_host()
    device._base_bytes = MIB
    device.free()
    module = WithState(device, written, monkeypatch)
    (trial,) = rehearsed(search(module, options={"max_batch_size": 4}))
    assert trial.held_bytes == pytest.approx((101 + written * 40) * MIB, abs=0.1 * MIB)
    reserve_mib = 0.12 * (without_state_mib + hole_mib)
    assert trial.reserve_bytes == pytest.approx(reserve_mib * MIB, abs=0.1 * MIB)


def test_optimizer_states_take_no_room_of_the_reserve(search, device, monkeypatch):
    device.as_host()
    # With a reserve for all of the 140 MiB, 157 MiB would be needed. No step might hold more than
    # 154 / 1.12 MiB, which is 137.5 MiB.
    device.budget = 154 * MIB / 0.95
    module = WithState(device, 1.0, monkeypatch)
    (trial,) = rehearsed(search(module, options={"max_batch_size": 4}))
    assert trial.outcome == "ok"
    assert trial.held_bytes == pytest.approx(140 * MIB, abs=0.1 * MIB)


def test_a_first_step_without_room_for_the_reserve_ends_a_rehearsal(search, device, monkeypatch):
    device.as_host()
    # Until the states exist, a step may hold at most 154 / 1.12 MiB, which is 137.5 MiB.
    device.budget = 154 * MIB / 0.95
    numbers = []

    def during(size, number):
        numbers.append(number)
        # The probe has a warm-up step, three timed ones, and two that count live bytes. The next
        # step is the first of the rehearsal, and has no states to hold yet.
        device.use((number == 7) * 38 * MIB)

    module = WithState(device, 1.0, monkeypatch, during)
    with pytest.raises(RuntimeError, match="Nothing fits"):
        search(module, policy=SearchPolicy(timed_seconds=0.0))
    assert numbers[-1] == 7


def test_micro_batches_that_differ_are_no_variation(search, device):
    device.as_host()
    device._base_bytes = MIB
    device.free()

    # The second of two micro-batches holds 100 MiB more.
    module = InTurn(device, [200, 300])
    plan = search(module, options={"max_batch_size": 4}, accumulate_grad_batches=2)
    (trial,) = rehearsed(plan)
    # This is the reserve for later steps and that for holes, 12 % each.
    assert trial.reserve_bytes < 80 * MIB


def test_a_policy_with_few_steady_steps_has_no_variation(search, device):
    device.as_host()
    policy = SearchPolicy(steady_steps=2)
    assert search(Stepping(device), options={"max_batch_size": 4}, policy=policy).verified


def test_a_step_above_the_limit_ends_a_rehearsal_on_the_host(search, device):
    device.as_host()
    device._base_bytes = MIB
    device.enforces_limits = False
    device.free()
    steps = []

    def during(size, number):
        steps.append(number)
        # The probe has six steps, and the fourth one of the rehearsal is a steady step.
        if number == 10:
            device.use(300 * MIB)

    with pytest.raises(RuntimeError, match=r"4 samples, .* need 337.0 MiB"):
        search(
            Stepping(device, during),
            options={"memory_limit": 200 * MIB, "min_batch_size": 4, "max_batch_size": 4},
            policy=SearchPolicy(timed_seconds=0.0),
        )
    assert max(steps) == 10


def test_a_probe_ends_before_the_process_would(search, device):
    device.as_host()

    def during(size, number):
        # The first step at eight samples already holds more than the limit.
        if size == 8:
            device.use(480 * MIB)

    module = Stepping(device, during)
    plan = search(module)
    (failed,) = [trial for trial in plan.trials if trial.batch_size == 8]
    assert (failed.outcome, failed.full_steps) == ("over_limit", 0)
