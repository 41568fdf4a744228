from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_batchmem.devices import host
from lightning_batchmem.plan.options import UNBOUNDED_MAX_BATCH_SIZE, SearchOptions
from lightning_batchmem.plan.policy import SearchPolicy
from lightning_batchmem.search.limits import RAGGED_SHARE, MemoryRoom, search_limits
from lightning_batchmem.search.ranks import Ranks
from tests.helpers.fake_program import FakeProgram

KIB = 1024
POLICY = SearchPolicy()


def budget_of(device, *, memory_limit=None, **arguments):
    return MemoryRoom(device, memory_limit, POLICY.rehearsal.limit_share, **arguments)


ALONE = Ranks(0, 1)


def limits_of(program, budget, ranks=ALONE):
    return search_limits(program, budget, SearchOptions(), POLICY, ranks, keeps_step=False)


@pytest.mark.parametrize(("shared", "ranks", "provided"), [(1, 1, 900), (1, 4, 300), (0, 4, 900)])
def test_ranks_share_the_memory_of_the_host(fake_device, shared, ranks, provided):
    device = fake_device(900, base_bytes=100)
    if shared:
        device.as_host()
    assert budget_of(device, ranks_on_host=ranks).provided_bytes() == provided


def test_a_share_of_the_device_stays_free(fake_device):
    device = fake_device(1000, base_bytes=200)
    assert budget_of(device).limit_bytes() == 950
    assert budget_of(device, memory_limit=500).limit_bytes() == 500
    assert budget_of(device, memory_limit=0.5).limit_bytes() == 500
    assert budget_of(device, later_bytes=50).usable_bytes() == 900
    assert budget_of(device, memory_limit=1000).warning == ""
    assert budget_of(device, memory_limit=1001).warning.startswith("memory_limit=1001 is more")
    device.as_host()
    assert budget_of(device).limit_bytes() == 1000
    assert budget_of(device).free_bytes() == 800
    # The size stays far from a limit on the host, so that it may be above the free memory.
    assert budget_of(device, memory_limit=2000).limit_bytes() == 2000


def test_a_limit_below_the_held_bytes_is_refused(fake_device):
    device = fake_device(1000, base_bytes=200)
    program = FakeProgram(device, lambda size: size)
    with pytest.raises(ValueError, match=r"memory_limit must be above the 0\.000 MiB"):
        limits_of(program, budget_of(device, memory_limit=200))


def test_free_host_memory_limits_the_size(fake_device):
    device = fake_device(10**9)
    program = FakeProgram(device, lambda size: size, largest=UNBOUNDED_MAX_BATCH_SIZE)

    def largest(ranks_on_host):
        host = fake_device(1000 * KIB, base_bytes=400 * KIB)
        budget = budget_of(device, ranks_on_host=ranks_on_host, host_memory=lambda: host)
        limits = limits_of(program, budget)
        return limits.max_batch_size, limits.max_reason

    assert largest(1) == (UNBOUNDED_MAX_BATCH_SIZE, "max_batch_size")
    program.bytes_per_waiting_sample = 3 * KIB
    assert largest(1) == (200, "CPU memory")
    assert largest(2) == (100, "CPU memory")
    assert largest(500) == (1, "CPU memory")
    device.as_host()
    # On the host the workers count in every trial instead.
    assert largest(1) == (UNBOUNDED_MAX_BATCH_SIZE, "max_batch_size")


@pytest.mark.parametrize("on_host", [False, True])
def test_ranks_divide_the_shared_memory(fake_device, monkeypatch, on_host):
    device = fake_device(10**9)
    if on_host:
        device.as_host()
    program = FakeProgram(device, lambda size: size)
    program.bytes_per_waiting_sample = KIB
    usage = SimpleNamespace(total=1, free=100 * KIB)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: usage)
    for ranks, size in ((1, 100), (4, 25), (200, 1)):
        limits = limits_of(program, budget_of(device, ranks_on_host=ranks))
        assert (limits.max_batch_size, limits.max_reason) == (size, "shared memory")


def test_gradients_are_part_of_what_the_host_must_hold(fake_device):
    device = fake_device(available_bytes=1000 * KIB, base_bytes=10 * KIB)
    program = FakeProgram(device, lambda size: size)
    budget = budget_of(device, memory_limit=10 * KIB + 1)
    assert limits_of(program, budget).missing_bytes == 0
    device.as_host()
    # The weight and the bias of the layer have four bytes each.
    assert limits_of(program, budget).missing_bytes == 7
    later = budget_of(device, memory_limit=10 * KIB + 1, later_bytes=8)
    assert limits_of(program, later).missing_bytes == 15
    program.module.bias.requires_grad_(False)
    assert limits_of(program, budget).missing_bytes == 3
    program.training = None
    assert limits_of(program, budget).missing_bytes == 0


def test_all_ranks_use_the_least_limits_and_the_longest_sample(fake_device):
    other = (700 * KIB, 30 * KIB, (50, "dataset"), {7}, 9, True, 0)
    ranks = SimpleNamespace(size=2, exchange=lambda value: [value, other])
    device = fake_device(available_bytes=1000 * KIB)
    device.as_host()
    program = FakeProgram(device, lambda size: size, largest=100)
    limits = limits_of(program, budget_of(device), ranks)
    assert (limits.limit_bytes, limits.max_batch_size) == (700 * KIB, 50)
    assert (limits.max_reason, limits.step.ranks, limits.is_host) == ("dataset", 2, True)
    assert limits.missing_bytes == 30 * KIB
    assert limits.avoided_sizes == {7}
    assert program.longest_sample == 9
    # Of the other rank only.
    assert not limits.has_expandable_segments
    device.has_expandable_segments = True
    assert limits_of(program, budget_of(device), ranks).has_expandable_segments


class Ragged(FakeProgram):
    is_ragged = True


def test_batches_of_ever_new_shapes_leave_a_share_of_the_room_free(fake_device):
    device = fake_device(available_bytes=1000 * KIB)
    program = FakeProgram(device, lambda size: size, largest=100)
    ragged = Ragged(device, lambda size: size, largest=100)
    budget = budget_of(device)
    assert limits_of(program, budget).fragmented_bytes == 0
    # Another rank has them.
    theirs = (900 * KIB, 0, (50, "dataset"), set(), 9, False, 200 * KIB)
    ranks = SimpleNamespace(size=2, exchange=lambda value: [value, theirs])
    for one in (program, ragged):
        limits = limits_of(one, budget, ranks)
        assert (limits.fragmented_bytes, limits.filled_bytes) == (200 * KIB, limits.limit_bytes)
        together = replace(limits, steps_are_collective=True)
        assert together.filled_bytes == limits.limit_bytes - 200 * KIB
    alone = limits_of(ragged, budget)
    room_bytes = budget.limit_bytes() - device.current().allocated_bytes
    assert alone.fragmented_bytes == int((1 - RAGGED_SHARE) * room_bytes)
    assert alone.limit_bytes == budget.limit_bytes()
    # Segments that grow do not fragment, and a host is left three quarters of its room.
    device.has_expandable_segments = True
    assert limits_of(ragged, budget).fragmented_bytes == 0
    device.has_expandable_segments = False
    device.as_host()
    assert limits_of(ragged, budget).fragmented_bytes == 0
