"""The trainings that follow a search, and steps with two optimizers in a real Trainer."""

from itertools import chain

import pytest
import torch

from tests.helpers.lawful import quiet_trainer
from tests.helpers.simulated_cuda.device import SimulatedCuda
from tests.helpers.simulated_cuda.search import (
    epochs_of_a_data_set,
    simulated_module,
    trains,
    varied_epochs,
)
from tests.helpers.simulated_cuda.trace import trace_of

GB = 10**9


def outcome_of_all_steps(device, epochs):
    """As ``trains``, but without a look at the layout of the memory."""
    try:
        for number, epoch in enumerate(epochs):
            device.evaluation_step(epoch[0])
            device.evaluation_step(epoch[-1] if number else epoch[0])
            for size in epoch:
                device.train_step(size)
    except torch.OutOfMemoryError:
        return False
    return True


def test_the_last_batch_of_a_data_set_is_smaller_and_the_same_in_each_epoch():
    epochs = [epochs_of_a_data_set(100, seed) for seed in range(5)]
    for same in epochs:
        assert all(epoch == same[0] for epoch in same)
        # Ten million samples make no smaller batch of 100.
        assert set(same[0]) == {100}
    assert len({len(same[0]) for same in epochs}) == 5
    assert epochs_of_a_data_set(7, 0) == [[7] * 7 + [10**7 % 7]] * 10


def test_each_fifth_batch_is_of_random_size():
    sizes = list(chain(*varied_epochs(100, seed=0)))
    assert len(sizes) == 200
    assert all(size == 100 for step, size in enumerate(sizes) if step % 5 != 4)
    assert len(set(sizes[4::5])) > 20
    assert all(1 <= size <= 100 for size in sizes)
    assert varied_epochs(100, seed=0) != varied_epochs(100, seed=1)


def test_a_repeated_layout_ends_a_training_as_all_its_steps_do():
    trace = trace_of("MLP 8x4096 Adam")
    sizes = range(290_000, 400_000, 10_000)
    outcomes = [trains(SimulatedCuda(trace, 80 * GB), epochs_of_a_data_set(s, 1)) for s in sizes]
    assert outcomes == [
        outcome_of_all_steps(SimulatedCuda(trace, 80 * GB), epochs_of_a_data_set(s, 1))
        for s in sizes
    ]
    assert set(outcomes) == {True, False}


def test_the_layout_repeats_in_equal_steps_and_changes_in_others():
    device = SimulatedCuda(trace_of("MLP 8x4096 Adam"), 80 * GB)
    layouts = []
    for size in (1000, 1000, 1000, 1000, 9000):
        device.train_step(size)
        layouts.append(device.layout())
    assert layouts[2] == layouts[3]
    assert layouts[3] != layouts[4]
    device.release_cached()
    assert device.layout() != layouts[4]


def test_an_epoch_that_does_not_fit_ends_a_training_after_epochs_that_did():
    trace = trace_of("MLP 8x4096 Adam")
    device = SimulatedCuda(trace, 80 * GB)
    small = [[1000] * 3] * 5
    assert trains(device, small)
    assert not trains(device, [*small, [500_000]])


def test_the_process_of_an_earlier_training_ends_the_next_one_as_a_new_process_does():
    trace = trace_of("MLP 8x4096 Adam")
    used = SimulatedCuda(trace, 80 * GB)
    trainings = [(370_000, 0), (320_000, 1), (345_000, 2), (345_000, 3)]
    for size, seed in trainings:
        epochs = varied_epochs(size, seed)
        assert trains(used, epochs) is trains(SimulatedCuda(trace, 80 * GB), epochs)


@pytest.mark.parametrize("name", ["MLP 8x4096 Adam", "DCGAN 128 two Adams"])
def test_steps_of_a_trainer_are_those_of_the_device(name):
    device, expected = (SimulatedCuda(trace_of(name), 80 * GB) for _ in range(2))
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=3, limit_val_batches=0)
    trainer.fit(simulated_module(device))
    for _ in range(3):
        expected.train_step(2)
    assert device.layout() == expected.layout()
    assert device.peak() == expected.peak()


def test_each_optimizer_clears_its_own_states():
    device = SimulatedCuda(trace_of("DCGAN 128 two Adams"), 80 * GB)
    generator, discriminator = simulated_module(device).configure_optimizers()
    device.train_step(2)
    both_bytes = device.requested
    generator.state.clear()
    generator_bytes = both_bytes - device.requested
    discriminator.state.clear()
    discriminator_bytes = both_bytes - generator_bytes - device.requested
    sizes = [
        sum(parameter.nbytes for parameter in network.parameters())
        for network in meta_module(device.trace.network).children()
    ]
    assert [generator_bytes, discriminator_bytes] == [2 * size for size in sizes]


def meta_module(network):
    with torch.device("meta"):
        return network.module()
