import ast
import gc
import inspect
import multiprocessing
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_batchmem import BatchFinder, MemoryProfiler
from lightning_batchmem.devices.foreign_values import begin_run
from lightning_batchmem.search.project_size import ProjectSize
from tests.helpers.fake_device import FakeDevice
from tests.helpers.lawful import FAST, quiet_trainer

TESTS = Path(__file__).parent
# All tests in these folders are slow.
SLOW_FOLDERS = (TESTS / "benchmarks", TESTS / "ecosystem")
# A test that uses one of these names starts a Python process, which imports torch for seconds.
STARTERS = {"on_stub", "output_on_stub", "run_ranks", "subprocess"}


def pytest_collection_modifyitems(items):
    """Mark as slow whatever starts a Python process, and the tests of some folders."""
    for item in items:
        in_slow_folder = any(folder in item.path.parents for folder in SLOW_FOLDERS)
        if in_slow_folder or item.originalname in names_that_start_processes(item.path):
            item.add_marker(pytest.mark.slow)


@cache
def names_that_start_processes(path):
    """``STARTERS``, and the functions and fixtures of a module that use one of them."""
    used_names = {}
    for definition in ast.parse(path.read_text()).body:
        if isinstance(definition, ast.FunctionDef):
            nodes = list(ast.walk(definition))
            names = {node.id for node in nodes if isinstance(node, ast.Name)}
            # A test names a fixture as an argument.
            names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
            used_names[definition.name] = names
    starting = set(STARTERS)
    while more := {name for name, used in used_names.items() if used & starting} - starting:
        starting |= more
    return starting


def pytest_collection_finish():
    """Take one thread: for tiny networks, several are slower."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage():
    """Leave the libraries imported by now out of garbage collections: a search makes several."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_was_compiled():
    """Forget the functions that earlier tests compiled; some measurements are left out then."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters.clear()


@pytest.fixture(autouse=True)
def nothing_was_asked():
    """Forget what earlier tests were warned of."""
    begin_run()


@pytest.fixture
def fake_device():
    """The class, for tests that do not import it.

    A test calls ``fake_device(available_bytes=..., base_bytes=...)``.
    """
    return FakeDevice


@pytest.fixture
def reads_here(monkeypatch):
    """Let a search read samples in this process where the loaders have no workers.

    The start of a worker takes long.
    """
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda **_: "spawn")


def same_device(device_memory, device):
    """A function of a module, which can be pickled with the callback."""
    return device_memory


@pytest.fixture
def policy():
    """The numbers of a search in ``fit``, unless it gets others.

    A module about the numbers of the package has a fixture of this name.
    """
    return FAST


@pytest.fixture
def fit(reads_here, policy):
    """Train for a few steps on the fake device."""

    def run(module, finder, device_memory, *callbacks, **arguments):
        finder.device_memory = partial(same_device, device_memory)
        finder.policy = arguments.pop("policy", policy)
        keywords = {
            key: arguments.pop(key)
            for key in inspect.signature(Trainer.fit).parameters
            if key in arguments
        }
        trainer = quiet_trainer(finder, *callbacks, **{"max_steps": 3, **arguments})
        trainer.fit(module, **keywords)
        return trainer

    return run


@pytest.fixture
def device(fake_device):
    """The fake device of a search: a budget of 500 MiB."""
    return fake_device(available_bytes=500 * 2**20)


@pytest.fixture
def compares_speeds():
    """Compare the speeds of the project's own size and the chosen one in a test."""


@pytest.fixture(autouse=True)
def _no_comparison(request, monkeypatch):
    """Compare no speeds: the steps of tests take milliseconds, whose times vary."""
    if "compares_speeds" not in request.fixturenames:
        monkeypatch.setattr(ProjectSize, "compared", lambda own, chosen, run: chosen)


@pytest.fixture
def search(fit, device):
    """Search in ``fit``, or in another stage without training; returns the plan."""

    def run(module, *callbacks, stage="fit", data=None, **arguments):
        finder = BatchFinder(
            **{
                "objective": "memory",
                "multiple_of": 1,
                "min_steps_per_epoch": None,
                **arguments.pop("options", {}),
            }
        )
        steps = {"max_steps": 1} if stage == "fit" else {"max_epochs": 0}
        trainer = fit(
            module, finder, device, *callbacks, **{"num_sanity_val_steps": 0, **steps, **arguments}
        )
        if stage != "fit":
            getattr(trainer, stage)(module, dataloaders=data)
        return finder.plan

    return run


@pytest.fixture
def device_memory(fake_device, monkeypatch):
    """The fake device of every profiler in the test: 1 MiB in use, a budget of 1 GiB."""
    device_memory = fake_device(available_bytes=2**30, base_bytes=2**20)
    monkeypatch.setattr(MemoryProfiler, "device_memory", lambda profiler, device: device_memory)
    return device_memory
