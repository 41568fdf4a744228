"""compare: searches of several variants of one model, one after another in this process."""

import functools
import os
import random
import weakref

import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_batchmem import (
    Comparison,
    Line,
    Plan,
    Trial,
    Variant,
    compare,
)
from lightning_batchmem import comparison as comparison_module
from lightning_batchmem.plan.records import MIB, Chosen, TrialMemory

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


def plan_of(size, intercept_mib, slope_mib, samples_per_s):
    def peaks(batch_size):
        return {
            "forward": int((intercept_mib + slope_mib * batch_size) * MIB),
            "backward": batch_size,
        }

    trials = (
        Trial(2, "ok", TrialMemory(peaks(2)), samples_per_s=9.0),
        Trial(size, "ok", TrialMemory(peaks(size)), "rehearsal", samples_per_s=samples_per_s),
    )
    return Plan(Chosen(size, "max_batch_size", ""), trials, 10**9)


RESULT = Comparison(
    (
        Variant("plain", plan_of(100, 1000, 4, 50.0)),
        Variant("half", plan_of(250, 1100, 2, 100.0)),
        Variant("a|b[b]", None, "ValueError: no"),
    )
)
TABLE = r"""
| variant | limited by     |       fixed MiB | MiB per sample | largest size |     samples/s |
|---------|----------------|-----------------|----------------|--------------|---------------|
| plain   | max_batch_size |         1,000.0 |          4.000 |          100 |          50.0 |
| half    | max_batch_size | 1,100.0 (1.10x) |  2.000 (0.50x) |  250 (2.50x) | 100.0 (2.00x) |
| a\|b[b] | failed         |               - |              - |            - |             - |
""".strip().splitlines()


def test_a_notebook_shows_the_table_and_a_list_the_sizes():
    assert RESULT._repr_markdown_() == str(RESULT)
    assert repr(RESULT) == "<Comparison: plain 100, half 250, a|b[b] failed>"


def test_the_table():
    assert [variant.batch_size for variant in RESULT.variants] == [100, 250, None]
    assert [variant.samples_per_s for variant in RESULT.variants] == [50.0, 100.0, None]
    assert RESULT.fastest is RESULT.variants[1]
    sentences = ["fastest under the limit: half", "a|b[b] failed: ValueError: no"]
    assert str(RESULT).splitlines() == [*TABLE, "", *(f"- {text}" for text in sentences)]


def test_a_table_without_results():
    assert str(Comparison(())).startswith("| variant |")
    assert Comparison((RESULT.variants[2],)).fastest is None


def test_a_long_name_is_not_cut():
    name = "name " * 100
    assert f"| {name} |" in str(Comparison((Variant(name, None),)))


CPU = {"accelerator": "cpu", "enable_progress_bar": False}


def make():
    return BoringModel(), DataLoader(RandomDataset(32, 100), batch_size=2)


def lack_memory(model):
    def training_step(batch, batch_idx):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    model.training_step = training_step


def fail(model):
    def training_step(batch, batch_idx):
        raise KeyError("x")

    model.training_step = training_step


@pytest.mark.usefixtures("reads_here")
def test_a_variant_that_fails_is_a_row_and_the_others_follow(capsys):
    variants = {
        "wrong": {"precision": "no"},
        "short": {"transform": lack_memory},
        "broken": {"transform": fail},
        "plain": {},
    }
    result = compare(make, variants, base=CPU, max_batch_size=8)
    wrong, short, broken, plain = result.variants
    assert wrong.error.startswith("ValueError: Precision 'no' is invalid.")
    assert short.error.startswith("NothingFitsError: Nothing fits: 2 samples, the smallest size")
    assert broken.error == "KeyError: 'x'"
    assert [variant.plan for variant in (wrong, short, broken)] == [None] * 3
    assert (plain.name, plain.batch_size, plain.error) == ("plain", 8, "")
    assert isinstance(plain.memory_line, Line)
    assert result.fastest is plain
    assert "compare: variant 4 of 4: plain\n" in capsys.readouterr().err


def state_of_process():
    """What a Trainer and a model may change outside themselves."""
    return {
        "random numbers": (random.random(), np.random.rand(), torch.rand(1).item()),
        "environment": dict(os.environ),
        "process group": torch.distributed.is_initialized(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
    }


@pytest.mark.usefixtures("reads_here")
# Lightning issues this warning for the two flags of the first variant.
@pytest.mark.filterwarnings("ignore:You passed `deterministic=True` and `benchmark=True`")
def test_a_variant_leaves_nothing_behind():
    torch.manual_seed(0)
    states = []
    models = []

    def make_and_look():
        assert [model() for model in models] == [None] * len(models)
        states.append(state_of_process())
        model, data = make()
        models.append(weakref.ref(model))
        return model, data

    changing = {"strategy": "ddp", "deterministic": "warn", "benchmark": True}
    variants = {"changing": changing, "broken": {"transform": fail}, "plain": {}}
    result = compare(make_and_look, variants, base=CPU, max_batch_size=4)
    assert [variant.batch_size for variant in result.variants] == [4, None, 4]
    assert [model() for model in models] == [None] * 3
    before, *others = [*states, state_of_process()]
    assert others == [before] * 3


@pytest.fixture
def searches(monkeypatch):
    """What each search of ``compare`` gets: precision, model, whether it is compiled, options."""
    searches = []

    def search(trainer, model, train_dataloaders, **options):
        module = getattr(model, "_orig_mod", model)
        searches.append((trainer.precision, type(module).__name__, model is not module, options))
        return plan_of(8, 1, 1, 1.0)

    monkeypatch.setattr(comparison_module, "find_batch_size", search)
    return searches


def test_the_default_variants(searches):
    compare(make, base={"accelerator": "cpu"}, max_batch_size=8)
    assert searches == [
        ("32-true", "BoringModel", False, {"objective": "memory", "max_batch_size": 8}),
        ("bf16-mixed", "BoringModel", False, {"objective": "memory", "max_batch_size": 8}),
    ]


class OtherModel(BoringModel):
    pass


@pytest.mark.parametrize(
    ("settings", "name", "is_compiled"),
    [
        ({"transform": lambda model: OtherModel()}, "OtherModel", False),
        ({"transform": lambda model: setattr(model, "__class__", OtherModel)}, "OtherModel", False),
        ({"compile": True}, "BoringModel", True),
        # A compiled model has no length, and so no truth value.
        ({"transform": torch.compile}, "BoringModel", True),
    ],
)
def test_a_variant_changes_the_model(searches, settings, name, is_compiled):
    (variant,) = compare(make, {"x": settings}).variants
    assert variant.error == ""
    assert searches == [("32-true", name, is_compiled, {"objective": "memory"})]


def test_make_may_return_a_module_alone(searches):
    (row,) = compare(BoringModel, {"x": {}}, base={"accelerator": "cpu"}).variants
    assert (row.plan is not None, row.error) == (True, "")


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (None, "NoneType"),
        ((), "tuple"),
        ((BoringModel(), None, None), "BoringModel, NoneType, NoneType"),
        (torch.nn.Linear(1, 1), "Linear"),
    ],
)
def test_make_may_return_nothing_else(made, got):
    (row,) = compare(lambda: made, {"x": {}}).variants
    assert row.plan is None
    assert row.error == (
        f"ValueError: make must return a LightningModule, or (module, data), got {got}"
    )


def test_a_decorator_may_pass_the_arguments():
    def configured(function):
        return functools.wraps(function)(lambda: function(2))

    with pytest.raises(ValueError, match="max_batch_size must be a whole number"):
        compare(configured(lambda size: BoringModel()), {}, max_batch_size=0)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="devices must be one device, got 2 on 1 nodes in 'x'"):
        compare(make, {"x": {"devices": 2}})
    with pytest.raises(ValueError, match="max_batch_size must be a whole number"):
        compare(make, {}, max_batch_size=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (BoringModel(), "make must be a function that returns .*, got an object of BoringModel"),
        ((BoringModel(), None), "make must be a function .*, got an object of tuple"),
        (lambda size: size, "make must be a function without arguments: missing .* 'size'"),
    ],
)
def test_what_makes_no_module_is_an_error_before_anything_runs(wrong, message, capsys):
    with pytest.raises(ValueError, match=message):
        compare(wrong)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (["plain"], "variants must be a dictionary, got list"),
        ({1: {}}, "must have a name and a dictionary of arguments each, got 1: {}"),
        ({"plain": None}, "of arguments each, got 'plain': None"),
    ],
)
def test_wrong_variants_are_an_error_before_anything_runs(variants, message):
    with pytest.raises(ValueError, match=message):
        compare(lambda: pytest.fail("make was called"), variants)
