"""A rehearsal on a device."""

import pytest

from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.search.meter import TrialMeter, other_bytes_at_start
from lightning_batchmem.search.readings import num_full_steps
from lightning_batchmem.search.rehearsal import rehearse
from tests.helpers.fake_program import FakeProgram


@pytest.mark.parametrize(("differs", "full_steps"), [(False, 7), (True, 27)])
def test_all_ranks_run_more_steps_if_the_peaks_of_one_differ(differs, full_steps, device):
    """The peaks of this rank are equal."""
    program = FakeProgram(device, lambda size: size)
    program.restart(8)
    meter = TrialMeter(program, device, other_bytes_at_start(program, device))
    values = []

    def on_any_rank(value):
        values.append(value)
        return differs

    program.phases.watch(program.optimizers)
    rehearse(meter, SearchPolicy(), 8, on_any_rank)
    # The first is whether the training is long.
    assert values == [True, False, False]
    assert num_full_steps(meter.readings) == full_steps
