"""What values do on the host, and what schemas say: parts that need no device."""

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_batchmem
from lightning_batchmem.simulated_gpu.assumptions import project_line
from lightning_batchmem.simulated_gpu.child import VALUE_MODULES
from lightning_batchmem.simulated_gpu.known import covers_its_storage, describe, host_view
from lightning_batchmem.simulated_gpu.values import Values

aten = torch.ops.aten
FOLDER = Path(lightning_batchmem.__file__).parent / "simulated_gpu"


@pytest.fixture
def values():
    values = Values()
    values.enter()
    yield values
    values.exit()


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_weights_are_not_initialized(values):
    before = resident_bytes()
    layer = nn.Linear(16384, 8192)
    layer.weight.data.normal_(0, 0.02)
    nn.init.trunc_normal_(layer.weight)
    assert layer.weight.nbytes == 512 * 2**20
    assert resident_bytes() - before < 32 * 2**20


def test_a_large_data_set_is_filled(values):
    data = torch.empty(2**21).normal_()
    assert data.std().item() == pytest.approx(1, abs=0.01)
    data.mul_(2).fill_(3.0)
    assert data.eq(3).all()


def test_small_weights_are_initialized(values):
    assert nn.Linear(64, 64).weight.abs().sum() > 0


def test_operators_of_the_host_are_left_alone(values):
    with pytest.raises(IndexError, match="index 7"):
        torch.arange(3)[torch.tensor([7])]
    assert torch.stack([torch.ones(2), torch.zeros(2)]).sum() == 2
    assert values.assumptions == []


def test_a_mode_can_be_entered_again(values):
    values.exit()
    assert torch.ones(2).sum() == 2
    values.enter()
    assert torch.ones(2).sum() == 2


@pytest.mark.parametrize(
    ("function", "name", "written", "keeps_values"),
    [
        (aten.add.Tensor, "add", set(), False),
        (aten.add_.Tensor, "add", {"self"}, False),
        (aten.add.out, "add", {"out"}, False),
        (aten.view.default, "view", set(), True),
        (aten._unsafe_view.default, "_unsafe_view", set(), True),
        (aten.unsqueeze_.default, "unsqueeze", {"self"}, True),
        (aten.record_stream.default, "record_stream", {"self"}, True),
        (aten._foreach_add_.Scalar, "_foreach_add", {"self"}, False),
    ],
)
def test_schemas_are_read(function, name, written, keeps_values):
    operator = describe(function)
    assert (operator.name, operator.written) == (name, written)
    assert operator.keeps_values is keeps_values


def test_an_operator_reads_what_it_does_not_overwrite():
    first, second, out = torch.ones(2), torch.ones(2), torch.empty(2)

    def parts(function, *arguments, **keywords):
        both = describe(function).read_and_written(arguments, keywords)
        return [[id(tensor) for tensor in tensors] for tensors in both]

    one, other = id(first), id(second)
    assert parts(aten.add_.Tensor, first, second) == [[one, other], [one]]
    assert parts(aten.copy_.default, first, second) == [[other], [one]]
    assert parts(aten.zeros_like.default, first) == [[], []]
    assert parts(aten.add.out, first, second, out=out) == [[one, other], [id(out)]]


def test_products_are_computed_if_they_are_small():
    product = describe(aten.mm.default)
    small, large = torch.empty(8, 8), torch.empty(2**12, 2**12)
    assert product.is_cheap([small, small], [small])
    assert not product.is_cheap([large, large], [large])
    assert describe(aten.add.Tensor).is_cheap([large, large], [large])


def test_a_view_covers_its_storage_only_if_it_has_all_bytes():
    whole = torch.empty(4, 6)
    assert covers_its_storage(whole)
    assert covers_its_storage(whole.T)
    assert covers_its_storage(torch.empty(2, 3, 4, 5, memory_format=torch.channels_last))
    assert not covers_its_storage(whole[1:])
    assert not covers_its_storage(whole[:, ::2])
    # It has as many elements as its storage, and some are the same.
    assert not covers_its_storage(torch.empty(4).as_strided((2, 2), (1, 1)))
    assert not covers_its_storage(torch.empty(4)[:1].expand(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.complex64])
def test_a_host_view_has_the_bytes_of_a_tensor(dtype):
    tensor = torch.arange(24).view(4, 6).to(dtype)
    for view in (tensor, tensor.T, tensor[1:, ::2], tensor[:0], tensor[2].expand(3, 6)):
        assert torch.equal(host_view(view), view)
    host_view(tensor)[0, 0] = True
    assert tensor[0, 0] == torch.ones((), dtype=dtype)


def test_the_line_of_the_project_is_the_innermost_outside_of_packages():
    class Named(dict):
        def __missing__(self, key):
            return project_line()

    file, number, text = Named()["key"].split(":", 2)
    assert (file, text) == ("test_values.py", " return project_line()")
    assert number.isdigit()
    for folder in ("site-packages", "dist-packages"):
        installed = {"project_line": project_line}
        exec(compile("line = project_line()", f"/x/{folder}/installed.py", "exec"), installed)
        assert installed["line"].startswith("test_values.py:")


# Dynamo imports parts of torch that are deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_files_can_be_loaded_by_their_path_before_the_package():
    """As a process does in which Lightning is not imported yet."""
    names = list(VALUE_MODULES)
    program = f"""
import importlib.util, sys
for name in {names}:
    full = "lightning_batchmem.simulated_gpu." + name
    spec = importlib.util.spec_from_file_location(full, {str(FOLDER)!r} + "/" + name + ".py")
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
assert "lightning_batchmem" not in sys.modules
assert "lightning" not in sys.modules
assert module.Values().assumptions == []
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
