"""The contract on a CUDA device: a run with BatchFinder is the run with its size hard-coded."""

import gc

import pytest
import torch
from lightning.pytorch import Callback

from lightning_batchmem import BatchFinder
from tests.helpers.contract_cases import CASES, SIZE
from tests.helpers.cuda_stub import is_cuda_stub
from tests.helpers.outcomes import assert_same, outcome_of

NOT_ON_THE_STUB = {
    "scripted": "TorchScript compiles kernels while it runs",
    "weights_averaged_stochastically": "divides by a number that was counted on the device",
    "entangled_attributes": "adds a tensor of the host",
    "buffers_that_steps_resize": "compares extremes that were computed on the device",
    # The result of a comparison there is what the memory held before.
    "a_step_that_reads_callbacks_and_the_logger": "EarlyStopping compares losses on the device",
}
"""Case -> why it needs a real device."""


class OfTraining(Callback):
    """Reads what the device holds before the first training step, and the peaks from there on."""

    def __init__(self):
        self.start = None
        self.peaks = None

    def on_train_batch_start(self, trainer, *_):
        if self.start is None:
            gc.collect()
            # The first products of a process allocate workspaces, here those of the search.
            torch._C._cuda_clearCublasWorkspaces()
            self.start = torch.cuda.memory_allocated(), retries(), torch.cuda.get_rng_state()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.reserved_at_start = torch.cuda.memory_reserved()

    def on_train_end(self, *_):
        live_bytes = torch.cuda.max_memory_allocated() - self.start[0]
        reserved_bytes = torch.cuda.max_memory_reserved() - self.reserved_at_start
        self.peaks = {"live_bytes": live_bytes, "reserved_bytes": reserved_bytes}


def retries():
    return torch.cuda.memory_stats().get("num_alloc_retries", 0)


def without_results(value):
    """The value without what kernels have computed, since those of the stub compute nothing."""
    if isinstance(value, dict):
        return {key: without_results(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_results(one) for one in value]
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return "a number" if isinstance(value, float) else value


@pytest.fixture(autouse=True)
def _metrics_without_results(monkeypatch):
    """Let metrics count nothing on the stub.

    torch.bincount reads from the device how large its result is.
    """
    if is_cuda_stub():

        def bincount(values, minlength):
            return values.new_zeros(minlength, dtype=torch.int64)

        monkeypatch.setattr(torch, "bincount", bincount)


def run(folder, name, size, finder):
    """The outcome of a run, and what it held when training began."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    allocated_before = torch.cuda.memory_allocated()
    retries_before = retries()
    of_training = OfTraining()
    outcome = outcome_of(
        folder, CASES[name], size, finder, of_training, accelerator="gpu", devices=1
    )
    allocated_bytes, retries_at_start, random_state = of_training.start
    start = {
        "allocated_bytes": allocated_bytes - allocated_before,
        "retries": retries_at_start - retries_before,
        "random state": random_state,
    }
    if is_cuda_stub():
        # A file of metrics has what kernels have computed.
        texts = [text.splitlines()[0] for text in outcome.pop("texts")]
        random_states = outcome.pop("random")
        outcome = {"texts": texts, "random": random_states, **without_results(outcome)}
    start["peaks"] = of_training.peaks
    return {"start": start, "random on the device": torch.cuda.get_rng_state(), **outcome}


@pytest.mark.usefixtures("reads_here")
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
@pytest.mark.parametrize("name", CASES)
def test_no_trace(name, tmp_path):
    if is_cuda_stub() and name in NOT_ON_THE_STUB:
        pytest.skip(f"needs a real device: {NOT_ON_THE_STUB[name]}")
    finder = BatchFinder(**{"objective": "memory", "max_batch_size": SIZE, **CASES[name].finder})
    searched = run(tmp_path / "searched", name, CASES[name].start, finder)
    hard_coded = run(tmp_path / "hard", name, SIZE, None)
    assert (finder.plan.batch_size, finder.plan.limited_by) == (SIZE, CASES[name].limited_by)
    for key, value in hard_coded.items():
        assert_same(searched[key], value, key)
