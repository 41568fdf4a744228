"""cuDNN without a device: it plans for the GPU that the stub describes to it.

The other tests of this folder run with cuDNN switched off.
"""

import re

import pytest

from tests.helpers.cuda_stub import needs_stub, on_stub

pytestmark = needs_stub
SCRIPT = "cuda_cudnn"


def run(case, **settings):
    return on_stub(SCRIPT, case, **{"CUDA_STUB_CUDNN": "1", **settings})


def test_convolutions_have_the_workspaces_of_the_gpu():
    ampere = run("convolution", CUDA_STUB_CAPABILITY="8.0")
    turing = run("convolution", CUDA_STUB_CAPABILITY="7.5")
    without = run("convolution", CUDA_STUB_CUDNN="0")
    assert [found["is_on"] for found in (ampere, turing, without)] == [True, True, False]
    for found in (ampere, turing):
        # The same plan is taken again.
        assert found["steps"][0] == found["steps"][1]
    assert len({found["steps"][0] for found in (ampere, turing, without)}) == 3


def test_what_cudnn_cannot_plan_runs_on_kernels_of_torch():
    assert run("recurrent_and_normalized") == {"is_on": True}


@pytest.mark.parametrize(("capability", "prefers"), [("8.0", False), ("9.0", True)])
def test_attention_is_compiled_where_torch_prefers_cudnn(capability, prefers):
    found = run("attention", CUDA_STUB_CAPABILITY=capability)
    assert found == {"prefers_cudnn": prefers, "has_gradient": True}


@pytest.mark.parametrize(
    ("case", "function"),
    [("older_interface", r"cudnnSpatialTf\w+"), ("scripted", r"cudnnGetBatchNormalization\w+")],
)
def test_a_function_that_needs_a_device_ends_the_process_by_name(case, function):
    with pytest.raises(RuntimeError, match=r"ended with 70:\n") as ended:
        run(case)
    pattern = rf"does not have {function} of libcudnn.so.9, which libtorch_cuda.so calls\."
    assert re.search(pattern, str(ended.value)), ended.value
