import json
from dataclasses import replace

import pytest

from lightning_batchmem.devices.breakdown import MemoryBreakdown
from lightning_batchmem.plan.records import MIB
from lightning_batchmem.profile.flop_step import FlopRate
from lightning_batchmem.profile.module_memory import ModuleMemory, PeakByModule
from lightning_batchmem.profile.step_memory import PeakBetweenSteps
from lightning_batchmem.profile.summary import RunMemory, RunSpeed, Summary

SUMMARY = Summary(
    device="host",
    stage="train",
    steps=1200,
    memory=RunMemory(
        peak_process_bytes=2000 * MIB,
        peak_step=37,
        batch_size=64,
        limit_bytes=8192 * MIB,
        breakdown=MemoryBreakdown(100 * MIB, 100 * MIB, 200 * MIB, 50 * MIB, 1500 * MIB, 50 * MIB),
    ),
    speed=RunSpeed(step_ms=12.5, samples_per_s=1234.5, data_wait_pct=25.0),
)


def with_memory(summary, **values):
    return replace(summary, memory=replace(summary.memory, **values))


def with_speed(summary, **values):
    return replace(summary, speed=replace(summary.speed, **values))


CUDA = replace(
    with_memory(
        SUMMARY,
        peak_allocated_bytes=2000 * MIB,
        peak_reserved_bytes=2100 * MIB,
        peak_process_bytes=None,
        breakdown=replace(SUMMARY.memory.breakdown, outside_bytes=512 * MIB),
    ),
    device="cuda",
)
NO_MEMORY = replace(
    with_memory(SUMMARY, peak_process_bytes=None, limit_bytes=None, breakdown=None), device="mps"
)
UNKNOWN = with_speed(
    with_memory(SUMMARY, breakdown=None, batch_size=None),
    samples_per_s=None,
    data_wait_pct=None,
)
VALIDATION = replace(SUMMARY, stage="validate")
MORE = replace(
    with_speed(
        with_memory(SUMMARY, validation_peak_bytes=2500 * MIB, rank_peaks_bytes=(MIB, 2 * MIB)),
        items_per_s=99.5,
    ),
    alerts=("Something rises.",),
    modules=PeakByModule((ModuleMemory("layer", "Linear", MIB),), 2 * MIB, 4),
    flops=FlopRate(2e9, 0.6, None, "No MFU."),
)


def lines(summary):
    return str(summary).splitlines()


def cells(summary):
    found = [line.split("|")[1:4] for line in lines(summary) if line.startswith("|")]
    # The first rows are the headings, and the line below them.
    return {name.strip(): (size.strip(), share.strip()) for name, size, share in found[2:]}


def test_every_part_with_its_share():
    assert cells(SUMMARY) == {
        "parameters and buffers": ("100.0 MiB", "5.0%"),
        "gradients": ("100.0 MiB", "5.0%"),
        "optimizer state": ("200.0 MiB", "10.0%"),
        "activations, and freed memory that is kept": ("1,500.0 MiB", "75.0%"),
        "batch data": ("50.0 MiB", "2.5%"),
        "other (interpreter, libraries)": ("50.0 MiB", "2.5%"),
        "peak of the process": ("2,000.0 MiB", "100.0%"),
    }


@pytest.mark.parametrize(
    ("summary", "present", "missing"),
    [
        (
            SUMMARY,
            ["2,000.0 MiB at step 37 (64 samples)", "8,192.0 MiB", "1,200 steps of 12.5 ms"],
            ["Highest memory of the process", "workers"],
        ),
        (
            SUMMARY,
            ["1,234.5 samples/s", "25.0% of the time waiting for data"],
            ["No breakdown", "not in memory"],
        ),
        (
            CUDA,
            [
                "Highest memory of the process: 2,100.0 MiB",
                # Only an allocator tells freed memory apart.
                "activations and temporaries | 1,500.0 MiB",
                "peak of the tensors | 2,000.0 MiB",
                "cached, unused | 100.0 MiB",
                "other (workspaces, kept tensors)",
                "outside the allocator | 512.0 MiB",
            ],
            ["after step"],
        ),
        (
            with_speed(SUMMARY, first_step_ms=25.1),
            ["1,200 steps of 12.5 ms (the first: 25.1 ms), 1,234.5 samples/s"],
            [],
        ),
        (
            with_speed(SUMMARY, first_step_ms=4500.0),
            ["12.5 ms (the first: 4,500.0 ms), 1,234.5"],
            [],
        ),
        (with_speed(SUMMARY, first_step_ms=24.9), ["of 12.5 ms,"], ["the first:"]),
        # A hook may use more than any step.
        (
            with_memory(CUDA, between_steps=PeakBetweenSteps(2050 * MIB, 31)),
            ["| after step 31 | 2,050.0 MiB | |", "unused | 50.0 MiB"],
            [],
        ),
        (
            with_memory(CUDA, between_steps=PeakBetweenSteps(2050 * MIB, None)),
            ["| before the first step | 2,050.0 MiB | |"],
            [],
        ),
        (
            with_memory(CUDA, between_steps=PeakBetweenSteps(2000 * MIB, 31)),
            ["unused | 100.0 MiB"],
            ["after step 31"],
        ),
        (
            MORE,
            [
                "Highest peak of the validation: 2,500.0 MiB",
                "Warning: Something rises.",
            ],
            [],
        ),
        (
            MORE,
            [
                "Peaks of 2 ranks: 1.0 MiB to 2.0 MiB, highest on 1; 3.0 MiB in all",
                "samples/s, 99.5 items/s",
            ],
            [],
        ),
        (
            MORE,
            [
                "Memory by module at the peak of a step | module | memory",
                "| layer (Linear) | 1.0 MiB | 50.0% | 0.000 MiB | 0.000 MiB |",
                "0.6 TFLOP/s per device, 2,000,000,000 FLOP per sample",
                "No MFU.",
            ],
            [],
        ),
        (
            replace(SUMMARY, modules=PeakByModule(why_not="No table of the modules: why.")),
            ["No table of the modules: why."],
            ["Memory by module"],
        ),
        (VALIDATION, ["Memory of a validation step (CPU)"], ["of the validation"]),
        (
            UNKNOWN,
            ["No breakdown: the training had too few steps for it, or it could not be measured."],
            ["samples", "waiting"],
        ),
        (NO_MEMORY, ["1,200 steps of 12.5 ms"], ["MiB"]),
        (
            with_memory(SUMMARY, peak_process_bytes=2001 * MIB),
            ["came before the steady steps"],
            [],
        ),
    ],
)
def test_other_numbers_are_below_the_table(summary, present, missing):
    text = " ".join(" ".join(lines(summary)).split())
    assert [word for word in present if word not in text] == []
    assert [word for word in missing if word in text] == []


def test_a_notebook_shows_the_table_and_a_list_one_line():
    markdown = MORE._repr_markdown_()
    table = "\n".join(lines(MORE))
    assert markdown == f"```\n{table}\n```"
    assert markdown.count("|") > 0
    assert "Peaks of 2 ranks" in markdown
    assert repr(MORE) == (
        "<Summary of training: peak 2,000.0 MiB, 1,200 steps of 12.5 ms, 1,234.5 samples/s,"
        " 99.5 items/s>"
    )
    assert repr(NO_MEMORY).startswith("<Summary of training: 1,200 steps")


def test_no_line_is_longer_than_80_columns():
    summary = replace(
        MORE,
        speed=replace(MORE.speed, cpu_utilization_pct=99.0, cores=16, data_wait_pct=0.0),
        training="16 -> 24 samples a step, 226 -> 150 steps, learning rate 0.001 unchanged",
        alerts=("The memory in use at the start of a step rises, " * 3,),
    )
    assert summary.conclusion in " ".join(str(summary).split())
    assert max(map(len, lines(summary))) <= 80
    # What continues a line is indented.
    assert "  unchanged" in lines(summary)


@pytest.mark.parametrize(
    "summary",
    [SUMMARY, UNKNOWN, MORE, with_memory(CUDA, between_steps=PeakBetweenSteps(MIB, None))],
)
def test_a_summary_survives_json(summary):
    assert Summary.from_json(summary.to_json()) == summary
    older = {**json.loads(summary.to_json()), "has_peak": True, "estimate": None}
    assert Summary.from_json(json.dumps(older)) == summary


@pytest.mark.parametrize("wrong", ["{}", "[]", "no JSON", '{"device": "host"}'])
def test_other_json_is_no_summary(wrong):
    with pytest.raises(ValueError, match=r"must be the JSON of a Summary|Expecting value"):
        Summary.from_json(wrong)


def test_what_limits_the_run_is_the_first_line():
    # The reserved memory counts on a device, and the resident set on the host.
    full = with_memory(SUMMARY, limit_bytes=2100 * MIB)
    assert lines(full)[0].startswith("Limited by memory: 95% of the limit.")
    full_cuda = with_memory(CUDA, limit_bytes=2100 * MIB)
    assert lines(full_cuda)[0].startswith("Limited by memory: 100%")
    busy = lines(with_speed(full, cpu_utilization_pct=96.0, cores=2))
    assert busy[0].startswith("Limited by compute: the CPU was 96% busy.")
    assert "Cores of this process (2): 96.0% busy" in busy
    assert "of all processes" not in "".join(busy)
    assert "GPU: 20.0% busy, of all processes on it" in lines(
        with_speed(CUDA, gpu_utilization_pct=20.0)
    )
    # The search may have found that larger batches are slower.
    assert "larger batches" not in full.conclusion
    assert lines(SUMMARY)[0].startswith("Memory of a training step")


@pytest.mark.parametrize(
    ("wait", "held", "busy", "start"),
    [
        (64.0, 990, 89.0, "Limited by data: 64% of the time passed before the batch arrived."),
        (50.0, 990, None, "Limited by memory: 99% of the limit."),
        (50.0, 990, 95.0, "Limited by compute: the GPU was 95% busy."),
        # A busy device may work while the process waits, or for another process.
        (90.0, 990, 95.0, ""),
        (10.0, 970, 60.0, "Limited by memory: 97% of the limit."),
        (None, 900, None, "Limited by memory: 90% of the limit."),
        # These numbers do not decide.
        (30.0, 890, 80.0, ""),
        (None, None, None, ""),
    ],
)
def test_the_largest_limit_is_named(wait, held, busy, start):
    summary = with_memory(SUMMARY, peak_process_bytes=held, limit_bytes=1000)
    summary = with_speed(summary, data_wait_pct=wait, gpu_utilization_pct=busy)
    assert summary.conclusion.startswith(start)
    assert bool(summary.conclusion) == bool(start)


def test_cores_that_make_batches_are_not_what_limits_a_run():
    making = with_speed(SUMMARY, data_wait_pct=98.0, cpu_utilization_pct=95.0, cores=2)
    assert making.conclusion.startswith("Limited by data: 98%")


def test_memory_that_a_plan_fills_is_no_fault():
    planned = with_memory(SUMMARY, peak_process_bytes=91, limit_bytes=100, is_planned=True)
    assert planned.conclusion == "Memory is used as planned: 91% of the limit."


def test_without_a_limit_memory_does_not_decide():
    assert not with_memory(SUMMARY, limit_bytes=None).conclusion
