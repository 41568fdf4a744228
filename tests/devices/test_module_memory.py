"""The memory of a step by module, against two other ways to count it."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional

from lightning_batchmem.devices.module_memory import ModuleStorages, why_not_possible
from lightning_batchmem.devices.peaks import LiveStorages, PhasePeaks
from tests.helpers.measured_modules import Checkpointed, Twice

VOCABULARY = 50


class Tied(nn.Module):
    """The head has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, batch):
        scores = self.head(self.encoder(self.embedding(batch)))
        return functional.cross_entropy(scores.flatten(0, 1), batch.flatten())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 32, 2, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, batch):
        return self.head(self.lstm(batch)[0]).square().mean()


class TwoOptimizers(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Linear(32, 64)
        self.discriminator = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def parts(self):
        return [self.generator, self.discriminator]

    def forward(self, batch):
        fake = self.generator(batch)
        return self.discriminator(fake).mean() + self.discriminator(fake.detach()).square().mean()


NETWORKS = {
    "tied": (Tied, lambda: torch.randint(0, VOCABULARY, (8, 12))),
    "twice": (Twice, lambda: torch.randn(512, 64)),
    "checkpointed": (Checkpointed, lambda: torch.randn(2048, 64)),
    "recurrent": (Recurrent, lambda: torch.randn(8, 12, 16)),
    "two optimizers": (TwoOptimizers, lambda: torch.randn(8, 32)),
}


class Program:
    """A network with its optimizers, after two steps."""

    def __init__(self, name):
        torch.manual_seed(0)
        network, batch = NETWORKS[name]
        self.module = network()
        parts = self.module.parts() if name == "two optimizers" else [self.module]
        self.optimizers = [torch.optim.Adam(part.parameters(), 0.01) for part in parts]
        self.batch = batch()
        self.step()
        self.step()

    def step(self):
        loss = self.module(self.batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def measured(self):
        storages = ModuleStorages(self.module, self.optimizers, [self.batch], "cpu")
        with storages:
            self.step()
        return storages


@pytest.fixture(params=NETWORKS)
def program(request):
    return Program(request.param)


def highest(storages):
    """The moment with the most live bytes, and the bytes of each module at it."""
    moment = max(storages.moments(), key=lambda moment: moment.live_bytes)
    return moment, storages.bytes_by_module(moment)


def test_the_sum_is_that_of_two_other_counters(program):
    moment, bytes_of = highest(program.measured())
    assert sum(bytes_of.values()) == moment.live_bytes
    live = LiveStorages()
    with live:
        program.step()
        live.reset_peak()
        program.step()
    assert moment.live_bytes == live.peak().allocated_bytes
    tracker = MemTracker()
    tracker.track_external(program.module, *program.optimizers, program.batch)
    with tracker:
        program.step()
    assert moment.live_bytes == tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def test_parameters_gradients_and_state_belong_to_the_module_of_the_parameter(program):
    owned = Counter()
    seen = set()
    for name, module in program.module.named_modules():
        for weight in module.parameters(recurse=False):
            if id(weight) not in seen:
                seen.add(id(weight))
                owned[name] += weight.nbytes
    storages = program.measured()
    start_of = storages.bytes_by_module(storages.moments()[0])
    for name, weights_bytes in owned.items():
        # Adam has two tensors of each parameter, and a count of four bytes.
        assert 0 <= start_of[name] - 4 * weights_bytes <= 4 * 16


def test_a_measured_step_computes_the_same_as_another(program):
    other = Program(
        next(name for name, (kind, _) in NETWORKS.items() if program.module.__class__ is kind)
    )
    for _ in range(2):
        torch.manual_seed(1)
        program.measured()
        torch.manual_seed(1)
        other.step()
    for weight, expected in zip(
        program.module.parameters(), other.module.parameters(), strict=True
    ):
        assert torch.equal(weight, expected)


def test_the_modules_add_up_to_the_live_bytes_at_every_moment_of_each_phase(program):
    phases = PhasePeaks(None)
    storages = ModuleStorages(program.module, program.optimizers, [program.batch], "cpu", phases)
    phases.read_from(storages)
    with storages:
        phases.start("forward")
        loss = program.module(program.batch)
        phases.enter("backward")
        loss.backward()
        phases.enter("optimizer_step")
        for optimizer in program.optimizers:
            optimizer.step()
        peaks = phases.stop().phase_peak_bytes
    start, *moments = storages.moments()
    assert (start.num_events, start.phase) == (0, None)
    assert list(dict.fromkeys(moment.phase for moment in moments)) == list(peaks)
    for phase, peak_bytes in peaks.items():
        in_phase = [moment for moment in moments if moment.phase == phase]
        highest = max(in_phase, key=lambda moment: moment.live_bytes)
        # Freed storages that nothing has created since may have been alive when the phase began.
        assert highest.live_bytes <= peak_bytes
        bytes_of = storages.bytes_by_module(highest)
        assert sum(bytes_of.values()) == highest.live_bytes
    assert max(moment.live_bytes for moment in moments) == max(peaks.values())
    assert list(bytes_of) == [name for name, _ in program.module.named_modules()]


def test_activations_belong_to_the_module_that_made_them():
    storages = Program("twice").measured()
    backward = next(moment for moment in storages.moments() if "backward" in str(moment.operator))
    bytes_of = storages.bytes_by_module(backward)
    # In each pass the activation function makes 512 x 64 numbers of four bytes.
    assert bytes_of["body.1"] >= 2 * 512 * 64 * 4
    assert bytes_of["body"] == 0
    # The batch was made before the step.
    assert bytes_of[""] >= 512 * 64 * 4


def test_the_operator_at_the_peak_is_named():
    module = nn.Sequential(nn.Linear(4, 1000), nn.ReLU(), nn.Linear(1000, 1))
    storages = ModuleStorages(module, [], None, "cpu")
    with storages, torch.no_grad():
        module(torch.ones(8, 4))
    moment, _ = highest(storages)
    assert (str(moment.operator), moment.module) == ("aten.relu.default", "1")


def test_nothing_stays_behind_after_the_step():
    program = Program("tied")
    program.measured()
    assert not any(weight._post_accumulate_grad_hooks for weight in program.module.parameters())
    assert LiveStorages.is_possible()


def test_it_is_not_possible_in_every_program():
    module = nn.Linear(2, 2)
    assert why_not_possible(module, is_compiled=False) == ""
    assert "torch.compile" in why_not_possible(module, is_compiled=True)
    with LiveStorages():
        assert "another dispatch mode" in why_not_possible(module, is_compiled=False)


def test_backward_belongs_to_the_module_whose_pass_runs():
    module = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))
    entered = []
    storages = ModuleStorages(module, [], None, "cpu")

    class Noted(LiveStorages):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            entered.append((str(func), storages._running.innermost))
            return func(*args, **(kwargs or {}))

    with storages:
        loss = module(torch.ones(4, 8)).sum()
        with Noted():
            loss.backward()
    names = dict(entered)
    assert names["aten.tanh_backward.default"] == "0.1"
    assert names["aten.mm.default"] == "0.0"
    assert names["aten.ones_like.default"] == ""
