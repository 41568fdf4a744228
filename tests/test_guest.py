"""A training goes on, bit by bit, where an object of the project cannot be read or written."""

import sys
import warnings
from collections import defaultdict
from threading import Lock
from types import MappingProxyType

import psutil
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.profilers import SimpleProfiler
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_batchmem import (
    BatchFinder,
    MemoryProfiler,
    factory,
    find_batch_size_of_loop,
)
from lightning_batchmem.devices.host import HostMemory
from lightning_batchmem.profile.device_reader import DeviceReader
from tests.helpers.lawful import FAST
from tests.helpers.outcomes import assert_same
from tests.helpers.plans import search_notes
from tests.helpers.profiled import (
    OWN_LOGS,
    At,
    Net,
    Recorder,
    Validated,
    csv_rows,
    data,
    trainer_for,
)
from tests.helpers.wrapped_optimizers import WRAPPED, adam

NESTED = "ignore:The PyTorch API of nested tensors"
SAMPLES = 24
STEPS = 6


# It is a warning, because the training is the same.
SEVERAL = "The Trainer has several MemoryProfilers, which measure and print the same. Remove"


def trained(tmp_path, net, *callbacks, loader=None, **options):
    """Train, and return what is left, with the warnings of the package."""
    torch.manual_seed(0)
    net = net()
    trainer = trainer_for(tmp_path, *callbacks, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(net, data(SAMPLES) if loader is None else loader)
    ours = ("cannot", "MemoryProfiler", "BatchFinder")
    texts = [str(one.message) for one in caught]
    left = [trainer.global_step, dict(net.state_dict()), torch.get_rng_state()]
    texts = [text for text in texts if not text.startswith(SEVERAL)]
    return left, [text for text in texts if any(word in text for word in ours)]


def profiler():
    return MemoryProfiler(csv=False, modules=True, flops=True)


def finder():
    made = BatchFinder(max_batch_size=8, batch_arg_name="batch_size", objective="memory")
    made.policy = FAST
    return made


# --- batches


def nested_batch(samples):
    return torch.nested.nested_tensor([x[: 1 + index % 3] for index, (x, _) in enumerate(samples)])


class OfParts(Net):
    """Trains on a nested tensor, alone or in a dictionary."""

    def training_step(self, batch, batch_idx):
        x = batch["x"] if isinstance(batch, dict) else batch
        return torch.stack(
            [(self.layer.weight[0, : len(one)] * one).sum() for one in x.unbind()]
        ).mean()


COLLATE = {
    "nested": nested_batch,
    "nested in a dictionary": lambda samples: {"x": nested_batch(samples), "n": torch.ones(4)},
}


@pytest.mark.filterwarnings(NESTED)
@pytest.mark.parametrize("collate", COLLATE)
def test_nested_tensors(tmp_path, collate):
    loader = DataLoader(data(SAMPLES).dataset, batch_size=4, collate_fn=COLLATE[collate])
    without, _ = trained(tmp_path, OfParts, loader=loader)
    made = profiler()
    left, texts = trained(tmp_path, OfParts, made, loader=loader)
    assert left[0] == STEPS
    assert_same(left, without, collate)
    (text,) = texts
    assert "The number of samples in a batch cannot be read: RuntimeError: " in text
    # The loader has it.
    assert made.summary.memory.batch_size == 4


@pytest.mark.filterwarnings(NESTED)
def test_nested_tensors_in_a_search(tmp_path):
    class Sized(OfParts):
        batch_size = 2

        def train_dataloader(self):
            dataset = data(SAMPLES).dataset
            return DataLoader(dataset, batch_size=self.batch_size, collate_fn=nested_batch)

    torch.manual_seed(0)
    net = Sized()
    trainer = trainer_for(tmp_path, finder(), MemoryProfiler(csv=False))
    with pytest.warns(UserWarning, match="cannot be read"):
        trainer.fit(net)
    assert (net.batch_size, trainer.global_step) == (8, SAMPLES // 8)


@pytest.mark.parametrize("wrap", [MappingProxyType, lambda sample: {**sample, "l": Lock()}])
def test_samples_that_cannot_be_copied_are_shared(tmp_path, wrap):
    class Samples(Dataset):
        def __len__(self):
            return SAMPLES

        def __getitem__(self, index):
            return wrap({"x": torch.full((4,), float(index)), "y": torch.ones(1)})

    class Sized(Validated):
        batch_size = 8

    def collate(samples):
        return [torch.stack([sample[name] for sample in samples]) for name in "xy"]

    def loader():
        return DataLoader(Samples(), batch_size=8, collate_fn=collate)

    without, _ = trained(tmp_path, Sized, loader=loader())
    left, texts = trained(tmp_path, Sized, finder(), loader=loader())
    assert_same(left, without, "left")
    assert any("A sample that is copied cannot be read: TypeError" in text for text in texts)


class Unreadable:
    """Raises an error for each of its attributes."""

    def __getattribute__(self, name):
        raise ConnectionError(name)


class OwnLoader:
    """Makes batches as another library does."""

    def __init__(self):
        self.loader = data(SAMPLES)

    def __iter__(self):
        return iter([[*batch, Unreadable()] for batch in self.loader])

    def __len__(self):
        return len(self.loader)

    @property
    def batch_size(self):
        raise ConnectionError("batch_size")


class OfOwnLoader(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[:2], batch_idx)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


def test_loaders_and_batches_of_other_libraries(tmp_path):
    without, _ = trained(tmp_path, OfOwnLoader, loader=OwnLoader())
    made = profiler()
    left, texts = trained(tmp_path, OfOwnLoader, made, loader=OwnLoader())
    assert_same(left, without, "left")
    assert len(texts) == len(set(texts))
    assert any("The batch size of the loaders cannot be read: ConnectionError" in t for t in texts)
    assert made.summary.steps == STEPS


# --- optimizers


def with_optimizer(name):
    class Wrapped(Validated):
        batch_size = 2

        def configure_optimizers(self):
            return WRAPPED[name](self.parameters())

        def train_dataloader(self):
            return data(SAMPLES, self.batch_size)

    return Wrapped


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_optimizers_are_profiled(tmp_path, name):
    without, _ = trained(tmp_path, with_optimizer(name))
    made = profiler()
    left, texts = trained(tmp_path, with_optimizer(name), made)
    assert_same(left, without, name)
    assert texts == []
    assert made.summary.memory.breakdown.optimizer_state_bytes > 0
    of_modules = [one.optimizer_state_bytes for one in made.summary.modules.modules]
    assert sum(of_modules) == made.summary.memory.breakdown.optimizer_state_bytes


@pytest.mark.usefixtures("reads_here")
@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_optimizers_are_searched(tmp_path, name):
    torch.manual_seed(0)
    net = with_optimizer(name)()
    made = finder()
    trainer = trainer_for(tmp_path, made)
    trainer.fit(net)
    assert (made.plan.batch_size, made.plan.verified) == (8, True)
    assert not [note for note in search_notes(made.plan) if "did not step" in note]
    assert trainer.global_step == SAMPLES // 8


def step_of(model, optimizer):
    """The step of a loop without Lightning."""

    def step(batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def found_by_loop(model, optimizer, step=None, **options):
    """The plan of a loop on samples of four numbers."""
    return find_batch_size_of_loop(
        step or step_of(model, optimizer),
        lambda size: torch.ones(size, 4),
        model=model,
        optimizer=optimizer,
        max_batch_size=8,
        **options,
    )


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_optimizers_in_a_loop(name):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = WRAPPED[name](list(model.parameters()))

    before = [weight.detach().clone() for weight in model.parameters()]
    plan = found_by_loop(model, optimizer)
    assert_same([weight.detach() for weight in model.parameters()], before, name)
    assert not [note for note in search_notes(plan) if "did not step" in note]
    (trial, *_) = [one for one in plan.trials if one.outcome == "ok"]
    assert ("optimizer_step" in trial.memory.phase_peak_bytes) == (name != "no hook")


class RelativeSteps(torch.optim.SGD):
    """Has no learning rate, as Adafactor with relative steps."""

    def __init__(self, weights):
        super().__init__(weights, lr=0.01)
        self.param_groups[0]["lr"] = None

    def step(self, closure=None):
        self.param_groups[0]["lr"] = 0.01
        loss = super().step(closure)
        self.param_groups[0]["lr"] = None
        return loss


class ReadOnlyState:
    """Shows the state of an optimizer, which cannot be changed."""

    def __init__(self, weights):
        self.inner = adam(weights)
        self.defaults = self.inner.defaults
        self.param_groups = self.inner.param_groups
        self.step = self.inner.step
        self.zero_grad = self.inner.zero_grad
        self.state_dict = self.inner.state_dict
        self.load_state_dict = self.inner.load_state_dict

    @property
    def state(self):
        return MappingProxyType(self.inner.state)


@pytest.mark.usefixtures("reads_here")
@pytest.mark.parametrize("kind", [RelativeSteps, ReadOnlyState])
def test_optimizers_that_are_not_as_those_of_torch_are_searched(tmp_path, kind):
    class Sized(Validated):
        batch_size = 8

        def configure_optimizers(self):
            return kind(self.parameters())

    without, _ = trained(tmp_path, Sized, loader=data(SAMPLES, 8))
    made = finder()
    left, _ = trained(tmp_path, Sized, made, loader=data(SAMPLES, 8))
    assert made.plan.batch_size == 8
    assert_same(left, without, kind.__name__)


class Slotted:
    """A scheduler without a dictionary of attributes."""

    __slots__ = ("optimizer", "steps")

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.steps = 0

    def step(self):
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = 0.01 / self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]


@pytest.mark.usefixtures("reads_here")
def test_a_scheduler_without_a_dictionary_is_searched(tmp_path):
    class Sized(Validated):
        batch_size = 8

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.01)
            scheduler = {"scheduler": Slotted(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step()

    without, _ = trained(tmp_path, Sized, loader=data(SAMPLES, 8))
    left, texts = trained(tmp_path, Sized, finder(), loader=data(SAMPLES, 8))
    assert_same(left, without, "left")
    assert texts == []


@pytest.mark.usefixtures("reads_here")
def test_a_method_of_a_strategy_that_the_project_has_replaced(tmp_path):
    class Sized(Validated):
        batch_size = 8

    lefts = []
    for callbacks in ([], [finder()]):
        torch.manual_seed(0)
        net = Sized()
        trainer = trainer_for(tmp_path, *callbacks)
        setup_optimizers = trainer.strategy.setup_optimizers

        def faster(trainer, setup_optimizers=setup_optimizers):
            setup_optimizers(trainer)
            trainer.optimizers[0].param_groups[0]["lr"] = 0.2

        trainer.strategy.setup_optimizers = faster
        trainer.fit(net, data(SAMPLES, 8))
        lefts.append(dict(net.state_dict()))
        assert trainer.strategy.setup_optimizers is faster
    assert_same(lefts[1], lefts[0], "left")


class Refusing(torch.optim.Adam):
    """Has the hooks of its steps for itself."""

    def register_step_post_hook(self, hook):
        raise PermissionError("not yours")


def test_optimizers_that_refuse_hooks(tmp_path):
    class Net(Validated):
        def configure_optimizers(self):
            return Refusing(self.parameters())

    without, _ = trained(tmp_path, Net)
    made = profiler()
    left, texts = trained(tmp_path, Net, made)
    assert_same(left, without, "hooks")
    assert [text.partition(":")[0] for text in texts] == ["The step of an optimizer cannot be read"]
    assert made.summary.memory.breakdown.optimizer_state_bytes > 0


def test_optimizers_that_refuse_hooks_in_a_loop():
    model = nn.Linear(4, 1)
    optimizer = Refusing(model.parameters())

    with pytest.warns(UserWarning, match="The step of an optimizer cannot be read"):
        plan = found_by_loop(model, optimizer)
    assert plan.batch_size == 8


# --- callbacks, loggers and profilers


class Hidden(Callback):
    """Does not show its attributes."""

    @property
    def __dict__(self):
        raise ConnectionError("hidden")


@pytest.mark.usefixtures("reads_here")
def test_a_callback_that_hides_its_attributes(tmp_path):
    class Sized(Validated):
        batch_size = 8

    without, _ = trained(tmp_path, Sized, Hidden(), loader=data(SAMPLES, 8))
    for made in (profiler(), finder()):
        left, texts = trained(tmp_path, Sized, Hidden(), made, loader=data(SAMPLES, 8))
        assert_same(left, without, type(made).__name__)
        assert len(texts) == len(set(texts))


class WithoutKey(Callback):
    """Has its state_key when the training has started."""

    started = False

    def on_fit_start(self, trainer, pl_module):
        self.started = True

    @property
    def plan(self):
        raise LookupError("plan")


@pytest.mark.usefixtures("reads_here")
def test_a_step_that_reads_the_profiler_of_the_project(tmp_path):
    class Reading(Validated):
        batch_size = 8

        def training_step(self, batch, batch_idx):
            with self.trainer.profiler.profile("step"):
                assert self.trainer.profiler.labels == {"project": "mine"}
                self.trainer.profiler.labels[batch_idx] = len(batch)
                loss = super().training_step(batch, batch_idx)
            del self.trainer.profiler.labels[batch_idx]
            return loss

    profilers = []
    for made in ([], [finder()]):
        profilers.append(SimpleProfiler())
        profilers[-1].labels = {"project": "mine"}
        left, texts = trained(
            tmp_path, Reading, *made, loader=data(SAMPLES, 8), profiler=profilers[-1]
        )
        assert (left[0], texts) == (SAMPLES // 8, [])
    without, searched = (one.recorded_durations for one in profilers)
    assert len(searched["step"]) == len(without["step"]) == SAMPLES // 8


class Silent(Recorder):
    """Tells its directory once: Lightning asks for it before the callbacks start."""

    reads = 0

    @property
    def save_dir(self):
        self.reads += 1
        if self.reads > 1:
            raise RuntimeError("not connected")


def test_a_logger_without_a_directory(tmp_path):
    logger = Silent()
    left, texts = trained(tmp_path, Net, MemoryProfiler(), WithoutKey(), logger=logger)
    assert left[0] == STEPS
    assert texts == ["The log directory cannot be read: RuntimeError: not connected"]
    assert len(csv_rows(tmp_path)) == len(logger.ours) == STEPS


class History(Logger):
    """Expects the keys of its own project only, as neuralprophet's does."""

    name = version = "history"

    def __init__(self):
        super().__init__()
        self.history = defaultdict(list)

    def log_hyperparams(self, *_, **__):
        pass

    def log_metrics(self, metrics, step=None):
        for key, value in metrics.items():
            self.history[key].append(value)


def test_metrics_of_the_variable_go_to_loggers_of_lightning(tmp_path, monkeypatch):
    monkeypatch.setenv(factory.VARIABLE, "profile")
    own = History()
    (adder,) = factory.callbacks()
    loggers = [CSVLogger(tmp_path), own]
    left, texts = trained(tmp_path, Net, adder, logger=loggers)
    assert left[0] == STEPS
    (text,) = texts
    assert text.startswith("History gets no metrics of MemoryProfiler")
    assert set(own.history) == {"epoch", "loss"}
    assert "memory/peak_process_mib" in loggers[0].experiment.metrics_keys
    # A profiler in the code logs them everywhere.
    own.history.clear()
    trained(tmp_path, Net, MemoryProfiler(), logger=[CSVLogger(tmp_path), own])
    assert "memory/peak_process_mib" in own.history


def test_a_directory_that_cannot_be_written_under_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv(factory.VARIABLE, "profile")
    directory = tmp_path / "file"
    directory.write_text("no directory")
    (adder,) = factory.callbacks()
    left, texts = trained(directory, Net, adder)
    assert left[0] == STEPS
    assert [text[:41] for text in texts] == ["MemoryProfiler writes no memory_per_batch"]
    left, texts = trained(directory, Net, MemoryProfiler())
    assert left[0] == STEPS
    assert [text[:41] for text in texts] == ["MemoryProfiler writes no memory_per_batch"]


# --- the kernel, psutil and the device


@pytest.mark.usefixtures("reads_here")
@pytest.mark.parametrize(
    ("owner", "name", "subject"),
    [
        (psutil, "virtual_memory", "The available memory of the CPU"),
        (psutil.Process, "memory_info", ""),
        (HostMemory, "available_bytes", "The limit of the memory"),
        (HostMemory, "peak", "The memory of a step"),
        (HostMemory, "reset_peak", "The memory of a step"),
        (HostMemory, "peak_and_private_bytes", "The memory of a step"),
        (HostMemory, "counters", "The counters of the allocator"),
    ],
)
def test_what_the_system_refuses_is_missing(tmp_path, monkeypatch, owner, name, subject):
    def refuse(*_, **__):
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(DeviceReader, "interval_seconds", 0.0)
    monkeypatch.setattr(owner, name, refuse)
    made = MemoryProfiler()
    left, texts = trained(tmp_path, Net, made)
    assert left[0] == STEPS
    assert [text.partition(" cannot")[0] for text in texts] == ([subject] if subject else [])
    rows = csv_rows(tmp_path)
    has_limit = name != "available_bytes"
    has_peak = name not in ("peak", "reset_peak")
    assert {bool(row["limit_mib"]) for row in rows} == {has_limit}
    assert {bool(row["peak_process_mib"]) for row in rows} == {has_peak}
    assert (made.summary.memory.peak_bytes is not None) is has_peak


@pytest.mark.usefixtures("reads_here")
def test_a_search_where_psutil_is_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    monkeypatch.setattr(psutil.Process, "memory_info", refuse)
    made = finder()
    with pytest.warns(UserWarning, match="available memory of the CPU cannot be read"):
        trainer_for(tmp_path, made).fit(with_optimizer("delegating")())
    assert made.plan.verified
    assert made.plan.limit_bytes > 0


# --- standard output


class Full:
    """A stream that cannot be written."""

    encoding = "utf-8"

    def write(self, text):
        raise OSError(28, "No space left on device")

    def flush(self):
        pass


@pytest.mark.usefixtures("reads_here")
@pytest.mark.parametrize("make", [finder, profiler])
def test_output_that_cannot_be_written(tmp_path, monkeypatch, make):
    made = make()
    monkeypatch.setattr(sys, "stdout", Full())
    trainer = trainer_for(tmp_path, made)
    with pytest.warns(UserWarning, match="Standard output cannot be written: No space left"):
        trainer.fit(with_optimizer("delegating")())
    assert trainer.global_step == SAMPLES // (8 if make is finder else 2)


def test_a_loop_whose_output_cannot_be_written(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Full())
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="Standard output cannot be written"):
        plan = found_by_loop(model, optimizer)
    assert plan.batch_size == 8


# --- steps that a measurement cannot measure


class Deep(Net):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


class Tangents(Deep):
    def training_step(self, batch, batch_idx):
        x, y = batch
        out, tangent = torch.func.jvp(self.layer, (x,), (torch.ones_like(x),))
        return nn.functional.mse_loss(out, y) + tangent.square().mean()


class Jacobian(Deep):
    def training_step(self, batch, batch_idx):
        jacobian = torch.func.jacfwd(self.layer)(batch[0][0])
        return super().training_step(batch, batch_idx) + jacobian.square().mean()


class Reverse(Net):
    def training_step(self, batch, batch_idx):
        gradient = torch.func.grad(lambda x: self.layer(x).sum())(batch[0])
        return super().training_step(batch, batch_idx) + gradient.square().mean()


class Forbidding(Net):
    def training_step(self, batch, batch_idx):
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
            return super().training_step(batch, batch_idx)


class BrokenSubclass(torch.Tensor):
    """A tensor of the project without a storage."""

    def untyped_storage(self):
        raise NotImplementedError("no storage")


class OfSubclass(Net):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x.as_subclass(BrokenSubclass), y), batch_idx)


class Refuses(torch.Tensor):
    """A tensor whose functions are those of the project."""

    @classmethod
    def __torch_function__(cls, *arguments, **keywords):
        raise NotImplementedError


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(context, x, y):
        context.save_for_backward(y)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        assert type(context.saved_tensors[0]) is Refuses
        return gradient, None


class SavesRefusing(Net):
    def training_step(self, batch, batch_idx):
        return Saves.apply(
            super().training_step(batch, batch_idx), torch.ones(2).as_subclass(Refuses)
        )


@pytest.mark.parametrize(
    "kind", [Tangents, Jacobian, Reverse, Forbidding, OfSubclass, SavesRefusing]
)
@pytest.mark.parametrize("profilers", [1, 2])
def test_a_step_that_cannot_be_divided_among_modules(tmp_path, kind, profilers):
    without, _ = trained(tmp_path, kind)
    made = [MemoryProfiler(csv=False, modules=True) for _ in range(profilers)]
    left, texts = trained(tmp_path, kind, *made)
    assert_same(left, without, kind.__name__)
    assert texts == []
    for one in made:
        assert one.summary.modules.modules == ()
        assert one.summary.modules.why_not.startswith("No table of the modules: ")
    # Nothing of the measurement is left.
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    disable = torch._C._autograd._saved_tensors_hooks_disable
    assert type(disable) is type(torch._C._autograd._saved_tensors_hooks_enable)


def test_hooks_of_the_step_above_those_of_the_profiler(tmp_path):
    class OnCpu(Net):
        errors = 0

        def training_step(self, batch, batch_idx):
            with torch.autograd.graph.save_on_cpu():
                try:
                    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
                        pass
                except RuntimeError:
                    OnCpu.errors += 1
                return super().training_step(batch, batch_idx)

    made = MemoryProfiler(csv=False, modules=True)
    left, texts = trained(tmp_path, OnCpu, made)
    # It is the error of the step without a profiler too.
    assert (left[0], OnCpu.errors, texts) == (STEPS, STEPS, [])
    assert made.summary.modules.modules


@pytest.mark.parametrize("checkpoints", [True, False])
def test_hooks_of_the_project_above_those_of_the_profiler(tmp_path, checkpoints):
    class Halved(Deep):
        def training_step(self, batch, batch_idx):
            x, y = batch
            if checkpoints:
                out = checkpoint(self.layer, x, use_reentrant=False)
                return nn.functional.mse_loss(out, y)
            with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float):
                return super().training_step((x, y), batch_idx)

    without, _ = trained(tmp_path, Halved)
    made = MemoryProfiler(csv=False, modules=True)
    left, texts = trained(tmp_path, Halved, made)
    assert_same(left, without, "left")
    assert texts == []
    # Tensors that a checkpoint does not keep are not activations, and those of other hooks are not
    # known.
    assert bool(made.summary.modules.modules) == checkpoints
    reason = "" if checkpoints else "the step has hooks on saved tensors itself"
    assert reason in made.summary.modules.why_not


# --- errors


class WordlessError(RuntimeError):
    """An error of another library, whose text needs what is missing."""

    def __str__(self):
        return self.response.text

    def add_note(self, note):
        raise TypeError("no notes")


@pytest.mark.usefixtures("reads_here")
@pytest.mark.parametrize("make", [profiler, finder])
def test_an_error_that_cannot_be_read_is_still_the_error(tmp_path, make):
    class Failing(Validated):
        batch_size = 8

        def training_step(self, batch, batch_idx):
            raise WordlessError

    with pytest.raises(WordlessError):
        trained(tmp_path, Failing, make(), loader=data(SAMPLES, 8))


# --- two profilers


def test_two_profilers_measure_the_same(tmp_path):
    without, _ = trained(tmp_path, Validated)
    requests = []
    made = [MemoryProfiler(modules=True, flops=True) for _ in range(2)]
    watch = At(on_train_batch_start=lambda *_: requests.append(1))
    left, texts = trained(tmp_path, Validated, made[0], watch, made[1], max_epochs=1)
    assert_same(left, without, "left")
    assert texts == []
    names = sorted(path.name for path in (tmp_path / OWN_LOGS).iterdir())
    assert names == [
        "memory_per_batch.csv",
        "memory_per_batch_1.csv",
        "memory_summary.json",
        "memory_summary_1.json",
    ]
    first, second = (one.summary for one in made)
    assert first.steps == second.steps == STEPS
    states = [one.memory.breakdown.optimizer_state_bytes for one in (first, second)]
    assert states[0] == states[1] > 0
    assert first.modules.modules == second.modules.modules
    assert first.flops.flops_per_sample == second.flops.flops_per_sample > 0
    for summary in (first, second):
        # Both know when a batch was requested.
        assert summary.speed.data_wait_pct is not None


def test_a_sentence_names_two_profilers(tmp_path):
    trainer = trainer_for(tmp_path, MemoryProfiler(csv=False), MemoryProfiler(csv=False))
    with pytest.warns(UserWarning, match=SEVERAL):
        trainer.fit(Validated(), data())
    assert trainer.global_step > 0


def test_the_peaks_of_two_profilers(tmp_path, device_memory):
    from tests.helpers.profiled import MIB, rows, spike

    made = [MemoryProfiler(), MemoryProfiler()]
    trained(tmp_path, lambda: Net(spike(device_memory, 2, "backward", 300)), *made)
    for name in ("memory_per_batch.csv", "memory_per_batch_1.csv"):
        peaks = [float(row["peak_process_mib"]) for row in rows(tmp_path / OWN_LOGS / name)]
        assert peaks[2] - peaks[1] == 300
        assert peaks[3] == peaks[1]
    assert made[0].run_peak_bytes == made[1].run_peak_bytes > 300 * MIB
