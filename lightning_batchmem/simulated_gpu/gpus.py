"""GPUs that can be simulated: what CUDA reports of them, and which builds of torch run on them."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_batchmem.plan.options import bytes_in

# What a CUDA context takes of the device's memory today, in a process that trains. Public issues
# name about 300 MiB (pytorch/pytorch#107667), 414 MiB on an A100 (QwenLM/Qwen3-VL#881) and 426 MiB
# on an RTX 6000 Ada (unslothai/unsloth-zoo#1053). The largest is taken: a batch size that is too
# large is the worse error.
CONTEXT_BYTES = 426 * 2**20
CONTEXT_SOURCE = "unslothai/unsloth-zoo#1053, RTX 6000 Ada"

# The stub reserves the memory of the device in the addresses of the process, and a process on
# x86-64 Linux has 47 bits of them.
_ADDRESS_SPACE_BYTES = 2**47

# In columns.
_WIDTH = 80

_NOTES = (
    "The GiB are those that CUDA reports, and the least that a source has; ? is not known. Drivers"
    " since CUDA 12.6 report 0.1 to 0.2 GiB less for GeForce cards than older drivers; a source"
    " with an older one says so. SMs and L2 are from the first source unless another is named."
    " owner/name#1 is an issue or pull request on GitHub, gls is thamada/gls (outputs of"
    " deviceQuery), and xla is openxla/xla (xla/backends/gpu/target_config/specs). A size such as"
    " 24GiB is a GPU of that many bytes with capability 8.0."
)

_GIB = 2**30
_MIB = 2**20

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)", re.ASCII)

# PYTORCH_RELEASES_CODE_CC in torch/cuda/__init__.py of torch 2.14.1: builds with CUDA 12.6 have
# kernels for 5.0 to 9.0, and builds with CUDA 13 for 7.5 and above. From torch 2.11 on, builds with
# CUDA 12.8 have none for 7.0 either (pytorch/pytorch#182250). The first builds for 10.0 and 12.0
# have CUDA 12.8.
_OLDEST_CAPABILITY_OF_CUDA_13 = (7, 5)
_LAST_CUDA_OF_OLD_GPUS = (12, 6)
_OLDEST_CAPABILITY_OF_BLACKWELL = (10, 0)
_FIRST_CUDA_OF_BLACKWELL = (12, 8)


@dataclass(frozen=True)
class Gpu:
    """What CUDA reports of a GPU; ``None`` is a value that is not known.

    ``memory_bytes`` is the total of ``cudaMemGetInfo``, which is less than the number in the name.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int | None
    l2_cache_bytes: int | None
    source: str


def _gib(printed: float) -> int:
    """Bytes of a number of GiB that torch has printed, rounded to two decimals."""
    return int(printed * _GIB)


def _mib(printed: int | float) -> int:
    return int(printed * _MIB)


# Drivers report different totals for one GPU; the least that was found is taken. _NOTES explains
# the sources. "gls" is at commit e20f22d0, and "xla" at 4336d12e (h100_sxm at 0774019d, b200 at
# 300ec95a). All sources were read on 2026-11-26.
_GPUS = (
    Gpu("P100", 17066885120, (6, 0), 56, _mib(4), "xla p100.txtpb (SXM2)"),
    Gpu(
        "V100-16GB",
        16928342016,
        (7, 0),
        80,
        _mib(6),
        "gls V100_x8; xla v100.txtpb has 8 MiB more, kchengiva/Shift-GCN#34 has 15.78 GiB",
    ),
    Gpu(
        "V100-32GB",
        _gib(31.74),
        (7, 0),
        80,
        _mib(6),
        "liucongg/ChatGLM-Finetuning#73, haotian-liu/LLaVA#812; SMs and L2 of V100-16GB",
    ),
    Gpu(
        "T4",
        _gib(14.56),
        (7, 5),
        40,
        _mib(4),
        "Zheng-Chong/CatVTON#133; older drivers 14.75 (NVIDIA/DALI#1813, also SMs); L2:"
        " chiemon.github.io",
    ),
    Gpu(
        "RTX-2080-Ti",
        11523260416,
        (7, 5),
        68,
        _mib(5.5),
        "gist jkrauska/d25e9dfc (driver of CUDA 10.1); ispc-lab/TMA#5 has 10.76 GiB",
    ),
    Gpu(
        "RTX-3060",
        12626493440,
        (8, 6),
        28,
        _mib(2.25),
        "lshmouse/ai-playground experimental/cuda_example (12 GB, driver of CUDA 12.1)",
    ),
    Gpu("RTX-3070", 8351318016, (8, 6), 46, _mib(4), "gls RTX3070 (driver of CUDA 12.4)"),
    Gpu(
        "RTX-3080",
        10485956608,
        (8, 6),
        68,
        _mib(5),
        "gls RTX3080 (10 GB, driver of CUDA 12.4); zai-org/CogVideo#34 has 9.78 GiB",
    ),
    Gpu(
        "RTX-3090",
        25286672384,
        (8, 6),
        82,
        _mib(6),
        "Jumperkables/cuda-benchmarking 00_deviceQuery; gls RTX3090 has 23.59,"
        " vllm-project/vllm#16343 has 23.68 GiB",
    ),
    Gpu(
        "RTX-4060-Ti-16GB",
        _gib(15.55),
        (8, 9),
        34,
        _mib(32),
        "boson-ai/higgs-audio#48; gls RTX4060Ti has 15.70 GiB, also SMs and L2",
    ),
    Gpu(
        "RTX-4070",
        _gib(11.62),
        (8, 9),
        46,
        _mib(36),
        "danbev/learning-ai notes/cuda.md (driver of CUDA 12.6)",
    ),
    Gpu(
        "RTX-4080",
        _mib(16049),
        (8, 9),
        76,
        None,
        "brainglobe/brainglobe.github.io cellfinder/troubleshooting/speed-up.md (driver not known)",
    ),
    Gpu(
        "RTX-4090",
        _gib(23.52),
        (8, 9),
        128,
        _mib(72),
        "pytorch/torchchat#1341 (driver 560); gls RTX4090 has 23.64 GiB, also SMs and L2",
    ),
    Gpu(
        "RTX-5090",
        33677180928,
        (12, 0),
        170,
        _mib(96),
        "aikitoria/open-gpu-kernel-modules#1; NVIDIA/nccl#1637 has 3 MiB more",
    ),
    Gpu(
        "A10",
        23595909120,
        (8, 6),
        72,
        _mib(6),
        "gls A10; aalanwyr/face2cuda step2cuda has 13 MiB more",
    ),
    Gpu(
        "A10G",
        _mib(22587),
        (8, 6),
        80,
        _mib(6),
        "TorchCodec's page on CUDA decoding; AUTOMATIC1111/stable-diffusion-webui#1259 has"
        " 22.49 GiB",
    ),
    Gpu("A30", _gib(23.53), (8, 0), None, None, "google/RB-Modulation#5"),
    Gpu("A40", 47608692736, (8, 6), 84, _mib(6), "gls A40x10"),
    Gpu("L4", 23570219008, (8, 9), 58, _mib(48), "gls L4; bottlerocket-kernel-kit#139 has 21.96"),
    Gpu("L40", _gib(44.40), (8, 9), None, None, "QwenLM/Qwen3-VL#2097"),
    Gpu(
        "L40S",
        47576711168,
        (8, 9),
        142,
        _mib(96),
        "alvarobartt/cuda-device-query README; stepfun-ai/Step-Video-T2V#8 has 44.42, gls L40S"
        " 44.52, Wan-Video/Wan2.1#205 44.53 GiB",
    ),
    Gpu("RTX-A4000", _gib(15.61), (8, 6), None, None, "DengKaiCQ/VGGT-Long#6 (driver not known)"),
    Gpu("RTX-A5000", _gib(23.68), (8, 6), None, None, "zai-org/GLM-4#730 (driver 535)"),
    Gpu("RTX-A6000", 47834660864, (8, 6), 84, _mib(6), "gls RTX_A6000_x9 (ECC is on)"),
    Gpu(
        "RTX-A6000-ECC-off",
        _mib(48676),
        (8, 6),
        84,
        _mib(6),
        "pytorch/ao torchao/prototype/hqq/README.md; L2: xla a6000.txtpb",
    ),
    Gpu(
        "RTX-2000-Ada",
        16856776704,
        (8, 9),
        22,
        _mib(24),
        "gls RTX2000Ada (ECC is off, driver of CUDA 12.4)",
    ),
    Gpu(
        "RTX-4000-Ada",
        21125267456,
        (8, 9),
        48,
        _mib(40),
        "gls RTX4000Ada (ECC is off, driver of CUDA 12.4)",
    ),
    Gpu(
        "RTX-6000-Ada",
        _gib(44.43),
        (8, 9),
        142,
        _mib(96),
        "DINGYANB/MTVCrafter#21 (ECC is on); SMs and L2: gls RTX6000Ada_x8",
    ),
    Gpu("RTX-6000-Ada-ECC-off", 51002867712, (8, 9), 142, _mib(96), "gls RTX6000Ada_x8"),
    Gpu(
        "A100-40GB",
        42298834944,
        (8, 0),
        108,
        _mib(40),
        "bottlerocket-os/bottlerocket#3873, xla a100_sxm_40.txtpb; TianheWu/CoSeR#10 has 39.50"
        " GiB, a driver of CUDA 11.0 had 38.61 (ekondis/mixbench#18)",
    ),
    Gpu(
        "A100-80GB",
        _mib(81049),
        (8, 0),
        108,
        _mib(40),
        "ekondis/mixbench#47 (PCIe); gls A100SXMx4 has 79.26, HiDream-ai/VAREdit#6 79.25 GiB",
    ),
    Gpu("H100-PCIe", 84942979072, (9, 0), 114, _mib(50), "xla h100_pcie.txtpb"),
    Gpu(
        "H100",
        84942979072,
        (9, 0),
        132,
        _mib(50),
        "xla h100_sxm.txtpb (SXM); gls H100SXMx8 has 79.20 GiB",
    ),
    Gpu("H100-NVL", 99861594112, (9, 0), 132, _mib(60), "gls H100NVLx2"),
    Gpu("GH200", 101468602368, (9, 0), 132, _mib(60), "gls GH200 (96 GB)"),
    Gpu(
        "H200",
        150021734400,
        (9, 0),
        132,
        _mib(60),
        "gls H200; ai-bot-pro/achatbot skywork_r1v.py has 139.80 GiB",
    ),
    Gpu(
        "B200",
        _gib(178.35),
        (10, 0),
        148,
        _mib(126.5),
        "pytorch/ao#4002; xla b200.txtpb has 178.36 GiB",
    ),
)

# Other names: those that torch reports, and those of renting offers.
_OTHER_NAMES = {
    "P100-16GB": "P100",
    "P100-PCIE-16GB": "P100",
    "P100-SXM2-16GB": "P100",
    "V100-PCIE-16GB": "V100-16GB",
    "V100-SXM2-16GB": "V100-16GB",
    "V100-PCIE-32GB": "V100-32GB",
    "V100-SXM2-32GB": "V100-32GB",
    "RTX-3060-12GB": "RTX-3060",
    "RTX-3080-10GB": "RTX-3080",
    "RTX-6000-Ada-Generation": "RTX-6000-Ada",
    "RTX-4000-Ada-Generation": "RTX-4000-Ada",
    "RTX-2000-Ada-Generation": "RTX-2000-Ada",
    "A100-PCIE-40GB": "A100-40GB",
    "A100-SXM-40GB": "A100-40GB",
    "A100-SXM4-40GB": "A100-40GB",
    "A100-80GB-PCIe": "A100-80GB",
    "A100-PCIE-80GB": "A100-80GB",
    "A100-SXM-80GB": "A100-80GB",
    "A100-SXM4-80GB": "A100-80GB",
    "H100-80GB-HBM3": "H100",
    "H100-SXM": "H100",
    "H100-SXM5": "H100",
    "GH200-480GB": "GH200",
}

# Names of several GPUs, which are refused.
_NAMES_OF_SEVERAL = {
    "A100": ("A100-40GB", "A100-80GB"),
    "V100": ("V100-16GB", "V100-32GB"),
}


def gpu_named(text: str) -> Gpu:
    """The GPU with a name such as ``RTX 4090``, or one of a size such as ``24GiB``."""
    if size_bytes := int(bytes_in(text)):
        return _gpu_of_size(text, size_bytes)
    key = _key(text)
    if key in _GPU_OF_KEY:
        return _GPU_OF_KEY[key]
    for name, choices in _NAMES_OF_SEVERAL.items():
        if key == _key(name):
            raise ValueError(f"{name} is the name of several GPUs: choose {' or '.join(choices)}")
    near = dict.fromkeys(
        _GPU_OF_KEY[near_key].name
        for near_key in difflib.get_close_matches(key, _GPU_OF_KEY, n=6, cutoff=0.7)
    )
    names = f" (near names: {', '.join(list(near)[:3])})" if near else ""
    raise ValueError(
        f"{text!r:.80} is neither a known GPU nor a size such as 24GiB{names}:"
        " see `simulate --list`"
    )


def architecture_for(gpu: Gpu, arch_list: Sequence[str]) -> int | None:
    """The newest of these architectures whose kernels run on the GPU, such as 86; ``None``: none.

    ``torch._C._cuda_getArchFlags().split()`` has them, such as ``sm_90`` and ``compute_120``. An
    entry of another form, such as one of ROCm, runs on no GPU here.
    """
    fitting = [name for name in arch_list if _runs_on(gpu.capability, name)]
    numbers = [int("".join(filter(str.isdigit, name))) for name in fitting]
    return max(numbers, default=None)


def kernels_missing_text(gpu: Gpu, torch_version: str, cuda_version: str) -> str:
    """Why a GPU is refused, and the build of torch to take, if there is one.

    The versions are ``torch.__version__`` and ``torch.version.cuda``, such as ``13.0``.
    """
    major, minor = gpu.capability
    reason = f"no kernels for {gpu.name} ({major}.{minor}) in this build of torch ({torch_version})"
    cuda = tuple(int(part) for part in cuda_version.split("."))
    if gpu.capability < _OLDEST_CAPABILITY_OF_CUDA_13 and cuda > _LAST_CUDA_OF_OLD_GPUS:
        return f"{reason}; use a CUDA 12.6 build"
    if gpu.capability >= _OLDEST_CAPABILITY_OF_BLACKWELL and cuda < _FIRST_CUDA_OF_BLACKWELL:
        return f"{reason}; use a build with CUDA 12.8 or newer"
    return reason


def list_text() -> str:
    """All GPUs with their values and sources, in lines of at most 80 columns."""
    lines = [f"{'GPU':<21}{'GiB':>7}{'capability':>12}{'SMs':>5}{'L2 MiB':>8}"]
    for gpu in _GPUS:
        capability = ".".join(str(part) for part in gpu.capability)
        sms = "?" if gpu.multiprocessors is None else str(gpu.multiprocessors)
        cache = "?" if gpu.l2_cache_bytes is None else f"{gpu.l2_cache_bytes / _MIB:g}"
        gib = f"{gpu.memory_bytes / _GIB:.2f}"
        lines.append(f"{gpu.name:<21}{gib:>7}{capability:>12}{sms:>5}{cache:>8}")
        lines.append(_wrapped(gpu.source, indent="    "))
    lines.append("")
    lines.append(_wrapped(_NOTES))
    return "\n".join(lines)


def _gpu_of_size(text: str, size_bytes: int) -> Gpu:
    if size_bytes <= CONTEXT_BYTES:
        context_mib = CONTEXT_BYTES // _MIB
        raise ValueError(
            f"a GPU of {text.strip()} has no room: a CUDA context alone takes {context_mib} MiB"
        )
    if size_bytes >= _ADDRESS_SPACE_BYTES:
        raise ValueError(f"a GPU of {text.strip():.80} is too large: give less than 128 TiB")
    return Gpu(text.strip(), size_bytes, (8, 0), None, None, "the size that was given")


def _runs_on(capability: tuple[int, int], architecture: str) -> bool:
    """Whether code for an architecture runs on a GPU.

    A binary (``sm_86``) runs on GPUs of its major number and at least its minor number. PTX
    (``compute_86``) is compiled for any GPU of at least its capability. With the suffix ``a`` both
    run on one capability only. With ``f`` both run on the major number of it, like a binary.
    """
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        return False
    kind, major, minor, suffix = match.groups()
    built_for = (int(major), int(minor))
    if suffix == "a":
        return capability == built_for
    if kind == "compute" and suffix != "f":
        return capability >= built_for
    return capability[0] == built_for[0] and capability[1] >= built_for[1]


def _keys(name: str) -> set[str]:
    """The forms of a name in which a user may write it: ``RTX-4090`` is also ``4090``."""
    key = _key(name)
    return {key, key.removeprefix("rtx")}


def _key(text: str) -> str:
    """A name without upper case, separators and brands."""
    return re.sub(r"nvidia|geforce|tesla|[\s_-]", "", text.lower())


def _gpus_by_key() -> dict[str, Gpu]:
    by_name = {gpu.name: gpu for gpu in _GPUS}
    by_name |= {other: by_name[name] for other, name in _OTHER_NAMES.items()}
    return {key: gpu for name, gpu in by_name.items() for key in _keys(name)}


def _wrapped(text: str, *, indent: str = "") -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


_GPU_OF_KEY = _gpus_by_key()
