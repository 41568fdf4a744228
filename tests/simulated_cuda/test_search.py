from __future__ import annotations

import pytest

from tests.simulated_cuda.device import SimulatedCuda
from tests.simulated_cuda.oracle import largest_quiet
from tests.simulated_cuda.search import search
from tests.simulated_cuda.trace import trace_of

GB = 10**9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["U-Net 256 AdamW", "GPT 12x768 AdamW", "ResNet-18 SGD"])
def test_a_search_finds_nearly_the_largest_size_that_trains(name: str) -> None:
    trace = trace_of(name)
    found = search(SimulatedCuda(trace, 8 * GB), memory_limit=0.9)
    assert found.trains
    assert found.num_ooms <= 2
    assert found.sizes <= 8
    assert found.steps_at_size <= 40
    largest = largest_quiet(trace, int(0.9 * 8 * GB))
    assert found.plan.batch_size >= min(0.93 * largest, largest - 1)
