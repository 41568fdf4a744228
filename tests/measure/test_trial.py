from __future__ import annotations

from typing import Any

import pytest

from lightning_batchmem.measure.phases import PhasePeaks
from lightning_batchmem.measure.steps import Steps
from lightning_batchmem.measure.trial import Looseness, measure
from lightning_batchmem.plan.records import MIB
from tests.conftest import FakeDevice


class Heap(FakeDevice):
    """Holds holes between its blocks, as the host's heap does."""

    def hold(self, *, in_use: int, loose: int) -> None:
        self.free()
        self.use((in_use + loose) * MIB)
        self.loose = loose * MIB


@pytest.fixture
def heap() -> Heap:
    heap = Heap(2**40)
    heap.loose = 0
    return heap


def test_looseness_is_what_was_added_and_is_in_no_block(heap: Heap) -> None:
    looseness = Looseness(heap)
    looseness.mark()
    assert looseness.share is None  # nothing has begun
    heap.hold(in_use=100, loose=20)
    looseness.start()
    heap.hold(in_use=160, loose=60)
    looseness.mark()
    assert looseness.share == pytest.approx(0.4)  # 40 of the 100 MiB more
    heap.hold(in_use=200, loose=20)
    looseness.mark()
    assert looseness.share == pytest.approx(0.4)  # the most that was seen
    heap.hold(in_use=90, loose=40)
    looseness.mark()
    assert looseness.share == 1.0  # more is held, and less of it in blocks
    looseness.start()
    assert looseness.share is None


def test_looseness_is_unknown_where_the_allocator_does_not_tell(heap: Heap) -> None:
    heap.loose = None
    looseness = Looseness(heap)
    looseness.start()
    heap.use(MIB)
    looseness.mark()
    assert looseness.share is None


class Given(Steps):
    """Steps whose peaks are given, in MiB."""

    first_phase = "forward"

    def __init__(self, heap: Heap, peaks: list[int]) -> None:
        self.heap, self.peaks = heap, peaks

    def begin(self, batch_size: int) -> int:
        return 1

    def run(self, batch_size: int, index: int) -> None:
        self.heap.use(self.peaks[index] * MIB)
        self.heap.free()

    def end(self) -> None:
        pass

    def let_go(self) -> None:
        pass


@pytest.mark.parametrize(
    ("warmup", "peaks", "noise"),
    [
        (0, [50, 100], 0),  # the first finds nothing cached
        (0, [50, 100, 130], 30),
        (1, [50, 100, 130], 30),
        (2, [50, 60, 100, 130, 110], 30),
    ],
)
def test_the_first_step_at_a_size_is_no_noise(heap: Heap, warmup: int, peaks: list[int], noise: int) -> None:
    steps: Any = Given(heap, peaks)
    trial = measure(
        steps,
        heap,
        PhasePeaks(heap),
        Looseness(heap),
        4,
        warmup_steps=warmup,
        measured_steps=len(peaks) - warmup,
        enough_bytes=2**40,
    )
    assert trial.noise_bytes == noise * MIB
    assert trial.peak_bytes == max(peaks[warmup:]) * MIB
    assert (trial.full_steps, trial.samples_run) == (len(peaks), 4 * len(peaks))
