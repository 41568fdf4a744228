"""What is assumed and read, by lines and by the library, and cuDNN's attention."""

import sys
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_batchmem.simulated_gpu import assumptions
from lightning_batchmem.simulated_gpu.assumptions import (
    MOST_READS,
    MOST_SECONDS,
    MOST_SHAPES,
    Assumptions,
    CudnnAttention,
    Reads,
)

aten = torch.ops.aten


def add(found, number):
    found.add("A size", "{:,} is assumed", number, "Do this.", torch.ones(1))


def test_a_line_is_named_with_the_largest_of_its_sizes():
    found = Assumptions()
    for number in (2, 2048, 64):
        add(found, number)
    (sentence,) = found.sentences
    assert sentence.startswith("A size (2,048 is assumed) depends on values that are not computed")
    assert sentence.endswith(", torch.ones(1))). Do this.")


@pytest.mark.parametrize(
    ("file", "count"),
    [
        ("/x/site-packages/torchmetrics/metric.py", 0),
        # SyncBatchNorm leaves out ranks without samples.
        ("/x/site-packages/torch/nn/modules/_functions.py", 0),
        ("/x/site-packages/lightning/pytorch/trainer/trainer.py", 0),
        ("/x/site-packages/torch/nn/functional.py", 1),
        ("/x/site-packages/monai/losses/dice.py", 1),
        (
            str(
                Path(sys.executable).parents[1] / "lib" / "site-packages" / "torchmetrics" / "a.py"
            ),
            0,
        ),
    ],
)
def test_what_lightning_and_torchmetrics_check_is_not_named(file, count):
    found = Assumptions()
    exec(compile("add(found, 3)", file, "exec"), {"add": found_by_package, "found": found})
    assert len(found.sentences) == count


# It is called by the package, with no frame of this file between.
found_by_package = eval(
    compile(
        "lambda found, number: found.add('A size', '{}', number, '', ones(1))",
        "/x/site-packages/torch/functional.py",
        "eval",
    ),
    {"ones": torch.ones},
)


@pytest.fixture
def seconds(monkeypatch):
    """CPU seconds of the process: a list whose last number is now."""
    found = [0.0]
    monkeypatch.setattr(assumptions.time, "process_time", lambda: found[-1])
    return found


def test_a_loop_that_reads_in_one_step_ends_after_some_seconds(seconds):
    ended = []
    reads = Reads(ended.append)
    reads.begin_step()
    for number in range(MOST_READS + 1):
        assert ended == []
        seconds.append(number * MOST_SECONDS / MOST_READS)
        reads.count()
    (sentence,) = ended
    text = "reads.count()) has read 1,000 values that are not computed in one step, in 20 s"
    assert text in sentence


def test_reads_before_a_step_and_those_of_several_steps_do_not_end(seconds):
    ended = []
    reads = Reads(ended.append)
    for step in range(4):
        seconds.append(step * MOST_SECONDS)
        for _ in range(MOST_READS - 1):
            reads.count()
        if step > 1:
            reads.begin_step()
    assert ended == []


def test_reads_that_take_no_time_do_not_end(seconds):
    ended = []
    reads = Reads(ended.append)
    reads.begin_step()
    for _ in range(10 * MOST_READS):
        reads.count()
    assert ended == []


def test_shapes_are_counted_once_and_bounded(capsys):
    attention = CudnnAttention()
    # The context manager restores the switch.
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        for _ in range(2):
            for size in range(1, MOST_SHAPES):
                found = attention.count(aten.exp.default, (torch.zeros(size),), {})
                # It runs as any other operator.
                assert found is NotImplemented
        assert torch.backends.cuda.cudnn_sdp_enabled()
        assert attention.sentences == []
        for size in (MOST_SHAPES, MOST_SHAPES + 1):
            attention.count(aten.exp.default, (torch.zeros(size),), {})
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert attention.sentences == [
        f"cuDNN's attention was compiled for {MOST_SHAPES} shapes, and all others ran on"
        " PyTorch's own kernels."
    ]
    assert capsys.readouterr().err.count("cuDNN compiles its attention") == 1


def test_another_type_or_layout_is_another_shape(capsys):
    attention = CudnnAttention()
    tensors = [torch.zeros(4, 6), torch.zeros(6, 4).T, torch.zeros(4, 6).half()]
    for tensor in tensors:
        attention.count(aten.sum.dim_IntList, (tensor, [1]), {})
    attention.count(aten.sum.dim_IntList, (tensors[0], [0]), {})
    assert len(attention._compiled) == 4


def test_a_sentence_of_the_library_has_a_line_of_the_main_thread_once():
    assumptions = Assumptions()
    # As in a backward pass.
    thread = Thread(target=assumptions.add_of_library, args=(b"it is assumed",))
    thread.start()
    thread.join()
    assert assumptions.sentences == []
    for _ in range(2):
        assumptions.add_of_library(b"it is assumed")
    (sentence,) = assumptions.sentences
    assert sentence.startswith("It is assumed (test_assumptions.py:")
