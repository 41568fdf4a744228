"""A rehearsal on a device."""

import pytest

from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.search.meter import TrialMeter, other_bytes_at_start
from lightning_batchmem.search.rehearsal import rehearse
from tests.helpers.fake_session import FakeSession


@pytest.mark.parametrize(("differs", "full_steps"), [(False, 7), (True, 22)])
def test_all_ranks_run_more_steps_if_the_peaks_of_one_differ(differs, full_steps, device):
    """The peaks of this rank are equal."""
    session = FakeSession(device, lambda size: size)
    session.restart(8)
    meter = TrialMeter(session, device, SearchPolicy(), other_bytes_at_start(session, device))
    values = []

    def on_any_rank(value):
        values.append(value)
        return differs

    session.phases.watch(session.optimizers)
    rehearse(meter, 8, on_any_rank)
    assert values == [False]
    assert meter.full_steps == full_steps
