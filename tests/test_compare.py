"""compare: several variants of one model, each in a new process where that can import it."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_batchmem import (
    Comparison,
    Line,
    MemoryModel,
    Plan,
    Trial,
    Variant,
    compare,
)
from lightning_batchmem import variant as variant_module
from lightning_batchmem.plan.records import MIB
from tests.helpers.blocks import Block, BlockNet
from tests.helpers.main_module import run_as_main

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


def plan_of(size, intercept_mib, slope_mib, step_seconds):
    trials = (
        Trial(2, "ok", {}, step_seconds=9.0),
        Trial(size, "ok", {}, "rehearsal", step_seconds=step_seconds),
    )
    memory = MemoryModel(
        {
            "forward": Line(intercept_mib * MIB, slope_mib * MIB, 2, size),
            "backward": Line(1, 1, 2, 4),
        }
    )
    return Plan(size, "max_batch_size", True, 10**9, None, None, trials, memory)


RESULT = Comparison(
    (
        Variant("plain", plan_of(100, 1000, 4, 2.0)),
        Variant("half", plan_of(250, 1100, 2, 2.5)),
        Variant("a|b[b]", None, "ValueError: no"),
    ),
    ("A note.",),
)
TABLE = r"""
| variant |       fixed MiB | MiB per sample | largest size |     samples/s | limited by     |
|---------|----------------:|---------------:|-------------:|--------------:|----------------|
| plain   |         1,000.0 |          4.000 |          100 |          50.0 | max batch size |
| half    | 1,100.0 (1.10x) |  2.000 (0.50x) |  250 (2.50x) | 100.0 (2.00x) | max batch size |
| a\|b[b] |               - |              - |            - |             - | failed         |
""".strip().splitlines()


def test_a_notebook_shows_the_table_and_a_list_the_sizes():
    assert RESULT._repr_markdown_() == RESULT.to_markdown()
    assert repr(RESULT) == "<Comparison: plain 100, half 250, a|b[b] failed>"


def test_the_table():
    assert [variant.batch_size for variant in RESULT.variants] == [100, 250, None]
    assert [variant.samples_per_second for variant in RESULT.variants] == [50.0, 100.0, None]
    assert RESULT.fastest is RESULT.variants[1]
    sentences = ["fastest under the limit: half", "a|b[b] failed: ValueError: no", "A note."]
    assert str(RESULT).splitlines() == TABLE + sentences
    assert RESULT.to_markdown().splitlines() == [*TABLE, "", *(f"- {text}" for text in sentences)]


def test_a_table_without_results():
    assert str(Comparison(())).startswith("| variant |")
    assert Comparison((RESULT.variants[2],)).fastest is None


def test_a_long_name_is_not_cut():
    name = "name " * 100
    assert f"| {name} |" in str(Comparison((Variant(name, None),)))


SCRIPT = """
import os
from lightning_batchmem import compare
from tests.helpers.blocks import BlockNet

def make():
    return BlockNet(), None

def kill(model):
    os.kill(os.getpid(), 9)

variants = {"plain": {}, "killed": {"transform": kill}}
comparison = compare(make, variants, base={"accelerator": "cpu"}, max_batch_size=8)
"""


@pytest.mark.slow
def test_each_variant_runs_in_a_new_process(tmp_path, monkeypatch):
    main = run_as_main(monkeypatch, SCRIPT, tmp_path / "script.py")
    plain, killed = main.comparison.variants
    assert (plain.name, plain.batch_size, plain.error) == ("plain", 8, "")
    assert isinstance(plain.memory_line, Line)
    assert (killed.name, killed.plan) == ("killed", None)
    assert killed.error.startswith("its process ended with exit code -9, killed perhaps")
    assert main.comparison.notes == ()


def test_what_a_new_process_cannot_import_runs_in_this_one(capsys):
    def make():
        return BlockNet(), None

    variants = {"plain": {}, "wrong": {"precision": "no"}}
    result = compare(make, variants, base={"accelerator": "cpu"}, max_batch_size=8)
    plain, wrong = result.variants
    assert (plain.batch_size, plain.error) == (8, "")
    assert wrong.error.startswith("ValueError: Precision 'no' is invalid.")
    (note,) = result.notes
    assert note.startswith(
        "The variants ran in this process, one after another, because a new one cannot import them:"
    )
    assert "compare: variant 2 of 2: wrong\n" in capsys.readouterr().err


@pytest.fixture
def searches(monkeypatch):
    """What each search of ``compare`` gets: precision, checkpointed blocks, model, options."""
    searches = []

    def search(trainer, model, train_dataloaders, **options):
        model = getattr(model, "_orig_mod", model)
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        checkpointed = sum(len(block._forward_pre_hooks) for block in blocks)
        searches.append((trainer.precision, checkpointed, type(model).__name__, options))
        return plan_of(8, 1, 1, 1.0)

    monkeypatch.setattr(variant_module, "find_batch_size", search)
    return searches


def make_here():
    """A function that cannot be imported, so that the variants run in this process."""
    return lambda: (BlockNet(), None)


def test_the_default_variants(searches):
    compare(make_here(), base={"accelerator": "cpu"}, max_batch_size=8)
    assert searches == [
        ("32-true", 0, "BlockNet", {"max_batch_size": 8}),
        ("bf16-mixed", 0, "BlockNet", {"max_batch_size": 8}),
        ("32-true", 3, "BlockNet", {"max_batch_size": 8}),
        ("bf16-mixed", 3, "BlockNet", {"max_batch_size": 8}),
    ]


class OtherNet(BlockNet):
    pass


@pytest.mark.parametrize(
    ("settings", "checkpointed", "name"),
    [
        ({"transform": lambda model: OtherNet()}, 0, "OtherNet"),
        ({"transform": lambda model: setattr(model, "__class__", OtherNet)}, 0, "OtherNet"),
        ({"checkpoint": {nn.Linear}, "compile": True}, 0, "BlockNet"),
        ({"checkpoint": [Block]}, 3, "BlockNet"),
    ],
)
def test_a_variant_changes_the_model(searches, settings, checkpointed, name):
    (variant,) = compare(make_here(), {"x": settings}).variants
    assert variant.error == ""
    assert searches == [("32-true", checkpointed, name, {})]


@pytest.mark.parametrize(
    ("make", "variants", "error"),
    [
        (lambda: BlockNet(), {"x": {}}, "ValueError: make must return (model, data), got BlockNet"),
        (
            lambda: (BlockNet(), None),
            {"x": {"checkpoint": {nn.Conv2d}}},
            "ValueError: checkpoint must name classes of modules in the model, got Conv2d, which it"
            " does not have",
        ),
        (
            lambda: (nn.Sequential(nn.Linear(1, 1)), None),
            {"x": {"checkpoint": True}},
            "ValueError: checkpoint must name classes of blocks, got a model that has no block"
            " twice",
        ),
    ],
)
def test_a_variant_that_fails_has_its_reason(make, variants, error):
    (row,) = compare(make, variants).variants
    assert (row.plan, row.error) == (None, error)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="devices must be one device, got 2 on 1 nodes in 'x'"):
        compare(make_here(), {"x": {"devices": 2}})
    with pytest.raises(ValueError, match="max_batch_size must be a whole number"):
        compare(make_here(), {}, max_batch_size=0)


def test_a_sequential_is_a_block_where_nothing_else_is_repeated(searches):
    model = BlockNet()
    model.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    (variant,) = compare(lambda: (model, None), {"x": {"checkpoint": True}}).variants
    assert variant.error == ""
    assert [len(block._forward_pre_hooks) for block in model.blocks] == [1, 1, 1]


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


@pytest.mark.parametrize("fit", [None, 0, 2.5])
def test_auto_needs_a_size(searches, fit):
    (variant,) = compare(make_here(), {"x": {"checkpoint": "auto", "fit": fit}}).variants
    assert variant.error == (
        f'ValueError: checkpoint="auto" needs fit=N, the batch size that is to fit, got fit={fit!r}'
    )


def num_checkpointed(model):
    return sum(len(block._forward_pre_hooks) for block in model.blocks)


class StepByBlocks:
    """A step that takes 1,000 MiB at 64 samples, and 100 MiB less for each checkpointed block."""

    def __init__(self, model):
        self.sample_bytes = (1000 - 100 * num_checkpointed(model)) * MIB // 64
        self.small = self

    def activations_by_module(self):
        return {"blocks.0": 1, "blocks.1": 3, "blocks.2": 2}

    def peak_bytes(self, batch_size):
        return self.sample_bytes * batch_size


class SearchByBlocks:
    """A search of such steps under 900 MiB, of which 810 MiB are used for a prediction.

    Args:
        largest: number of checkpointed blocks -> the largest size that passes a rehearsal.
    """

    def __init__(self, largest):
        self.largest = largest
        self.calls = []
        self.checkpointed = []

    def __call__(self, trainer, model, train_dataloaders, *, max_batch_size):
        number = num_checkpointed(model)
        self.calls.append((number, max_batch_size))
        self.checkpointed = [bool(block._forward_pre_hooks) for block in model.blocks]
        size = min(max_batch_size, self.largest.get(number, max_batch_size))
        peak_bytes = StepByBlocks(model).peak_bytes(size)
        limited_by = "max_batch_size" if size == max_batch_size else "memory"
        trials = (Trial(size, "ok", {"forward": peak_bytes}),)
        return Plan(size, limited_by, True, 900 * MIB, None, None, trials, None)


@pytest.mark.parametrize(
    ("fit", "largest", "calls", "label"),
    [
        # 64 samples take 900 MiB with one block, and 800 MiB with two.
        (64, {}, [(0, 8), (2, 64)], "x (2 of 3 Block)"),
        # With two blocks, the rehearsal of 64 samples fails.
        (64, {2: 60}, [(0, 8), (2, 64), (3, 64)], "x (3 x Block)"),
        (32, {}, [(0, 8), (0, 32)], "x (0 of 3 Block)"),
        # It does not fit with all blocks either.
        (640, {3: 70}, [(0, 8), (3, 640)], "x (3 x Block)"),
    ],
)
def test_auto_checkpoints_the_fewest_blocks(monkeypatch, fit, largest, calls, label):
    search = SearchByBlocks(largest)
    monkeypatch.setattr(variant_module, "find_batch_size", search)
    monkeypatch.setattr(variant_module, "measured_steps", lambda _, model, *__: StepByBlocks(model))
    (variant,) = compare(make_here(), {"x": {"checkpoint": "auto", "fit": fit}}).variants
    assert variant.error == ""
    assert search.calls == calls
    assert variant.label == label
    if label == "x (2 of 3 Block)":
        # The largest blocks are the first.
        assert search.checkpointed == [False, True, True]


class OtherName(BlockNet):
    """The attribute with its batch size has another name."""

    def __init__(self):
        super().__init__()
        self.samples = 2
        del self.batch_size

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(100, 8)), batch_size=self.samples)


@pytest.mark.parametrize("settings", [{"checkpoint": True}, {"checkpoint": "auto", "fit": 16}])
def test_the_measured_step_uses_the_name_of_the_batch_size(settings):
    variants = {"x": {**settings, "accelerator": "cpu"}}
    options = {"batch_arg_name": "samples", "max_batch_size": 16}
    (variant,) = compare(lambda: (OtherName(), None), variants, **options).variants
    assert (variant.error, variant.batch_size) == ("", 16)


def test_auto_in_a_real_search():
    """With a line that fits from the start, no block is checkpointed."""
    variants = {"auto": {"checkpoint": "auto", "fit": 16, "accelerator": "cpu"}}
    (variant,) = compare(make_here(), variants, multiple_of=16, min_batch_size=16).variants
    assert variant.error == ""
    assert (variant.batch_size, variant.checkpointed) == (16, "0 of 3 Block")


@pytest.mark.parametrize(
    ("settings", "options", "error"),
    [
        (
            {"checkpoint": "auto", "fit": 64},
            {"max_batch_size": 32},
            "max_batch_size must be at least fit=64, got 32",
        ),
        ({"checkpoint": True, "fit": 64}, {}, 'fit needs checkpoint="auto", got checkpoint=True'),
        ({"checkpoint": "all"}, {}, "checkpoint must be True or classes of modules, got 'all'"),
    ],
)
def test_settings_of_checkpoint_that_contradict_each_other(searches, settings, options, error):
    (variant,) = compare(make_here(), {"x": settings}, **options).variants
    assert variant.error == f"ValueError: {error}"
