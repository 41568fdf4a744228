from __future__ import annotations

import pytest
import torch

from benchmarks.common import trainer_for
from benchmarks.resnet import resnet50
from benchmarks.watched import Watched, watched
from benchmarks.workloads import IGNORED, LONGEST, SHORTEST, WORKLOADS, module_for


@pytest.fixture(autouse=True)
def fresh_counts() -> None:
    Watched.samples_by_size.clear()
    Watched.out_of_memory.clear()


def test_every_workload_makes_a_module_of_the_size_asked_for() -> None:
    for name in WORKLOADS:
        module = module_for(name, 3)
        assert module.batch_size == 3
        assert module.train_dataloader().batch_size == 3


@pytest.mark.parametrize("name", ["GAN", "wide MLP"])
def test_samples_are_counted_with_and_without_manual_optimization(name: str) -> None:
    trainer_for([], 2 * WORKLOADS[name].optimizers).fit(watched(name, 3))
    assert Watched.samples_by_size == {3: 6}
    assert Watched.out_of_memory == []


@pytest.mark.parametrize("name", ["GAN", "wide MLP"])
def test_an_out_of_memory_error_in_a_step_is_counted_once(name: str) -> None:
    module = watched(name, 3)

    def out_of_memory(*args: object) -> None:
        raise MemoryError("full")

    for network in module.network.modules():
        network.register_forward_pre_hook(out_of_memory)
    with pytest.raises(MemoryError, match="full"):
        trainer_for([], 1).fit(module)
    assert Watched.out_of_memory == ["MemoryError: full"]
    assert Watched.samples_by_size == {3: 3}


def test_ragged_samples_are_padded_to_the_longest_and_their_padding_is_no_target() -> None:
    module = watched("ragged")
    samples = [module.sample(torch.Generator().manual_seed(index)) for index in range(500)]
    lengths = sorted(len(inputs) for inputs, _ in samples)
    assert SHORTEST <= lengths[0] < SHORTEST + 3
    assert LONGEST - 3 < lengths[-1] <= LONGEST
    assert lengths[250] < (SHORTEST + LONGEST) / 2 - 15  # skewed
    short, long = (next(s for s in samples if len(s[0]) == length) for length in (lengths[0], lengths[-1]))
    inputs, targets = module.collate([short, long])
    assert inputs.shape == targets.shape == (2, lengths[-1])
    assert (targets[0] == IGNORED).sum() == lengths[-1] - lengths[0]


def test_resnet50_has_the_parameters_that_its_paper_gives_it() -> None:
    with torch.device("meta"):
        network = resnet50()
    assert sum(parameter.numel() for parameter in network.parameters()) == 25_557_032
    assert network(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)
