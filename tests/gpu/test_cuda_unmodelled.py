"""The stub itself: what it does not have ends the process by name, and its settings hold."""

import re
import subprocess

import pytest

from lightning_batchmem.simulated_gpu import build
from tests.helpers.cuda_stub import needs_stub, on_stub
from tests.helpers.lawful import MIB

pytestmark = needs_stub
SCRIPT = "cuda_unmodelled"


@pytest.mark.parametrize(
    ("call", "function", "library", "caller"),
    [
        ("sparse", r"cusparse\w+", "libcusparse.so", "libtorch_cuda.so"),
        ("peer", "cudaIpcGetMemHandle", "libcudart.so", "libc10_cuda.so"),
        ("driver", "cuCtxCreate", "libcuda.so", "libffi"),
    ],
)
def test_a_function_that_is_not_modelled_ends_the_process_by_name(
    call, function, library, caller, tmp_path
):
    report = tmp_path / "report"
    with pytest.raises(RuntimeError, match=r"ended with 70:\n") as ended:
        on_stub(SCRIPT, "unmodelled", call, CUDA_STUB_REPORT=str(report))
    (sentence,) = report.read_text().splitlines()
    # The process that named the file prints it.
    assert sentence not in str(ended.value)
    pattern = (
        rf"The simulated GPU does not have {function} of {library}\S*, which {caller}\S* calls\."
    )
    assert re.fullmatch(pattern, sentence), sentence


def test_a_function_that_is_not_modelled_may_be_looked_up():
    known = {"cuCtxCreate": True, "cuMemCreate": True, "cuStreamWriteValue32": True}
    assert on_stub(SCRIPT, "looked_up_only") == {**known, "cuDreamUp": False}


def test_the_folder_may_have_a_space_in_its_name(tmp_path):
    found = on_stub(SCRIPT, "looked_up_only", XDG_CACHE_HOME=str(tmp_path / "a b"))
    assert found["cuMemCreate"]


@pytest.mark.parametrize("expandable", ["True", "False"])
def test_a_host_without_room_does_not_look_like_a_full_device(expandable):
    settings = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    with pytest.raises(RuntimeError, match=r"ended with 70:\n") as ended:
        on_stub(SCRIPT, "host_limit", expandable, **settings)
    pattern = r"The host refuses \d+ MiB of address space for the simulated GPU: Cannot allocate"
    assert re.search(pattern, str(ended.value)), ended.value


def test_what_needs_no_device_answers():
    found = on_stub(SCRIPT, "without_device")
    assert found["replaced"] == ["cufftCreate"]
    assert found["cudnn"] > 90_000
    assert found["word"] == "no error"
    assert found["compiled"] == [8, 8]


def test_training_ends_in_no_function_that_is_not_modelled():
    assert on_stub(SCRIPT, "training") == {"steps": 7}


@pytest.mark.parametrize(
    ("capability", "threads", "shared_kib", "in_block_kib"),
    [
        # The table of NVIDIA, see multiprocessors in cuda_stub.cpp.
        ("7.5", 1024, 64, 64),
        ("8.6", 1536, 100, 99),
        ("9.0", 2048, 228, 227),
        ("12.0", 1536, 100, 99),
        # One that is not in the table has what the one before it has.
        ("10.3", 2048, 228, 227),
    ],
)
def test_settings_are_read_before_the_program_removes_them(
    capability, threads, shared_kib, in_block_kib
):
    settings = {"CUDA_STUB_BYTES": str(25_769_803_777), "CUDA_STUB_GIB": "3"}
    settings |= {"CUDA_STUB_SMS": "46", "CUDA_STUB_L2_MIB": "4.5", "CUDA_STUB_NAME": "A B"}
    assert on_stub(SCRIPT, "own_settings", CUDA_STUB_CAPABILITY=capability, **settings) == {
        "bytes": 25_769_803_777,
        "bytes_of_nvml": 25_769_803_777,
        "name": "A B",
        "name_of_nvml": "A B",
        "multiprocessors": 46,
        "level_2_mib": 4.5,
        "threads": threads,
        "shared_kib": shared_kib,
        "shared_in_block_kib": in_block_kib,
    }


def test_zeros_take_no_memory_of_the_host_and_other_values_are_written():
    found = on_stub(SCRIPT, "fill")
    assert found["sevens"] == [7]
    assert found["zeros"] == [0]
    assert found["around"] == [7, 7]
    assert found["written_mib"] > 60, found
    assert found["kept_mib"] < 4, found


def test_a_copy_without_direction_goes_where_its_addresses_say():
    assert on_stub(SCRIPT, "directions") == {"brought_back": 3, "inside": 0}


def test_the_same_calls_get_the_same_addresses():
    # The host chooses its own addresses at random in each process.
    first, second = (on_stub(SCRIPT, "addresses")["addresses"] for _ in range(2))
    assert first == second
    # They are the lowest ones that are free: of 20 MiB that were freed 8 are taken, then 6.
    assert first[5] == first[1]
    assert first[6] > max(first[:5])
    assert first[7] == first[5] + 8 * MIB


def test_the_sources_have_no_warnings():
    packages = build._packages_with_torch()
    includes = [f"-I{build.OWN_HEADERS}", f"-I{build._header_folder(packages)}"]
    flags = ["-fsyntax-only", "-std=c++17", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["g++", *flags, *includes, *build.MODELLED], check=True)
