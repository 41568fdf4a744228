import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from benchmarks import common, gpu_check, gpu_parts, large_networks, overhead
from benchmarks.large_networks import Network
from lightning_batchmem import BatchFinder
from tests.simulated_cuda import trace

Cases = Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]


@pytest.fixture
def sent(monkeypatch):
    """What a part sends to the parent process."""
    values = {}
    monkeypatch.setattr(gpu_check, "emit", lambda **sent: values.update(sent))
    return values


def test_without_a_cuda_device_one_sentence_and_status_2(monkeypatch, capsys):
    # All parts together take at most 550 seconds.
    assert sum(gpu_check.PARTS.values()) <= 550
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert capsys.readouterr() == ("", "gpu_check needs a CUDA device, and torch finds none.\n")


def test_the_failure_of_a_case_is_a_row_between_the_others(monkeypatch, sent):
    def failing():
        raise RuntimeError("no device\nmore")

    def cases():
        yield {"size": 8}, lambda: {"peak": 1}
        yield {"size": 16}, failing
        yield {"size": 32}, lambda: {"peak": 2}

    monkeypatch.setattr(gpu_parts, "compile", cases)
    gpu_check.run_part("compile")
    assert "no device\nmore" in sent["rows"][1].pop("log")
    assert sent["rows"] == [
        {"size": 8, "peak": 1},
        {"size": 16, "error": "RuntimeError: no device"},
        {"size": 32, "peak": 2},
    ]


def test_files_are_written_after_each_part_whatever_happens_in_it(monkeypatch, tmp_path, capsys):
    path = tmp_path / "nvidia-test" / "gpu_check.json"
    found = {
        "tests": {"error": "process ended with 1: no module", "path": str(path)},
        "search": {
            "error": "no end after 170 s",
            "rows": [{"size": 1}],
            "running": {"size": 2},
            "head": "a device",
        },
    }

    def in_fresh_process(module, *arguments, timeout_seconds):
        if arguments[1] == "simulator":
            assert set(json.loads(path.read_text())) == {"tests", "search"}
        late = {"error": "late", "is_complete": True, "rows": [{"a": 1, "log": "long"}]}
        return found.get(arguments[1], late)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "in_fresh_process", in_fresh_process)
    assert gpu_check.main([]) == 1
    results = json.loads(path.read_text())
    assert results["search"] == [{"size": 1}, {"size": 2, "error": "no end after 170 s"}]
    assert results["compile"] == [{"a": 1, "log": "long"}]
    text = path.with_suffix(".md").read_text()
    assert text.startswith(
        "a device\n\n## tests\n\n"
        "| error |\n| --- |\n| process ended with 1: no module |\n\n"
        "## search"
    )
    assert "long" not in text
    assert text in capsys.readouterr().out + "\n"


def test_a_process_that_is_late_is_killed_with_those_that_it_started(monkeypatch, tmp_path):
    (tmp_path / "late.py").write_text(
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(json.dumps({'child': child.pid}), flush=True)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = common.in_fresh_process("late", timeout_seconds=2)
    assert found["error"] == "no end after 2 s"
    child = found["child"]
    # A killed process ends at its next time slice.
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail("the child is still running")


@pytest.fixture
def no_device(monkeypatch, fake_device):
    """The parts on the CPU, with a small network: every line but those of CUDA runs."""
    fractions = []
    name = gpu_parts.SEARCHED[-1]
    samples = (((8,), torch.float32),) * 2
    network = Network(
        name, partial(nn.Linear, 8, 8), torch.optim.Adam, samples, nn.functional.mse_loss
    )
    networks = (network, network._replace(name="ResNet-18 SGD"))
    monkeypatch.setattr(large_networks, "NETWORKS", networks)
    monkeypatch.setattr(trace, "NETWORKS", large_networks.NETWORKS)
    trace.trace_of.cache_clear()
    monkeypatch.setattr(gpu_parts, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(gpu_parts, "SEARCHED", (name,))
    memory = fake_device(budget_bytes=2**30, base_bytes=2**20)
    memory.reserved_ratio = 2
    monkeypatch.setattr(gpu_parts, "AcceleratorMemory", lambda device: memory)
    monkeypatch.setattr(gpu_parts, "BatchFinder", lambda **_: BatchFinder(max_batch_size=4))
    monkeypatch.setattr(gpu_parts, "trains", lambda network, size: size <= 5)
    monkeypatch.setattr(torch, "compile", lambda module, **arguments: module)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 10**9, 80 * 10**9))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *one: fractions.append(one)
    )
    monkeypatch.setattr(overhead, "STEPS_BY_INTERVAL", {1: 3})
    monkeypatch.setattr(overhead, "WARM_UP_STEPS", 1)
    monkeypatch.setattr(
        overhead, "run", lambda accelerator, *rest, run=overhead.run: run("cpu", *rest)
    )
    yield fractions
    trace.trace_of.cache_clear()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", [part for part in gpu_check.PARTS if part != "tests"])
def test_each_part_on_the_host_with_cuda_replaced(part, sent, no_device):
    gpu_check.run_part(part)
    rows = json.loads(json.dumps(sent["rows"]))
    assert [row.get("log") for row in rows] == [None] * len(rows)
    if part == "search":
        expected = {"limit GB": 8, "found": 4, "verified": True, "bisection": 5, "share": 0.8}
        assert rows[0].items() >= expected.items()
        assert rows[0].items() >= {"out of memory in search": 0, "in training": 0}.items()
        assert rows[1]["note"] == "not run: 10.0 GB are free"
        assert [fraction for fraction, _ in no_device] == [0.1, 1.0, 0.1, 1.0]
    if part == "compile":
        modes = [(row["mode"], row["found"]) for row in rows]
        assert modes == [("default", 4), ("reduce-overhead", 4)]
    if part == "simulator":
        assert (rows[0]["reserved MiB"], rows[0]["requested MiB"], len(rows)) == (2.0, None, 8)
        columns = {"requested simulated MiB", "allocated simulated MiB", "allocated MiB"}
        assert rows[0].keys() >= columns
    if part == "overhead":
        assert rows[0]["MemoryProfiler us"] > 0


@pytest.mark.parametrize("allocator", gpu_parts.ALLOCATORS)
def test_a_run_of_pytest_is_one_row(allocator, monkeypatch):
    script = (
        "import os; print(2 * 'FAILED tests/gpu/test_a.py::test_b[1 2] - assert 3 == 4\\n'); "
        "print(os.environ.get('PYTORCH_CUDA_ALLOC_CONF', 'default')); "
        "print('1 failed, 12 passed, 2 skipped, 1 error in 3.10s'); raise SystemExit(1)"
    )
    popen = subprocess.Popen
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **rest: popen([sys.executable, "-c", script], **rest)
    )
    row = gpu_parts.tested(allocator)
    assert (row["failed"], row["passed"], row["skipped"]) == (1, 12, 2)
    assert row["error"] == "test_b[1 2] - assert 3 == 4"
    assert f"\n{allocator}\n" in row["log"]
