"""Compiled modules: each size is its own program, and training compiles as if hard-coded."""

import pytest
import torch
import torch._dynamo
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from lightning_batchmem import BatchFinder
from lightning_batchmem.search.compiled import compiled_frames, each_size_static, forget_compiled
from lightning_batchmem.search.trial import LIVE_BYTES_NOT_COUNTED
from tests.helpers.lawful import MIB, Lawful, law
from tests.helpers.plans import search_notes


class Programs:
    """A backend of ``torch.compile`` that records the batch size of each program.

    The size of a program for a symbolic size is ``"any"``.
    """

    def __init__(self):
        self.made = []

    def __call__(self, graph, inputs):
        sizes = [value.shape[0] if isinstance(value, Tensor) else value for value in inputs]
        is_symbolic = any(isinstance(size, torch.SymInt) for size in sizes)
        self.made.append("any" if is_symbolic else max(sizes))
        return graph.forward


class Compiled(Lawful):
    def __init__(self, device, programs, batch_size):
        super().__init__(device, law, batch_size)
        compiled = torch.compile(nn.Linear(1, 1), backend=programs)
        # This is a function, since the finder restores the contents of other attributes.
        self.compiled = lambda x: compiled(x)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.compiled(batch[0]).mean()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_each_size_is_static_and_training_is_compiled_as_if_hard_coded(fit, fake_device):
    """Above a limit of programs for one function, torch.compile runs the function eagerly.

    A probe would then measure other memory than that of the training.
    """

    def run(batch_size, *callbacks):
        torch.compiler.reset()
        device = fake_device(available_bytes=500 * MIB)
        programs = Programs()
        before = []
        notes = LambdaCallback(on_train_start=lambda *_: before.extend(programs.made))
        with torch._dynamo.config.patch(cache_size_limit=2):
            module = Compiled(device, programs, batch_size)
            callbacks = [*callbacks, notes]
            fit(module, callbacks[0], device, *callbacks[1:], max_steps=-1, max_epochs=2)
        return before, programs.made[len(before) :]

    finder = BatchFinder(objective="memory")
    in_search, searched = run(3, finder)
    before, hard_coded = run(352)
    assert [trial.batch_size for trial in finder.plan.trials] == [2, 8, 168, 336, 352]
    # A rehearsal also runs the last batch of an epoch, which is short.
    assert in_search == [2, 8, 168, 336, 296, 352, 72]
    assert before == []
    # The last batch of an epoch is short, and it is compiled for any size.
    assert searched == hard_coded == [352, "any"]


def test_the_users_setting_is_restored():
    config = torch._dynamo.config
    assert config.automatic_dynamic_shapes
    with each_size_static():
        assert not config.automatic_dynamic_shapes
    assert config.automatic_dynamic_shapes


@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_compiler_is_reset_only_if_something_was_compiled(monkeypatch, fullgraph):
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    counters = torch._dynamo.utils.counters
    for name in ("frames", "stats"):
        monkeypatch.setitem(counters, name, type(counters[name])())
    forget_compiled()
    assert not compiled_frames()
    assert resets == []
    torch.compile(lambda x: x + 1, backend="eager", fullgraph=fullgraph)(torch.zeros(1))
    assert compiled_frames()
    forget_compiled()
    assert resets == [1]


class CompiledInside(torch.optim.SGD):
    """Compiles its step as a whole, which a dispatch mode makes impossible."""

    def step(self, closure=None):
        loss = closure()
        compiled = torch.compile(torch.sub, fullgraph=True, backend="eager")
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.copy_(compiled(parameter, parameter.grad))
        return loss


def test_an_optimizer_that_is_compiled_inside_on_the_host(fit, device):
    device.as_host()
    module = Lawful(device, law)
    module.configure_optimizers = lambda: CompiledInside(module.parameters(), lr=0.1)
    finder = BatchFinder(max_batch_size=8, objective="memory")
    fit(module, finder, device)
    assert (finder.plan.batch_size, finder.plan.verified) == (8, True)
    assert LIVE_BYTES_NOT_COUNTED in search_notes(finder.plan)
