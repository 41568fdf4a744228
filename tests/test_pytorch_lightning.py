"""The contract with the other Lightning package: the cases of test_contract.py with its classes."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from lightning_batchmem.comparison import make_trainer

pl = pytest.importorskip("pytorch_lightning")

CASES = [
    "manual_two_optimizers",
    "datamodule_hparams",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("a_combined_loader", "bf16_mixed")),
]


def with_other_package(name):
    """A module of the tests in which ``lightning.pytorch`` is replaced by ``pytorch_lightning``."""
    path = Path(importlib.util.find_spec(name).origin)
    text = path.read_text().replace("lightning.pytorch", "pytorch_lightning")
    text = text.replace(
        "from lightning_batchmem import", "from lightning_batchmem.pytorch_lightning import"
    )
    text = text.replace("from tests.", "from pytorch_lightning_tests.")
    module = types.ModuleType(f"pytorch_lightning_{name}")
    # Dataclasses look up annotations in sys.modules, and the next module imports from this one.
    sys.modules[module.__name__] = module
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


@pytest.fixture(scope="module")
def contract():
    names = (
        "wrapped_optimizers",
        "contract_cases",
        "kept_state",
        "lawful",
        "outcomes",
        "size_places",
    )
    for name in names:
        with_other_package(f"tests.helpers.{name}")
    return with_other_package("tests.test_contract")


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")
@pytest.mark.parametrize("name", CASES)
def test_no_trace(contract, name, tmp_path):
    assert issubclass(contract.Net, pl.LightningModule)
    contract.test_no_trace(name, tmp_path)


@pytest.mark.parametrize("name", ["constant_in_a_hook", "derived_in_setup"])
def test_no_trace_at_other_places_of_the_size(contract, name, tmp_path):
    contract.test_no_trace_at_any_place_of_the_size(name, tmp_path)


@pytest.mark.parametrize("name", ["sgd_momentum", "recipe_in_fewer_batches"])
def test_no_trace_of_a_plan_of_another_run(contract, name, tmp_path):
    contract.test_no_trace_of_a_plan_of_another_run(name, tmp_path)


@pytest.mark.parametrize(
    "where",
    ["in a callback", "in no copy of a callback", "in an object of a callback", "on the trainer"],
)
def test_no_trace_in_what_objects_keep(contract, where, tmp_path):
    contract.test_no_trace_in_what_objects_keep(where, tmp_path)


def test_no_trace_in_a_strategy_of_the_user(contract, tmp_path):
    contract.test_no_trace_in_parts_of_the_trainer_that_the_user_wrote("strategy", tmp_path)


@pytest.mark.filterwarnings(
    "ignore:The variance of predictions",
    "ignore:Metric `CatMetric` will save all",
    "ignore:the metric 'kept'",
)
def test_no_trace_of_a_search_before_an_evaluation(contract, tmp_path):
    contract.test_no_trace_of_a_search_before_an_evaluation("predict", tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The dirpath has changed from")
def test_a_resumed_run(contract, tmp_path):
    contract.test_no_trace_in_a_resumed_run(tmp_path)
    saved = torch.load(next(tmp_path.glob("searched/*/last.ckpt")), weights_only=True)
    assert saved["callbacks"]["BatchFinder"]["plan"]["batch_size"] == contract.SIZE


def test_the_callbacks_are_callbacks_of_the_package():
    from lightning_batchmem.pytorch_lightning import BatchFinder, MemoryProfiler

    callbacks = (BatchFinder(), MemoryProfiler())
    assert all(isinstance(callback, pl.Callback) for callback in callbacks)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_the_trainer_of_a_variant_is_that_of_the_package():
    model = pl.LightningModule()
    for changed in (model, torch.compile(model)):
        trainer, *_ = make_trainer(lambda changed=changed: (changed, None), {"accelerator": "cpu"})
        assert type(trainer) is pl.Trainer
