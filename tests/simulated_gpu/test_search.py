"""The search of a program on a simulated GPU, here without one: options, trainer and plan."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_batchmem import BatchFinder, Plan
from lightning_batchmem._lightning import strategies
from lightning_batchmem.plan.policy import RehearsalPolicy, SearchPolicy
from lightning_batchmem.plan.recipe import Recipe
from lightning_batchmem.plan.records import Trial, TrialMemory
from lightning_batchmem.search.search import NothingFitsError
from lightning_batchmem.simulated_gpu import search as simulated
from lightning_batchmem.simulated_gpu.assumptions import Reads
from lightning_batchmem.state.saved_storages import SavedStorages
from tests.helpers.lawful import SAVED_PLAN, quiet_trainer
from tests.helpers.plans import plan_with, search_notes

REQUEST = {
    "kind": "script",
    "options": {},
    "gpu": "RTX-4090",
    "simulates_cudnn": False,
    "devices": None,
    "nodes": None,
    "kept_plan": "plan.json",
}


class NoValues:
    """Values of a program that has read none."""

    def __init__(self):
        self.assumptions = ["A shape (2 is assumed) depends on values."]
        self.reads = Reads(print)


@pytest.fixture
def finders(monkeypatch):
    """Searches that return a plan at once; returns their finders."""
    found = []
    plan = plan_with(Plan.from_json(json.dumps(SAVED_PLAN)), fastest_batch_size=64)

    def search_at_once(finder, trainer, model, datamodule, train, validation):
        found.append((finder, trainer, model, datamodule, train, validation))
        return plan

    monkeypatch.setattr(simulated.SimulatedSearch, "search", search_at_once)
    monkeypatch.setattr(simulated, "_check_trainer", lambda trainer, keeps_engine: None)
    # It is changed for a process that ends.
    monkeypatch.setattr(SavedStorages, "largest_bytes", SavedStorages.largest_bytes)
    return found


def run(trainer, values=None, **given):
    model = given.pop("model", torch.nn.Linear(1, 1))
    return simulated.search(
        {"self": trainer, "model": model, **given}, dict(REQUEST), values or NoValues()
    )


def test_a_plan_is_not_verified_and_has_no_times(finders):
    result = run(quiet_trainer())
    plan = Plan.from_json(json.dumps(result["plan"]))
    assert (plan.verified, plan.simulated, plan.device) == (False, True, "simulated RTX-4090")
    assert plan.fastest_batch_size is None
    times = ("step_seconds", "samples_per_s")
    assert {getattr(trial, name) for trial in plan.trials for name in times} == {None}
    assert search_notes(plan)[0] == "A shape (2 is assumed) depends on values."
    assert result["assumptions"] == [search_notes(plan)[0]]


def test_a_plan_of_lbfgs_says_what_its_step_lacks(finders, monkeypatch):
    class WithOptimizer(simulated.SimulatedSearch):
        def search(self, *arguments):
            recipe = Recipe(optimizer_names=("LBFGS",))
            return replace(super().search(*arguments), project_recipe=recipe)

    monkeypatch.setattr(simulated, "SimulatedSearch", WithOptimizer)
    assert run(quiet_trainer())["assumptions"][0].startswith("A step of LBFGS ends after its first")


def test_the_memory_test_has_one_simulated_gpu(monkeypatch):
    # It is changed for a process that ends.
    monkeypatch.setattr(simulated.gc, "disable", lambda: None)
    make = "tests.test_check:make"
    with pytest.raises(ValueError, match="devices must be one device, got 2 on 1 nodes in 'the"):
        simulated.trainer_of("memory_test", make, {"devices": 2})
    with pytest.raises(ValueError, match="accelerator must be gpu for the memory test, got 'cpu'"):
        simulated.trainer_of("memory_test", make, {"accelerator": "cpu"})


def test_the_memory_of_a_step_is_returned_instead_of_a_plan(finders, monkeypatch):
    trials = tuple(
        Trial(size, "ok", TrialMemory({"forward": 1000 + 21 * size}), "probe") for size in (2, 8)
    )

    class WithTrials(simulated.SimulatedSearch):
        def search(self, *arguments):
            return plan_with(super().search(*arguments), trials=trials)

    monkeypatch.setattr(simulated, "SearchOnly", WithTrials)
    given = {"self": quiet_trainer(), "model": torch.nn.Linear(1, 1)}
    result = simulated.search(given, {**REQUEST, "kind": "memory_test"}, NoValues())
    options = finders[0][0].options
    assert (options.max_batch_size, options.worst_case) == (8, "longest")
    assert result["memory"]["phases"] == {"forward": {"fixed_bytes": 1000, "sample_bytes": 21}}
    assert result["memory"]["device"] == "simulated RTX-4090"
    assert result["assumptions"] == ["A shape (2 is assumed) depends on values."]


def test_a_compiled_step_has_no_memory_to_compare(finders, monkeypatch):
    monkeypatch.setattr(simulated, "SearchOnly", simulated.SimulatedSearch)
    monkeypatch.setattr(simulated, "compiled_frames", lambda: 1)
    given = {"self": quiet_trainer(), "model": torch.nn.Linear(1, 1)}
    with pytest.raises(ValueError, match=r"Return the model without torch\.compile"):
        simulated.search(given, {**REQUEST, "kind": "memory_test"}, NoValues())
    assert "plan" in simulated.search(given, dict(REQUEST), NoValues())


def test_large_weights_are_not_saved_and_the_arguments_of_fit_are_passed_on(finders):
    model = torch.nn.Linear(1, 1)
    loaders = {"train_dataloaders": 2, "val_dataloaders": 3}
    result = run(quiet_trainer(), model=model, datamodule=1, **loaders)
    assert finders[0][2:] == (model, 1, 2, 3)
    assert SavedStorages.largest_bytes == 2**20
    assert result["multiple_of"] == 1


def test_a_checkpoint_is_left_out_and_named(finders):
    result = run(quiet_trainer(), ckpt_path="last")
    expected = "ckpt_path='last' is left out: the search has new weights."
    assert result["assumptions"][0] == expected


def test_without_a_finder_of_the_project_the_data_limit_the_size(finders):
    run(quiet_trainer())
    assert finders[0][0].options.min_steps_per_epoch is None


def test_a_finder_of_the_project_keeps_its_options_and_its_policy(finders):
    own = BatchFinder(multiple_of=8, memory_limit=0.5, objective="throughput")
    own.policy = SearchPolicy(rehearsal=RehearsalPolicy(limit_share=0.9))
    trainer = quiet_trainer(own)
    result = simulated.search(
        {"self": trainer, "model": torch.nn.Linear(1, 1)},
        {**REQUEST, "options": {"memory_limit": 0.7}},
        NoValues(),
    )
    finder = finders[0][0]
    assert (finder.options.multiple_of, finder.options.memory_limit) == (8, 0.7)
    assert finder.options.least_steps_per_epoch == 10
    assert finder.options.objective == "memory"
    assert finder.policy is own.policy
    assert result["multiple_of"] == 8
    assert result["assumptions"][:2] == [
        "The options are those of the project's BatchFinder.",
        'objective="memory" is used instead: a simulated GPU has no times.',
    ]


def test_the_plan_of_a_finder_of_the_project_is_left_out_and_named(finders):
    result = run(quiet_trainer(BatchFinder(plan="plan.json", objective="memory")))
    left_out = "The options are those of the project's BatchFinder, without its plan."
    assert result["assumptions"][0] == left_out


def test_the_finder_of_lightning_does_not_search_too(finders):
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[BatchSizeFinder(), BatchFinder(objective="memory")],
    )
    run(trainer)
    assert not any(isinstance(one, BatchSizeFinder) for one in trainer.callbacks)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
            "Nothing fits: before the first step, CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
        (NothingFitsError("Nothing fits: 1 sample."), "Nothing fits: 1 sample."),
    ],
)
def test_why_nothing_fits_has_the_assumptions(finders, monkeypatch, error, expected):
    def fail(*_):
        raise error

    monkeypatch.setattr(simulated.SimulatedSearch, "search", fail)
    (assumed,) = NoValues().assumptions
    assert run(quiet_trainer()) == {"nothing_fits": f"{expected} {assumed}"}


def test_a_step_begins_where_its_batch_is_moved(finders):
    trainer, values = quiet_trainer(), NoValues()
    counted = []
    values.reads.begin_step = lambda: counted.append(1)
    run(trainer, values)
    batch = torch.ones(2)
    for _ in range(2):
        assert trainer.strategy.batch_to_device(batch) is batch
    assert counted == [1, 1]


def test_an_error_of_the_program_is_its_own(finders, monkeypatch):
    def fail(*_):
        raise RuntimeError("Nothing fits in my own code")

    monkeypatch.setattr(simulated.SimulatedSearch, "search", fail)
    with pytest.raises(RuntimeError, match="my own code"):
        run(quiet_trainer())


@pytest.mark.parametrize("devices", ["auto", -1, "-1", 1, "1", "3,", [0], (4,), "0", 0, None])
def test_one_device_or_what_lightning_itself_decides(devices):
    given = {"devices": devices}
    assert simulated.use_devices(given, REQUEST) is None
    assert given["devices"] == ([0] if devices in ("3,", [0], (4,)) else devices)


@pytest.mark.parametrize(
    ("given", "devices", "nodes"),
    [
        ({"devices": 2}, 2, 1),
        ({"devices": "4"}, 4, 1),
        ({"devices": "0,1"}, 2, 1),
        ({"devices": [2, 5, 7]}, 3, 1),
        ({"devices": (2, 5)}, 2, 1),
        ({"num_nodes": 2}, 1, 2),
        ({"devices": 8, "num_nodes": 4}, 8, 4),
    ],
)
def test_a_trainer_that_names_its_devices_gets_them_in_another_start(given, devices, nodes):
    started_with = simulated.use_devices(dict(given), REQUEST)
    assert started_with == {"devices": devices, "nodes": nodes}
    given = dict(given)
    assert simulated.use_devices(given, {**REQUEST, **started_with}) is None
    if isinstance(given.get("devices"), list):
        assert given["devices"] == list(range(devices))


@pytest.mark.parametrize("given", [{}, {"devices": "auto"}, {"devices": -1, "num_nodes": 1}])
def test_a_trainer_that_leaves_its_devices_open_gets_those_of_the_command(given):
    assert simulated.use_devices(given, {**REQUEST, "devices": 4, "nodes": 2}) is None
    assert given["num_nodes"] == 2


@pytest.mark.parametrize(
    ("given", "option"),
    [({"devices": 1}, "devices"), ({"devices": 8}, "devices"), ({"num_nodes": 3}, "nodes")],
)
def test_the_command_does_not_replace_the_devices_of_a_trainer(given, option):
    with pytest.raises(ValueError, match=rf"and --{option} or another Trainer .* leave out"):
        simulated.use_devices(given, {**REQUEST, "devices": 4, "nodes": 2})


@pytest.mark.parametrize(
    ("given", "asked"),
    [({"devices": "auto", "num_nodes": 4}, {"devices": 2}), ({"devices": 2}, {"nodes": 4})],
)
def test_the_command_gives_one_number_and_the_trainer_the_other(given, asked):
    started_with = simulated.use_devices(dict(given), {**REQUEST, **asked})
    assert started_with == {"devices": 2, "nodes": 4}


def test_a_node_has_at_most_eight_devices():
    with pytest.raises(ValueError, match=r"at most 8 .*, such as devices=8 and num_nodes=2"):
        simulated.use_devices({"devices": 16}, REQUEST)


def assumed_with(*layers):
    return run(quiet_trainer(), model=torch.nn.Sequential(*layers))["assumptions"][:-1]


def test_layers_that_do_not_run_on_cudnn_are_named(finders, monkeypatch):
    convolution, recurrent = torch.nn.Conv2d(1, 1, 1), torch.nn.LSTM(1, 1)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90_100)
    version = "9.1 (9.8 is the first that can plan without a GPU)"
    more = "They may need more or less memory."
    assert assumed_with(convolution, recurrent) == [
        "Convolutions and recurrent layers ran on PyTorch's own kernels and not on cuDNN's"
        f" {version}. {more}"
    ]
    # The environment variable switches it off.
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92_400)
    text = f"Convolutions ran on PyTorch's own kernels and not on cuDNN's 9.24. {more}"
    assert assumed_with(convolution) == [text]
    monkeypatch.setitem(REQUEST, "simulates_cudnn", True)
    assert assumed_with(convolution) == []
    assert assumed_with(convolution, recurrent) == [
        f"Recurrent layers ran on PyTorch's own kernels and not on cuDNN's. {more}"
    ]


def test_a_process_group_of_gloo_that_the_program_made(monkeypatch):
    monkeypatch.setattr(strategies.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(strategies.distributed, "get_backend", lambda: "gloo")
    with pytest.raises(ValueError, match="a process group of gloo for tensors of GPUs"):
        strategies.check_one_rank(SimpleNamespace(world_size=2, strategy=None))


def test_a_launcher_that_is_a_plugin_is_refused_before_it_reads_its_variables():
    given = {"devices": 2, "plugins": [SLURMEnvironment()]}
    with pytest.raises(ValueError, match="the plugin SLURMEnvironment, and simulate"):
        simulated.use_devices(given, {**REQUEST, "devices": 2})
    assert simulated.use_devices({"plugins": given["plugins"]}, REQUEST) is None
