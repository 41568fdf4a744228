"""``simulate`` of a training on two ranks, beside two ranks with gloo and the same limit."""

from importlib.util import find_spec

import pytest

from tests.gpu.test_simulate import plan_of
from tests.helpers.cuda_stub import needs_stub, on_stub

pytestmark = needs_stub

MODULE = "tests.helpers.cuda_one_rank"
# Gloo takes no memory of the device, and the stub has this context.
AS_HERE = ("--nccl", "1MiB", "--context", "300MiB")
GIB = 3
DEVICES = {"CUDA_STUB_DEVICES": "2", "CUDA_STUB_GIB": str(GIB)}
# What DeepSpeed asks for where no compiler of CUDA is found.
DEEPSPEED = {"DS_IGNORE_CUDA_DETECTION": "1", "DS_SKIP_CUDA_CHECK": "1"}

STAGES = ["deepspeed 1", "deepspeed 2", "deepspeed 3"]

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs DeepSpeed, the extra `deepspeed`"
)


def of_deepspeed(way):
    return pytest.param(way, marks=needs_deepspeed)


def trained(folder, way, batch_size, limit_bytes):
    folder.mkdir()
    arguments = (str(folder), way, str(batch_size), str(limit_bytes))
    return on_stub("cuda_one_rank", *arguments, **DEVICES, **DEEPSPEED)


@pytest.mark.parametrize(
    "way",
    ["ddp", "fsdp", "fsdp2", *map(of_deepspeed, ["deepspeed 1", "deepspeed 2", "deepspeed 3"])],
)
def test_a_plan_of_one_rank_holds_on_two(way, tmp_path, monkeypatch):
    for name, value in DEEPSPEED.items():
        monkeypatch.setenv(name, value)
    plan, process = plan_of(tmp_path, "simulate", *AS_HERE, f"{GIB}GiB", "-m", MODULE, way)
    assert (plan.limited_by, plan.ranks) == ("memory", 2)
    assert "rank 0 of 2" in process.stdout
    fits = trained(tmp_path / "fits", way, plan.batch_size, plan.limit_bytes)
    assert fits["codes"] == [0, 0], fits["outputs"]
    too_large = int(plan.memory.size_at(1.03 * plan.limit_bytes))
    fails = trained(tmp_path / "fails", way, too_large, plan.limit_bytes)
    assert fails["codes"] != [0, 0]
    assert any("out of memory" in text for text in fails["outputs"])
