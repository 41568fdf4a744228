"""The memory test: lines of a step, against numbers known from the shapes, and against a file."""

import gc
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_batchmem import assert_memory
from lightning_batchmem.__main__ import main
from lightning_batchmem.check import MeasuredStep, PhaseMemory, compared, measure
from lightning_batchmem.plan.json_fields import to_json

MIB = 2**20
FEATURES = 256
HIDDEN = 1024
FLOAT_BYTES = 4
SAMPLE_BYTES = FEATURES * FLOAT_BYTES
WEIGHT_BYTES = FEATURES * HIDDEN * FLOAT_BYTES
DEPTH = 1


class Network(LightningModule):
    """Wide, so that weights are larger than the activations of a few samples."""

    def __init__(self, depth=1, optimizer=torch.optim.SGD):
        super().__init__()
        self.optimizer = optimizer
        self.body = nn.Sequential()
        for _ in range(depth):
            self.body.append(nn.Linear(FEATURES, HIDDEN, bias=False))
            self.body.append(nn.Sigmoid())
            self.body.append(nn.Linear(HIDDEN, FEATURES, bias=False))

    def training_step(self, batch, batch_idx):
        return self.body(batch).mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.01)


def data(samples=64):
    return DataLoader(torch.randn(samples, FEATURES), batch_size=4)


def make():
    return Network(DEPTH), data()


def phases(make, **base):
    return measure(make, base).phases


@pytest.fixture(autouse=True)
def reads_in_this_process(reads_here):
    """The start of a worker takes long."""


# --- the measurement


def test_the_lines_of_a_step():
    measured = phases(make)
    assert list(measured) == ["forward", "backward", "optimizer_step"]
    forward = measured["forward"]
    # The most bytes of a sample are alive after the activation function, which has its input still.
    assert forward.sample_bytes == SAMPLE_BYTES + 2 * HIDDEN * FLOAT_BYTES
    # The weights and the gradients of the last step. The rest are numbers that Lightning logs.
    assert 0 <= forward.fixed_bytes - 4 * WEIGHT_BYTES < 100
    deeper = phases(lambda: (Network(depth=2), data()))["forward"]
    assert deeper.fixed_bytes - forward.fixed_bytes == 4 * WEIGHT_BYTES
    # What the first layers keep for backward.
    assert deeper.sample_bytes - forward.sample_bytes == SAMPLE_BYTES + HIDDEN * FLOAT_BYTES


def test_a_module_alone():
    class WithData(Network):
        batch_size = 4

        def train_dataloader(self):
            return DataLoader(torch.randn(64, FEATURES), self.batch_size)

    assert phases(WithData) == phases(lambda: (WithData(), None))


def test_what_the_process_held_before_is_not_part_of_it():
    first = measure(make, {})
    others = [torch.randn(1000, 1000) for _ in range(3)]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    assert measure(make, {}) == first
    assert len(others) == 3
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]
    assert gc.isenabled()


class RandomLengths(Dataset):
    """Samples of random lengths, drawn when the data set is made."""

    def __init__(self):
        self.lengths = torch.randint(1, 500, (300,)).tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.zeros(self.lengths[index], FEATURES)


def padded(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


@pytest.mark.slow
def test_samples_of_random_lengths_are_the_same_in_each_measurement():
    def make():
        return Network(), DataLoader(RandomLengths(), batch_size=4, collate_fn=padded, shuffle=True)

    first = phases(make)
    torch.manual_seed(1)
    assert phases(make) == first


class OneLong(Dataset):
    """Samples of one row, and one of fifty."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.zeros(50 if index == 30 else 1, FEATURES)


def test_the_longest_of_64_samples_makes_all_batches():
    loader = DataLoader(OneLong(), batch_size=4, collate_fn=padded)
    forward = phases(lambda: (Network(), loader))["forward"]
    assert forward.sample_bytes == 50 * (SAMPLE_BYTES + 2 * HIDDEN * FLOAT_BYTES)


@pytest.mark.parametrize(
    ("base", "samples", "message"),
    [
        ({"accelerator": "gpu"}, 64, "accelerator must be cpu for the memory test, got 'gpu'"),
        ({"devices": 2}, 64, "devices must be one device, got 2 on 1 nodes in 'the memory test'"),
        ({"fast_dev_run": True}, 64, "find_batch_size cannot search"),
        (
            {},
            2,
            "the memory must be measured at two sizes, got one: 2 samples instead of the project's"
            " 4: the data set has no",
        ),
    ],
)
def test_what_cannot_be_measured(base, samples, message):
    with pytest.raises(ValueError, match=message):
        measure(lambda: (Network(), data(samples)), base)


def test_a_compiled_step_is_refused(monkeypatch):
    monkeypatch.setattr(
        "lightning_batchmem.search.steps.TrialMeter.is_compiled", property(lambda _: True)
    )
    with pytest.raises(ValueError, match=r"the memory of a compiled step cannot be counted"):
        measure(make, {})


# --- the comparison

VERSIONS = {"lightning_batchmem": "1", "torch": "2"}


def memory(versions=VERSIONS, **phases):
    return MeasuredStep(phases, versions)


def sample(sample_bytes):
    return PhaseMemory(sample_bytes=sample_bytes)


def fixed(fixed_bytes):
    return PhaseMemory(fixed_bytes=fixed_bytes)


@pytest.mark.parametrize(
    ("before", "now", "tolerance", "has_grown"),
    [
        (100, 101, 0.01, False),
        (100, 102, 0.01, True),
        # 0.29 * 100 is less than 29.
        (100, 129, 0.29, False),
        (100, 100, 0, False),
        (0, 0, 0.5, False),
        (0, 1, 0.5, True),
    ],
)
def test_the_tolerance(before, now, tolerance, has_grown):
    for part in (sample, fixed):
        grown, smaller = compared(
            memory(forward=part(before)), memory(forward=part(now)), tolerance
        )
        assert bool(grown) == has_grown
        assert smaller == []


def test_each_part_is_one_line():
    before = memory(forward=PhaseMemory(MIB, 100), backward=fixed(MIB))
    now = memory(forward=PhaseMemory(MIB * 3 // 2, 133), optimizer_step=sample(8))
    assert compared(before, now, 0.01) == (
        [
            "forward, a sample: 100 -> 133 bytes (+33.0%)",
            "forward, fixed part: 1,048,576 -> 1,572,864 bytes (+50.0%)",
            "optimizer step, a sample: 0 -> 8 bytes",
        ],
        ["backward, fixed part: 1,048,576 -> 0 bytes (-100.0%)"],
    )


def test_versions_that_differ_are_named_where_a_part_differs():
    other = {"torch": "3", "lightning_batchmem": "1"}
    assert compared(memory(), memory(other), 0.01) == ([], [])
    grown, smaller = compared(memory(), memory(other, forward=sample(1)), 0.01)
    assert grown[1:] == ["The reference was measured with torch 2, and this with torch 3."]
    assert smaller == []


# --- the file

MEMORY = MeasuredStep({"forward": PhaseMemory(1, 2)}, VERSIONS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"phases": {}}',
        '{"versions": {}}',
        to_json(MEMORY)[:-10],
        to_json(MEMORY).replace('"fixed_bytes": 1', '"fixed_bytes": "1"'),
        to_json(MEMORY).replace('"fixed_bytes": 1', '"fixed_bytes": NaN'),
        "[" * 100_000,
        "\xff",
    ],
)
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "memory.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"memory\.json must be a reference of the memory test"):
        assert_memory(make, path)


@pytest.fixture
def reference(tmp_path):
    """The reference of ``make``, as the command line writes it."""
    path = tmp_path / "memory.json"
    assert main(["check", f"{__name__}:make", "--reference", str(path), "--update"]) == 0
    return path


def test_the_same_model_passes_and_a_larger_one_does_not(reference, monkeypatch, capsys):
    content = json.loads(reference.read_text())
    assert list(content) == ["phases", "versions", "device"]
    assert content["device"] == "cpu"
    # Version 0.4 has written no device.
    del content["device"]
    reference.write_text(json.dumps(content))
    capsys.readouterr()
    assert_memory(make, reference)
    assert capsys.readouterr().out == ""
    monkeypatch.setitem(make.__globals__, "DEPTH", 2)
    with pytest.raises(AssertionError) as failed:
        assert_memory(make, str(reference), tolerance=0.01)
    names = {line.partition(":")[0] for line in str(failed.value).splitlines()}
    # The peak of backward comes after the activations are freed, when all gradients are there.
    assert names == {
        "forward, a sample",
        "forward, fixed part",
        "backward, fixed part",
        "optimizer step, fixed part",
    }
    assert_memory(make, reference, tolerance=100.0)


def test_a_smaller_model_passes_and_is_named(reference, monkeypatch, capsys):
    monkeypatch.setitem(make.__globals__, "HIDDEN", 512)
    capsys.readouterr()
    assert_memory(make, reference)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("forward, a sample: 9,216 -> 5,120 bytes (-44.4%)")


def test_without_a_file_it_fails_with_the_command_that_writes_it(tmp_path):
    path = tmp_path / "memory.json"
    with pytest.raises(AssertionError) as failed:
        assert_memory(make, path, base={"precision": "bf16-mixed"})
    text, command = str(failed.value).split(" Write it with: python -m lightning_batchmem ")
    assert text == f"{path} does not exist."
    assert command.startswith(f"check {__name__}:make --reference ")
    assert main(command.split()) == 0
    assert_memory(make, path, base={"precision": "bf16-mixed"})


def test_an_object_and_a_function_without_a_name(tmp_path):
    path = tmp_path / "memory.json"
    module, *_ = make()
    message = r"such as lambda: MyModule\(\), got an object of " + type(module).__name__
    with pytest.raises(ValueError, match=message):
        assert_memory(module, path)
    with pytest.raises(AssertionError) as failed:
        assert_memory(lambda: None, path)
    command = f"check {__name__}:MAKE --reference {path} --update"
    assert str(failed.value).endswith(f"{command}, where MAKE is the name of a function")


def test_an_argument_that_it_does_not_have(tmp_path):
    message = r"assert_memory has no argument update\. It has make, reference, tolerance, base\.$"
    with pytest.raises(TypeError, match=message):
        assert_memory(make, tmp_path / "memory.json", update=True)


def test_a_reference_of_a_simulated_gpu_is_not_one_of_the_host(tmp_path):
    path = tmp_path / "memory.json"
    path.write_text(to_json(replace(MEMORY, device="simulated RTX-4090")))
    with pytest.raises(ValueError, match=r"another device \(simulated RTX-4090, and not cpu\)"):
        assert_memory(make, path)


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf"), "0.1", None, True])
def test_a_wrong_tolerance(reference, tolerance):
    with pytest.raises(ValueError, match=r"tolerance must be a share such as 0\.01, got"):
        assert_memory(make, reference, tolerance)
