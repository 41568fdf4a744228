import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_batchmem.plan.options import bytes_in
from lightning_batchmem.simulated_gpu import gpus
from lightning_batchmem.simulated_gpu.gpus import (
    CONTEXT_BYTES,
    architecture_for,
    gpu_named,
    kernels_missing_text,
    names_text,
)

# the number in the name of each product, in GiB
MARKETING_GIB = {
    "P100": 16,
    "V100-16GB": 16,
    "V100-32GB": 32,
    "T4": 16,
    "RTX-2080-Ti": 11,
    "RTX-3060": 12,
    "RTX-3070": 8,
    "RTX-3080": 10,
    "RTX-3090": 24,
    "RTX-4060-Ti-16GB": 16,
    "RTX-4070": 12,
    "RTX-4080": 16,
    "RTX-4090": 24,
    "RTX-5090": 32,
    "A10": 24,
    "A10G": 24,
    "A30": 24,
    "A40": 48,
    "L4": 24,
    "L40": 48,
    "L40S": 48,
    "RTX-A4000": 16,
    "RTX-A5000": 24,
    "RTX-A6000": 48,
    "RTX-A6000-ECC-off": 48,
    "RTX-2000-Ada": 16,
    "RTX-4000-Ada": 20,
    "RTX-6000-Ada": 48,
    "RTX-6000-Ada-ECC-off": 48,
    "A100-40GB": 40,
    "A100-80GB": 80,
    "H100-PCIe": 80,
    "H100": 80,
    "H100-NVL": 94,
    "GH200": 96,
    "H200": 141,
    "B200": 180,
}

# torch._C._cuda_getArchFlags() of the wheels for x86_64: 2.5.1+cu124, 2.9.1+cu128 and 2.14.1+cu130
# were read on 2026-11-26, and 2.11.0+cu126 is in pytorch/pytorch#182250.
CU124 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"
CU126 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"
CU128 = "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
CU130 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
BLACKWELL = {"B200", "RTX-5090"}


def test_the_table_has_each_gpu_once():
    names = [gpu.name for gpu in gpus._GPUS]
    assert sorted(names) == sorted(MARKETING_GIB)


@pytest.mark.parametrize(("name", "marketing_gib"), MARKETING_GIB.items())
def test_values_are_plausible_and_have_a_source(name, marketing_gib):
    gpu = gpu_named(name)
    assert gpu.name == name
    assert 0.9 * marketing_gib * 2**30 < gpu.memory_bytes < marketing_gib * 2**30
    assert (6, 0) <= gpu.capability <= (12, 0)
    assert gpu.multiprocessors is None or 20 <= gpu.multiprocessors <= 200
    assert gpu.l2_cache_bytes is None or 2 * 2**20 <= gpu.l2_cache_bytes <= 128 * 2**20
    (source,) = [one["source"] for one in gpus._TABLE["gpus"] if one["name"] == name]
    assert source.startswith(("gls ", "xla ", "gist ", "TorchCodec")) or "/" in source


@pytest.mark.parametrize(
    ("name", "memory_bytes", "capability", "multiprocessors", "l2_cache_bytes"),
    [
        ("RTX-3090", 25_286_672_384, (8, 6), 82, 6 * 2**20),
        ("A100-40GB", 42_298_834_944, (8, 0), 108, 40 * 2**20),
        ("RTX-5090", 33_677_180_928, (12, 0), 170, 96 * 2**20),
        ("RTX-3060", 12_626_493_440, (8, 6), 28, 2_359_296),
        ("A30", int(23.53 * 2**30), (8, 0), None, None),
    ],
)
def test_values_of_some_gpus(name, memory_bytes, capability, multiprocessors, l2_cache_bytes):
    gpu = gpu_named(name)
    assert gpu.memory_bytes == memory_bytes
    assert gpu.capability == capability
    assert gpu.multiprocessors == multiprocessors
    assert gpu.l2_cache_bytes == l2_cache_bytes


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX-4090", "RTX-4090"),
        ("rtx4090", "RTX-4090"),
        ("RTX 4090", "RTX-4090"),
        ("rtx_4090", "RTX-4090"),
        (" 4090 ", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("2080ti", "RTX-2080-Ti"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("a6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("a100-40gb", "A100-40GB"),
        ("h100", "H100"),
        ("H100-SXM", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
    ],
)
def test_a_name_may_be_written_in_many_ways(text, name):
    assert gpu_named(text).name == name


@given(st.sampled_from(sorted(MARKETING_GIB)), st.sampled_from("-_ "), st.booleans())
def test_case_and_separators_are_ignored(name, separator, upper):
    text = name.replace("-", separator)
    assert gpu_named(text.upper() if upper else text.lower()).name == name


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("A100", "A100 is the name of several GPUs: choose A100-40GB or A100-80GB"),
        ("nvidia v100", "V100 is the name of several GPUs: choose V100-16GB or V100-32GB"),
        (
            "rtx4900",
            "'rtx4900' is neither a known GPU nor a size such as 24GiB (near names: RTX-4090,"
            " RTX-4080, RTX-4070): see `simulate --list`",
        ),
        (
            "RTX 4060 Ti",
            "'RTX 4060 Ti' is neither a known GPU nor a size such as 24GiB (near names:"
            " RTX-4060-Ti-16GB, RTX-2080-Ti, RTX-4090): see `simulate --list`",
        ),
        (
            "",
            "'' is neither a known GPU nor a size such as 24GiB: see `simulate --list`",
        ),
        (
            "24 apples",
            "'24 apples' is neither a known GPU nor a size such as 24GiB: see `simulate --list`",
        ),
        ("100MiB", "a GPU of 100MiB has no room: a CUDA context alone takes 426 MiB"),
        ("426MiB", "a GPU of 426MiB has no room: a CUDA context alone takes 426 MiB"),
        ("128TiB", "a GPU of 128TiB is too large: give less than 128 TiB"),
    ],
)
def test_what_is_refused_gets_one_sentence(text, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        gpu_named(text)


@given(st.text(max_size=30))
@example("4090 Ti")
def test_any_other_text_is_refused(text):
    if bytes_in(text) == 0 and gpus._key(text) not in gpus._GPU_OF_KEY:
        with pytest.raises(ValueError, match=r"simulate --list|several GPUs"):
            gpu_named(text)


@pytest.mark.parametrize(
    ("text", "memory_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("512MiB", 512 * 2**20),
        (" 1.5 gib ", 3 * 2**29),
        ("٢٤GiB", 24 * 2**30),
        ("427MiB", 427 * 2**20),
        ("127TiB", 127 * 2**40),
    ],
)
def test_a_size_is_a_gpu_of_that_size(text, memory_bytes):
    gpu = gpu_named(text)
    assert gpu.name == text.strip()
    assert gpu.memory_bytes == memory_bytes
    assert gpu.capability == (8, 0)
    assert gpu.multiprocessors is None
    assert gpu.l2_cache_bytes is None


@pytest.mark.parametrize(
    ("arch_flags", "without_kernels"),
    [
        (CU124, BLACKWELL),
        (CU126, BLACKWELL),
        (CU128, {"P100"}),
        (CU130, {"P100", "V100-16GB", "V100-32GB"}),
        ("", set(MARKETING_GIB)),
        ("gfx90a gfx942", set(MARKETING_GIB)),
    ],
)
def test_gpus_without_kernels_in_real_builds(arch_flags, without_kernels):
    arch_list = arch_flags.split()
    missing = {
        name for name in MARKETING_GIB if architecture_for(gpu_named(name), arch_list) is None
    }
    assert missing == without_kernels


@pytest.mark.parametrize(
    ("architecture", "runs_on"),
    [
        ("sm_80", {(8, 0), (8, 6), (8, 9)}),
        ("sm_86", {(8, 6), (8, 9)}),
        ("sm_89", {(8, 9)}),
        ("sm_90a", {(9, 0)}),
        ("sm_100", {(10, 0), (10, 3)}),
        ("sm_100a", {(10, 0)}),
        ("sm_100f", {(10, 0), (10, 3)}),
        ("sm_103f", {(10, 3)}),
        ("sm_120f", {(12, 0), (12, 1)}),
        ("compute_80", {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)}),
        ("compute_120", {(12, 0), (12, 1)}),
        ("compute_90a", {(9, 0)}),
        ("compute_100f", {(10, 0), (10, 3)}),
        ("sm_8", set()),
        ("sm_120x", set()),
    ],
)
def test_what_an_architecture_runs_on(architecture, runs_on):
    capabilities = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3)]
    capabilities += [(12, 0), (12, 1)]
    found = {
        capability
        for capability in capabilities
        if architecture_for(gpus.Gpu("x", 2**30, capability, None, None), [architecture])
    }
    assert found == runs_on


def test_the_newest_kernels_that_run_are_taken():
    assert architecture_for(gpu_named("RTX-4090"), ["sm_75", "sm_80", "sm_86", "sm_90a"]) == 86
    assert architecture_for(gpu_named("RTX-4090"), ["sm_90", "compute_80"]) == 80
    assert architecture_for(gpu_named("RTX-4090"), []) is None


@pytest.mark.parametrize(
    ("name", "torch_version", "cuda_version", "advice"),
    [
        ("V100-16GB", "2.14.1+cu130", "13.0", "; use a CUDA 12.6 build"),
        ("V100-16GB", "2.11.0+cu128", "12.8", "; use a CUDA 12.6 build"),
        ("P100", "2.9.1+cu128", "12.8", "; use a CUDA 12.6 build"),
        ("P100", "2.6.0+own", "12.6", ""),
        ("B200", "2.5.1+cu124", "12.4", "; use a build with CUDA 12.8 or newer"),
        ("RTX-5090", "2.11.0+cu126", "12.6", "; use a build with CUDA 12.8 or newer"),
        ("RTX-5090", "2.9.1+own", "12.8", ""),
        ("T4", "2.14.1+own", "13.0", ""),
    ],
)
def test_the_refusal_names_a_build_that_has_kernels(name, torch_version, cuda_version, advice):
    gpu = gpu_named(name)
    capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
    sentence = f"no kernels for {name} ({capability}) in this build of torch ({torch_version})"
    assert kernels_missing_text(gpu, torch_version, cuda_version) == sentence + advice


def test_the_list_has_nothing_but_names():
    names = names_text().split("\n")
    assert names == list(MARKETING_GIB)
    assert [gpu_named(name).name for name in names] == names


def test_the_smallest_gpu_has_room_for_more_than_a_context():
    assert CONTEXT_BYTES < 512 * 2**20 < min(gpu.memory_bytes for gpu in gpus._GPUS)
