"""Every public name. One that leaves breaks the code of a user: it is deprecated first.

The lists say what the package promises, and the functions below them look up what it has. A name
that is added to the package is added to its list.
"""

import importlib.util
import inspect
import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints
from unittest import mock

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_batchmem
from lightning_batchmem import (
    BatchFinder,
    Comparison,
    Line,
    MemoryModel,
    MemoryProfiler,
    Plan,
    __main__,
    assert_memory,
    compare,
    factory,
    find_batch_size,
    find_batch_size_of_loop,
)
from lightning_batchmem._lightning import logged_plan
from lightning_batchmem.check import MeasuredStep
from lightning_batchmem.plan.records import PHASES
from lightning_batchmem.profile import run_folder, summary
from lightning_batchmem.profile.columns import COLUMNS
from lightning_batchmem.profile.summary import Summary
from tests.helpers.lawful import SAVED_PLAN

ROOT = Path(__file__).parents[1]
ADVICE = "deprecate it: CONTRIBUTING, Deprecations"


NAMES = {
    "lightning_batchmem": [
        "BatchFinder",
        "Comparison",
        "Line",
        "MemoryModel",
        "MemoryProfiler",
        "Note",
        "NothingFitsError",
        "Plan",
        "Trial",
        "TrialMemory",
        "Variant",
        "__version__",
        "assert_memory",
        "compare",
        "find_batch_size",
        "find_batch_size_of_loop",
    ],
    "lightning_batchmem.profile.summary": ["RunMemory", "RunSpeed", "Summary"],
    "lightning_batchmem.pytorch_lightning": ["BatchFinder", "MemoryProfiler"],
    "modules": [
        "lightning_batchmem.plan.policy",
        "lightning_batchmem.profile.summary",
        "lightning_batchmem.pytorch_lightning",
    ],
    "attributes of BatchFinder": [
        "device_memory",
        "later",
        "optional",
        "options",
        "plan",
        "policy",
        "runs",
    ],
    "attributes of MemoryProfiler": [
        "device_memory",
        "epoch_peak_bytes",
        "optional",
        "plot",
        "run_peak_bytes",
        "summary",
    ],
    "metrics": [
        "memory/limit_mib",
        "memory/num_alloc_retries",
        "memory/num_ooms",
        "memory/peak_allocated_mib",
        "memory/peak_process_mib",
        "memory/peak_reserved_mib",
        "memory/used_pct",
        "speed/batch_size",
        "speed/cpu_utilization_pct",
        "speed/data_wait_pct",
        "speed/gpu_utilization_pct",
        "speed/items_per_s",
        "speed/mfu_pct",
        "speed/samples_per_s",
        "speed/step_ms",
        "speed/tflops_per_device",
    ],
    "plan in loggers": ["batch_finder/plan", "batch_finder/search"],
    "columns of memory_per_batch.csv": [
        "batch_size",
        "cpu_utilization_pct",
        "data_wait_pct",
        "gpu_utilization_pct",
        "items_per_s",
        "limit_mib",
        "peak_allocated_mib",
        "peak_before_mib",
        "peak_process_mib",
        "peak_reserved_mib",
        "samples_per_s",
        "stage",
        "step",
        "step_ms",
    ],
    "files": [
        "batch_plan.json",
        "memory_over_steps",
        "memory_per_batch.csv",
        "memory_summary.json",
        "search",
    ],
    "phases of a step": ["backward", "evaluation", "forward", "optimizer_step"],
    "JSON of a plan, besides its fields": [
        "batch_size",
        "held_peak_bytes",
        "measured_peak_bytes",
        "memory",
        "predicted_peak_bytes",
        "reason",
        "training",
    ],
    "LIGHTNING_BATCHMEM": ["LIGHTNING_BATCHMEM", "apply", "find", "profile"],
    "commands": ["check", "compare", "draw", "find", "simulate"],
}

# A number is the place of an argument that may be passed without its name.
ARGUMENTS = {
    "BatchFinder": [
        "apply",
        "batch_arg_name",
        "budget",
        "later",
        "lr_scaling",
        "max_batch_size",
        "memory_limit",
        "min_batch_size",
        "min_steps_per_epoch",
        "multiple_of",
        "objective",
        "plan",
        "search_on_resume",
        "target_batch_size",
        "then",
        "verbose",
        "worst_case",
    ],
    "BatchFinder.device_memory": ["device (1)"],
    "Line.at": ["batch_size (1)"],
    "MemoryModel.phase_at": ["batch_size (1)"],
    "MemoryModel.predict_bytes": ["batch_size (1)"],
    "MemoryModel.size_at": ["limit_bytes (1)"],
    "MemoryProfiler": ["csv", "flops", "items_fn", "modules", "peak_flops", "snapshot"],
    "MemoryProfiler.device_memory": ["device (1)"],
    "Plan.from_json": ["text (1)"],
    "Plan.with_notes": ["*notes"],
    "Summary.from_json": ["text (1)"],
    "assert_memory": ["base", "make (1)", "reference (2)", "tolerance (3)"],
    "compare": ["**options", "base", "make (1)", "variants (2)"],
    "find_batch_size": [
        "**options",
        "datamodule (3)",
        "model (2)",
        "train_dataloaders (4)",
        "trainer (1)",
        "val_dataloaders (5)",
    ],
    "find_batch_size_of_loop": [
        "fabric",
        "make_batch (2)",
        "max_batch_size",
        "memory_limit",
        "min_batch_size",
        "model",
        "multiple_of",
        "objective",
        "optimizer",
        "plan",
        "state",
        "step (1)",
        "verbose",
    ],
}

# Texts that arguments and fields may be.
VALUES = {
    "BatchFinder": [
        'lr_scaling="linear"',
        'lr_scaling="sqrt"',
        'min_steps_per_epoch="auto"',
        'objective="auto"',
        'objective="memory"',
        'objective="recipe"',
        'objective="throughput"',
        'search_on_resume="if_changed"',
        'then="exit"',
        'then="train"',
        'worst_case="longest"',
        'worst_case="typical"',
    ],
    "Chosen": [
        'limited_by="CPU memory"',
        'limited_by="dataset"',
        'limited_by="limit_predict_batches"',
        'limited_by="limit_test_batches"',
        'limited_by="limit_train_batches"',
        'limited_by="limit_val_batches"',
        'limited_by="max_batch_size"',
        'limited_by="memory"',
        'limited_by="min_steps_per_epoch"',
        'limited_by="overfit_batches"',
        'limited_by="recipe"',
        'limited_by="shared memory"',
        'limited_by="target_batch_size"',
        'limited_by="throughput"',
        'limited_by="val_check_interval"',
        'limited_by="validation data"',
    ],
    "MemoryProfiler": ['snapshot="on_oom"'],
    "Note": [
        'kind="cost"',
        'kind="earlier_plan"',
        'kind="limit"',
        'kind="risk"',
        'kind="search"',
        'kind="settings"',
        'kind="simulation"',
        'kind="training"',
    ],
    "Trial": [
        'kind="probe"',
        'kind="rehearsal"',
        'outcome="allocator_retry"',
        'outcome="ok"',
        'outcome="out_of_memory"',
        'outcome="over_limit"',
    ],
    "compare": [
        'objective="auto"',
        'objective="memory"',
        'objective="recipe"',
        'objective="throughput"',
    ],
    "draw": ['format="png"', 'format="svg"'],
    "find_batch_size_of_loop": [
        'objective="auto"',
        'objective="memory"',
        'objective="recipe"',
        'objective="throughput"',
    ],
    "simulate": [
        'objective="auto"',
        'objective="memory"',
        'objective="recipe"',
        'objective="throughput"',
    ],
}

# Of records; in JSON too.
FIELDS = {
    "Chosen": [
        "batch_size",
        "fastest_batch_size",
        "is_verified",
        "largest_batch_size",
        "limited_by",
        "notes",
        "speeds",
        "state",
        "why",
    ],
    "Comparison": ["variants"],
    "FlopRate": ["flops_per_sample", "mfu_pct", "tflops_per_device", "why_not"],
    "Growth": ["batch_bytes", "batches", "batches_run", "is_of_epoch", "is_of_validation"],
    "Line": ["first_batch_size", "intercept", "last_batch_size", "slope"],
    "MeasuredStep": ["device", "phases", "versions"],
    "MemoryBreakdown": [
        "activations_bytes",
        "batch_bytes",
        "gradients_bytes",
        "kept_bytes",
        "optimizer_state_bytes",
        "other_bytes",
        "outside_bytes",
        "parameters_bytes",
        "phase",
        "step",
    ],
    "MemoryModel": ["lines"],
    "ModuleMemory": [
        "activations_bytes",
        "class_name",
        "gradients_bytes",
        "name",
        "optimizer_state_bytes",
        "parameters_bytes",
    ],
    "Note": ["kind", "text"],
    "PeakBetweenSteps": ["after_step", "peak_bytes"],
    "PeakByModule": ["batch_size", "modules", "peak_bytes", "why_not"],
    "PhaseMemory": ["fixed_bytes", "sample_bytes"],
    "Plan": [
        "budget_name",
        "chosen",
        "device",
        "limit_bytes",
        "notes",
        "parameters",
        "place",
        "project_recipe",
        "recipe",
        "simulated",
        "strategy",
        "trials",
    ],
    "Recipe": [
        "accumulate_grad_batches",
        "batch_size",
        "counts_batches",
        "effective_batch_size",
        "learning_rate",
        "learning_rates",
        "num_steps",
        "optimizer_names",
        "ranks",
        "trainer_settings",
    ],
    "RunMemory": [
        "batch_size",
        "between_steps",
        "breakdown",
        "graph_steps",
        "is_planned",
        "limit_bytes",
        "peak_allocated_bytes",
        "peak_process_bytes",
        "peak_reserved_bytes",
        "peak_step",
        "rank_peaks_bytes",
        "validation_peak_bytes",
    ],
    "RunSpeed": [
        "cores",
        "cpu_utilization_pct",
        "data_wait_pct",
        "first_step_ms",
        "gpu_utilization_pct",
        "items_per_s",
        "samples_per_s",
        "step_ms",
    ],
    "Speed": ["batch_size", "samples_per_s"],
    "Summary": [
        "alerts",
        "device",
        "fits",
        "flops",
        "memory",
        "modules",
        "speed",
        "stage",
        "steps",
        "training",
    ],
    "Trial": [
        "batch_size",
        "error",
        "failed_phase",
        "full_steps",
        "growth",
        "kind",
        "memory",
        "notes",
        "outcome",
        "samples_per_s",
        "step_seconds",
    ],
    "TrialMemory": [
        "differing_bytes",
        "fixed_bytes",
        "held_peak_bytes",
        "is_exact",
        "largest_batch_bytes",
        "needed_bytes",
        "phase_peak_bytes",
        "set_aside_bytes",
        "start_bytes",
    ],
    "Variant": ["error", "name", "plan"],
}

# Properties and methods of records.
ATTRIBUTES = {
    "Comparison": ["fastest"],
    "Line": ["at"],
    "MemoryBreakdown": ["peak_bytes", "start_bytes"],
    "MemoryModel": ["phase_at", "predict_bytes", "size_at"],
    "ModuleMemory": ["total_bytes"],
    "Plan": [
        "accumulate_grad_batches",
        "batch_size",
        "effective_batch_size",
        "fastest_batch_size",
        "from_json",
        "held_peak_bytes",
        "largest_batch_size",
        "learning_rate",
        "limited_by",
        "measured_peak_bytes",
        "memory",
        "plot",
        "predicted_peak_bytes",
        "project_batch_size",
        "ranks",
        "reason",
        "speeds",
        "to_json",
        "training",
        "training_seconds",
        "verified",
        "with_notes",
    ],
    "Recipe": ["batches_of_step"],
    "RunMemory": ["between_bytes", "cached_bytes", "held_bytes", "peak_bytes"],
    "Summary": ["conclusion", "from_json", "to_json"],
    "TrialMemory": ["held_bytes", "peak_bytes"],
    "Variant": ["batch_size", "memory_line", "samples_per_s"],
}

# Of the commands; also in a configuration file.
OPTIONS = {
    "check": ["gpu", "make", "reference", "tolerance", "trainer", "update"],
    "compare": [
        "apply",
        "batch_arg_name",
        "budget",
        "later",
        "lr_scaling",
        "make",
        "max_batch_size",
        "memory_limit",
        "min_batch_size",
        "min_steps_per_epoch",
        "multiple_of",
        "objective",
        "out",
        "plan",
        "target_batch_size",
        "then",
        "trainer",
        "variants",
        "worst_case",
    ],
    "draw": ["format", "log_dir", "out"],
    "find": [
        "apply",
        "batch_arg_name",
        "budget",
        "gpu",
        "later",
        "lr_scaling",
        "max_batch_size",
        "memory_limit",
        "min_batch_size",
        "min_steps_per_epoch",
        "multiple_of",
        "objective",
        "out",
        "plan",
        "program",
        "target_batch_size",
        "then",
        "trainer",
        "worst_case",
    ],
    "simulate": [
        "apply",
        "batch_arg_name",
        "budget",
        "context",
        "devices",
        "gpus",
        "later",
        "lr_scaling",
        "max_batch_size",
        "memory_limit",
        "min_batch_size",
        "min_steps_per_epoch",
        "multiple_of",
        "nccl",
        "nodes",
        "objective",
        "out",
        "program",
        "target_batch_size",
        "then",
        "worst_case",
    ],
}


# What other files of the package use has no underscore, and is not public either.
NOT_PUBLIC = {
    "Growth": ["fits", "needed_bytes", "note", "total_bytes"],
    "MemoryBreakdown": ["at_peak"],
    "Plan": ["short_text", "unit"],
    "Trial": ["fails_in_validation", "failure", "is_known", "worst_of"],
    "TrialMemory": ["growing_bytes", "with_set_aside", "worst_of"],
}


def check(listed, found, where):
    """Fail unless the package has exactly the names of a list."""
    assert listed == sorted(set(listed)), f"{where}: sort the names"
    gone = sorted(set(listed) - set(found))
    assert not gone, f"{where}: {', '.join(gone)} has left; {ADVICE}"
    new = sorted(set(found) - set(listed))
    assert not new, f"{where}: add {', '.join(new)} to the list"


# --- what the package has

FUNCTIONS = {
    "BatchFinder": BatchFinder,
    "BatchFinder.device_memory": BatchFinder.device_memory,
    "Line.at": Line.at,
    "MemoryModel.phase_at": MemoryModel.phase_at,
    "MemoryModel.predict_bytes": MemoryModel.predict_bytes,
    "MemoryModel.size_at": MemoryModel.size_at,
    "MemoryProfiler": MemoryProfiler,
    "MemoryProfiler.device_memory": MemoryProfiler.device_memory,
    "Plan.from_json": Plan.from_json,
    "Plan.with_notes": Plan.with_notes,
    "Summary.from_json": Summary.from_json,
    "assert_memory": assert_memory,
    "compare": compare,
    "find_batch_size": find_batch_size,
    "find_batch_size_of_loop": find_batch_size_of_loop,
}


def arguments_of(function):
    """Names of arguments; those that may be passed without a name have their place too."""
    names = []
    parameters = inspect.signature(function).parameters
    positional = [name for name in parameters if name != "self"]
    for name, parameter in parameters.items():
        match parameter.kind:
            case parameter.KEYWORD_ONLY:
                names.append(name)
            case parameter.VAR_KEYWORD:
                names.append(f"**{name}")
            case parameter.VAR_POSITIONAL:
                names.append(f"*{name}")
            case _ if name != "self":
                names.append(f"{name} ({positional.index(name) + 1})")
    return names


def literals_in(annotation):
    """The texts that an annotation names."""
    if get_origin(annotation) is Literal:
        return {text for text in get_args(annotation) if isinstance(text, str)}
    return set().union(*map(literals_in, get_args(annotation)))


def values_of(annotated):
    """The texts that arguments or attributes may be, such as ``objective="memory"``."""
    hints = get_type_hints(annotated.__init__ if annotated in CALLBACKS else annotated)
    return [f'{name}="{text}"' for name in hints for text in literals_in(hints[name])]


def records_in(annotation):
    """The data classes that an annotation leads to."""
    if is_dataclass(annotation):
        yield annotation
        for hint in get_type_hints(annotation).values():
            yield from records_in(hint)
    for part in get_args(annotation):
        yield from records_in(part)


CALLBACKS = (BatchFinder, MemoryProfiler)
# A plan is a part of Comparison, and the lines of its memory are computed from its trials.
ROOTS = (Comparison, MemoryModel, Summary, MeasuredStep)
RECORDS = {kind.__name__: kind for root in ROOTS for kind in records_in(root)}


def fields_of(kind):
    return [field.name for field in fields(kind)]


def other_attributes_of(kind):
    names = {name for name in dir(kind) if not name.startswith("_")}
    return names - {*fields_of(kind), *NOT_PUBLIC.get(kind.__name__, [])}


def attributes_of_callback(kind):
    """What a callback has besides Lightning's hooks."""
    callback = kind()
    # An annotation is an attribute that exists once a run has begun.
    names = {*dir(callback), *kind.__annotations__} - set(dir(Callback))
    return {name for name in names if not name.startswith("_")}


def all_of_pytorch_lightning():
    pytest.importorskip("pytorch_lightning")
    from lightning_batchmem import pytorch_lightning

    return pytorch_lightning.__all__


def modules():
    """The listed modules that exist, and those that the pages and the examples name."""
    folders = [ROOT / "docs", ROOT / "examples"]
    paths = [ROOT / "README.md", *(path for folder in folders for path in folder.rglob("*.*"))]
    texts = [path.read_text() for path in paths if path.suffix in (".md", ".py", ".yaml")]
    found = {
        name for text in texts for name in re.findall(r"lightning_batchmem(?:\.[a-z_]+)+", text)
    }
    return {name for name in found | set(NAMES["modules"]) if importlib.util.find_spec(name)}


def words_of_the_variable():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(factory.VARIABLE, "?")
        with pytest.raises(ValueError, match="must be one of") as raised:
            factory.callbacks()
    return re.findall(r'"(\w+)"', str(raised.value))


def commands():
    """The functions from which the command line is made."""
    with mock.patch.object(__main__, "auto_cli", return_value=0) as auto_cli:
        __main__.main([])
    return {function.__name__: function for function in auto_cli.call_args.args[0]}


def options_of(command):
    """Names of a command's options and other arguments, as in a configuration file."""
    parser = ArgumentParser()
    parser.add_function_arguments(command)
    # jsonargparse marks a name that a class of its own has too.
    return [name.replace("\u200b", "") for name in vars(parser.get_defaults())]


def json_of_a_plan():
    plan = Plan.from_json(json.dumps(SAVED_PLAN))
    return set(json.loads(plan.to_json())) - set(fields_of(Plan))


FOUND = {
    "lightning_batchmem": lambda: lightning_batchmem.__all__,
    "lightning_batchmem.profile.summary": lambda: [
        name
        for name, kind in vars(summary).items()
        if getattr(kind, "__module__", "") == summary.__name__
    ],
    "lightning_batchmem.pytorch_lightning": all_of_pytorch_lightning,
    "modules": modules,
    "attributes of BatchFinder": lambda: attributes_of_callback(BatchFinder),
    "attributes of MemoryProfiler": lambda: attributes_of_callback(MemoryProfiler),
    "metrics": lambda: [one.metric for one in COLUMNS if "/" in one.metric],
    "plan in loggers": lambda: [logged_plan._TEXT, logged_plan._FIGURE],
    "columns of memory_per_batch.csv": lambda: [one.name for one in COLUMNS if one.in_csv],
    "files": lambda: [
        run_folder.CSV_NAME,
        run_folder.PLAN_NAME,
        run_folder.SUMMARY_NAME,
        *(figure for figure, _ in __main__._FIGURES.values()),
    ],
    "phases of a step": lambda: PHASES,
    "JSON of a plan, besides its fields": json_of_a_plan,
    "LIGHTNING_BATCHMEM": lambda: [factory.VARIABLE, *words_of_the_variable()],
    "commands": commands,
}


@pytest.mark.parametrize("group", FOUND)
def test_names(group):
    check(NAMES[group], FOUND[group](), group)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments(name):
    check(ARGUMENTS[name], arguments_of(FUNCTIONS[name]), name)


@pytest.mark.parametrize("name", RECORDS)
def test_fields_and_attributes(name):
    check(FIELDS[name], fields_of(RECORDS[name]), name)
    check(ATTRIBUTES.get(name, []), other_attributes_of(RECORDS[name]), name)


@pytest.mark.parametrize("command", NAMES["commands"])
def test_options(command):
    check(OPTIONS[command], options_of(commands()[command]), command)


def test_values():
    annotated = FUNCTIONS | RECORDS | commands()
    found = {name: values_of(one) for name, one in annotated.items()}
    for name in found:
        check(VALUES.get(name, []), found[name], name)
    check(list(VALUES), [name for name, values in found.items() if values], "values")


def test_every_public_name_is_in_a_list():
    check(list(FIELDS), RECORDS, "fields")
    assert set(ARGUMENTS) == set(FUNCTIONS)
    assert set(OPTIONS) == set(NAMES["commands"])
    others = {"NothingFitsError", "__version__"}
    assert set(lightning_batchmem.__all__) - others <= {*FUNCTIONS, *RECORDS}


def test_a_name_that_leaves_is_deprecated():
    with pytest.raises(AssertionError, match=f"Plan: size has left; {ADVICE}"):
        check(["batch_size", "size"], ["batch_size"], "Plan")
    assert "\n## Deprecations\n" in (ROOT / "CONTRIBUTING.md").read_text()


# --- names of Lightning


@pytest.mark.parametrize("package", ["lightning_batchmem", "lightning_batchmem.pytorch_lightning"])
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("BatchSizeFinder", r"use BatchFinder \(docs/coming-from-batch-size-finder\.md "),
        ("OomGuard", r"copy examples/oom_guard\.py of its repository"),
        ("Tuner", r"call find_batch_size\(trainer, model\), or add a BatchFinder"),
    ],
)
def test_an_import_says_what_to_use(package, name, advice):
    pytest.importorskip("pytorch_lightning")
    with pytest.raises(ImportError, match=f"^lightning_batchmem has no {name}: {advice}"):
        exec(f"from {package} import {name}")
    with pytest.raises(ImportError, match="cannot import name 'size'"):
        exec(f"from {package} import size")


@pytest.mark.parametrize("name", ["optimal_batch_size", "batch_size", "profile"])
def test_the_attribute_of_lightnings_finder_names_ours(name):
    with pytest.raises(AttributeError, match=rf"has no {name}\. .* read finder\.plan\.batch_size "):
        getattr(BatchFinder(), name)


def test_a_profiler_says_where_it_belongs():
    trainer = Trainer(profiler=MemoryProfiler(), logger=False, accelerator="cpu")
    with pytest.raises(AttributeError, match=r"has no profile\. As one of Trainer\(callbacks="):
        trainer.validate(BoringModel(), verbose=False)
    with pytest.raises(AttributeError, match=r"has no summary\. .* read profiler\.summary after"):
        _ = MemoryProfiler().summary
