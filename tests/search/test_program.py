"""A complete search on a training program without Lightning."""

import pytest
import torch

from lightning_batchmem.devices.peaks import LiveStorages
from lightning_batchmem.plan.options import SearchOptions
from lightning_batchmem.plan.policy import RehearsalPolicy, SearchPolicy
from lightning_batchmem.plan.records import Chosen
from lightning_batchmem.search.limits import MemoryRoom
from lightning_batchmem.search.progress import SearchProgress
from lightning_batchmem.search.ranks import Ranks
from lightning_batchmem.search.search import BatchSizeSearch
from tests.helpers.fake_device import FakeDevice
from tests.helpers.fake_program import FakeProgram, FakeSteps
from tests.helpers.lawful import MIB, law
from tests.helpers.plans import search_notes

# The times of these steps are noise.
POLICY = SearchPolicy()


@pytest.fixture
def device(device):
    device.enforces_limits = True
    return device


def searched(program, policy=POLICY, earlier_plan=None, also_size=None, **options):
    options = SearchOptions(**{"multiple_of": 1, **options})
    device = program.device_memory
    budget = MemoryRoom(device, options.memory_limit, policy.rehearsal.limit_share)
    progress = SearchProgress(enabled=False)
    search = BatchSizeSearch(
        program, budget, options, policy, Ranks(0, 1), progress, device="abacus", parameters="2"
    )
    plan = search.run(earlier_plan)
    return plan if also_size is None else search.with_rehearsal(plan, also_size)


def failure_of(program):
    with pytest.raises(RuntimeError) as raised:
        searched(program)
    return str(raised.value)


def test_the_line_of_progress_counts_trials_and_their_steps(device):
    texts = []

    class Shown(SearchProgress):
        def begin_step(self):
            super().begin_step()
            texts.append(self.tasks[0].description)

    budget = MemoryRoom(device, None, POLICY.rehearsal.limit_share)
    options = SearchOptions(multiple_of=1)
    program = FakeProgram(device, law)
    with Shown(enabled=False) as progress:
        search = BatchSizeSearch(
            program, budget, options, POLICY, Ranks(0, 1), progress, device="abacus"
        )
        result = search.run()
    full_steps = [trial.full_steps for trial in result.trials]
    probe_steps = [text for text in texts if text.startswith("run 1 of")]
    assert len(probe_steps) == full_steps[0]
    assert texts[0] == "run 1 of about 4, step 1, size 2"
    assert probe_steps[-1] == f"run 1 of about 4, step {full_steps[0]}, size 2"
    last = f"run 5 of about 5, step {full_steps[-1]}, rehearsal of size 354"
    assert texts[-1].startswith(last)
    assert progress.tasks[0].description == f"{len(full_steps)} runs"


def test_a_search_needs_no_lightning(device):
    program = FakeProgram(device, law)
    plan = searched(program)
    # 376 samples fill the limit of 475 MiB. After 0.9 of them, 0.6 of the way to 0.97 is rehearsed.
    assert [(trial.batch_size, trial.kind) for trial in plan.trials] == [
        (2, "probe"), (8, "probe"), (169, "probe"), (338, "rehearsal"), (354, "rehearsal")
    ]  # fmt: skip
    assert (plan.batch_size, plan.limited_by, plan.verified) == (354, "memory", True)
    assert plan.measured_peak_bytes == plan.predicted_peak_bytes == law(354)
    assert program.restarts == [2, 8, 169, 338, 354]
    assert program.batch_size == 354
    assert search_notes(plan) == ("a note of the samples",)
    assert device.num_ooms == 0


def test_the_size_of_an_earlier_plan_is_only_rehearsed(device):
    plan = searched(FakeProgram(device, law))
    program = FakeProgram(device, law)
    result = searched(program, earlier_plan=plan)
    assert set(program.sizes) == {354, 354 // 2}
    assert [trial.batch_size for trial in result.trials] == [2, 8, 169, 338, 354]
    assert result.chosen.why.endswith("which passed a rehearsal on this device.")
    heavier = FakeProgram(device, lambda size: law(2 * size))
    result = searched(heavier, earlier_plan=plan)
    assert result.chosen.batch_size == 177
    assert "The earlier plan was not used: 354 samples ran out of memory" in search_notes(result)[0]
    smaller = FakeProgram(device, law, largest=50)
    result = searched(smaller, earlier_plan=plan)
    assert search_notes(result)[0].startswith(
        "The earlier plan was not used: it has 354 samples, and sizes"
    )


@pytest.mark.parametrize(
    ("also_size", "outcome"),
    [
        (16, "ok"),
        # It was run as a probe only.
        (8, "ok"),
        (2000, "out_of_memory"),
        # This one was rehearsed.
        (354, None),
        # The program has no batch of this size.
        (10**7, None),
    ],
)
def test_one_more_size_is_rehearsed(device, also_size, outcome):
    alone = searched(FakeProgram(device, law))
    result = searched(FakeProgram(device, law), also_size=also_size)
    assert result.chosen == alone.chosen
    more = result.trials[len(alone.trials) :]
    found = [(trial.batch_size, trial.kind, trial.outcome) for trial in more]
    assert found == ([] if outcome is None else [(also_size, "rehearsal", outcome)])


def test_a_size_that_does_not_keep_the_step_is_not_rehearsed(device):
    options = {"target_batch_size": 64}
    result = searched(FakeProgram(device, law), also_size=48, **options)
    assert 48 not in [trial.batch_size for trial in result.trials]


def test_a_failure_has_the_memory_breakdown(device):
    device.as_host()
    program = FakeProgram(device, lambda size: law(size) + 450 * MIB)
    program.bytes_per_waiting_sample = MIB
    # Live bytes cannot be counted while another dispatch mode is active.
    with LiveStorages():
        reason = failure_of(program)
    assert reason.startswith("Nothing fits")
    assert "At 2 samples the memory consisted of" in reason
    assert "workers and a checkpoint take 2.0 MiB more. Use a smaller model" in reason


def test_a_failure_of_which_most_is_other_memory_advises_a_higher_limit():
    device = FakeDevice(500 * MIB, base_bytes=300 * MIB)
    device.enforces_limits = True
    reason = failure_of(FakeProgram(device, lambda size: 180 * MIB))
    assert "pass a higher memory_limit" in reason
    assert "smaller model" not in reason


def test_loader_workers_count_on_the_host(device):
    device.as_host()
    program = FakeProgram(device, law)
    program.bytes_per_waiting_sample = MIB
    # Live bytes cannot be counted while another dispatch mode is active.
    with LiveStorages():
        result = searched(program)
    chosen = result.trials[-1]
    size = result.chosen.batch_size
    assert chosen.memory.set_aside_bytes == size * MIB
    # Without the workers 0.25 of the size that fills the limit are 100 samples.
    most = next(size for size in range(10**6) if law(size) + size * MIB > 500 * MIB)
    assert size == int(0.25 * most) < 100
    assert chosen.memory.needed_bytes == law(size)
    assert any("The tensors could not be counted" in note for note in search_notes(result))


class SampledSteps(FakeSteps):
    """The search keeps 40 MiB of samples, and they are part of the resident set."""

    sample_bytes = 40 * MIB


@pytest.mark.parametrize(("is_host", "set_aside_mib"), [(True, 40), (False, 0)])
def test_samples_of_the_search_take_room_on_the_host(device, is_host, set_aside_mib):
    if is_host:
        device.as_host()
    program = FakeProgram(device, law)
    program.training = SampledSteps(program)
    with LiveStorages():
        trials = searched(program).trials
    assert {trial.memory.set_aside_bytes for trial in trials} == {set_aside_mib * MIB}


def test_a_policy_steers_the_search(device):
    policy = SearchPolicy(
        first_size=3,
        rehearsal=RehearsalPolicy(probe_share=0.5, first_share=0.5, most_share=0.6),
    )
    result = searched(FakeProgram(device, law), policy)
    # Of 376 samples, 0.25 are 94, 0.5 are 188, and 0.6 are 225.
    sizes = [trial.batch_size for trial in result.trials]
    assert sizes == [3, 12, 94, 188, 210, 219]
    assert isinstance(result.chosen, Chosen)


def test_a_checkpoint_takes_a_copy_of_the_state(device):
    device.as_host()

    def set_aside_bytes(states):
        program = FakeProgram(device, lambda size: 0)
        program.saved = states
        result = searched(program, max_batch_size=4)
        assert result.chosen.batch_size == 4
        return result.trials[-1].memory.set_aside_bytes

    module = FakeProgram(device, law).module
    assert set_aside_bytes([]) == 0
    # A weight and a bias have four bytes each, and a buffer has 40.
    assert set_aside_bytes([module.state_dict(), torch.zeros(10)]) == 48
