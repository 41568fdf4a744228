"""The compilation of the stub, with a compiler that only writes the files that it is asked for."""

import ast
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_batchmem.simulated_gpu import build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stub is for Linux")

COMPILER = """#!/bin/sh
case "$1" in
  -print-prog-name=nm) echo "$(dirname "$0")/nm"; exit ;;
  -print-file-name=*) echo libstdc++.a; exit ;;
esac
echo "$@" >> "$(dirname "$0")/log"
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && made=$2
  [ "${1#-I}" != "$1" ] && scratch=${1#-I}
  shift
done
[ -e "$scratch/not_modelled.inc" ] && cp "$scratch/not_modelled.inc" "$(dirname "$0")/inc"
echo compiled > "$made"
"""
SYMBOLS = """#!/bin/sh
case "$*" in
  *cuda_stub.o) echo "0 T cudaMalloc"; echo "0 T _ZN3std" ;;
  *cudnn_stub.o) echo "0 T cudnnCreate" ;;
  *libcudart*) echo "0 T cudaMalloc@@libcudart.so.13"; echo "0 T cudaMalloc_ptsz@@libcudart.so.13"
               echo "0 T cudaNew@@libcudart.so.13"; echo "0 A libcudart.so.13" ;;
  *libcublas.so*) echo "0 T cublasGetVersion"; echo "0 W cublasDraw"; echo "0 D cublasData" ;;
esac
"""
HEADER = """
#define cuDraw cuDraw_v2
#define cuWait __CUDA_API_PTSZ(cuWait)
CUresult CUDAAPI cuDraw(int line);
CUresult CUDAAPI cuWait(void);
"""


CUDNN_HEADER = """
cudnnStatus_t CUDNNWINAPI
cudnnCreate(cudnnHandle_t *handle);
CUDNN_DEPRECATED cudnnStatus_t CUDNNWINAPI
cudnnNormalize(cudnnHandle_t handle, int mode);
cudnnStatus_t CUDNNWINAPI
cudnnDescribe(cudnnTensorDescriptor_t described);
"""


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def packages(tmp_path):
    """A folder of packages with a CUDA build of torch."""
    packages = tmp_path / "packages"
    files = {
        "torch/__init__.py": "raise RuntimeError('torch was imported')",
        "torch/version.py": "from typing import Optional\ncuda: Optional[str] = '13.0'\nhip = None",
        "nvidia/cu13/include/cuda.h": HEADER,
        "nvidia/cu13/include/cuda_runtime_api.h": "",
        **{f"nvidia/cu13/lib/{name}.so.13": "" for name in build.REPLACED},
    }
    for name, text in files.items():
        path = packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return packages


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder with the compiler, which is the first one that is found."""
    programs = tmp_path / "bin"
    programs.mkdir()
    write_program(programs / "g++", COMPILER)
    write_program(programs / "nm", SYMBOLS)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return programs


@pytest.fixture
def cache(tmp_path, monkeypatch, programs):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return tmp_path / "cache" / "lightning-batchmem"


def test_the_library_is_compiled_once_and_only_this_user_can_change_it(
    packages, cache, programs, monkeypatch
):
    before = os.umask(0)
    try:
        folder = build.library_folder(packages)
    finally:
        os.umask(before)
    assert folder.parent == cache
    assert sorted(path.name for path in folder.iterdir()) == sorted([build.LIBRARY, *build.LINKS])
    for path in (cache.parent, cache, folder, folder / build.LIBRARY):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    for link in build.LINKS:
        assert (folder / link).samefile(folder / build.LIBRARY)
    # Without a compiler.
    monkeypatch.setenv("PATH", "")
    assert build.library_folder(packages) == folder
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_the_cache_is_in_the_home_folder_by_default(packages, cache, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = build.library_folder(packages)
    assert folder.parent == tmp_path / "home" / ".cache" / "lightning-batchmem"


def test_the_name_changes_with_everything_that_is_compiled(packages, cache, tmp_path, monkeypatch):
    folders = [build.library_folder(packages)]
    source = tmp_path / "other.cpp"
    source.write_text("int other;")
    include = packages / "nvidia" / "cu13" / "include"

    def change_version():
        monkeypatch.setattr(build, "_package_version", lambda: "9.9.9")

    changes = [
        lambda: monkeypatch.setattr(build, "MODELLED", (source,)),
        lambda: monkeypatch.setattr(build, "NOT_MODELLED", source),
        lambda: (include / "cuda.h").write_text(f"{HEADER}\n"),
        lambda: (include / "cuda_runtime_api.h").write_text("\n"),
        lambda: (packages / "nvidia/cu13/lib/libcublas.so.13").write_text("newer"),
        lambda: (packages / "nvidia/cu13/lib/libcufft.so.14").write_text(""),
        change_version,
        lambda: add_cudnn(packages, 8),
        lambda: add_cudnn(packages, 9),
        lambda: monkeypatch.setattr(build, "OF_CUDNN", source),
    ]
    for change in changes:
        change()
        folders.append(build.library_folder(packages))
    assert len(set(folders)) == len(changes) + 1
    assert folders[-1].name.startswith("9.9.9-")


def test_functions_that_are_not_modelled_are_listed_with_their_library(packages, cache, programs):
    build.library_folder(packages)
    assert (programs / "inc").read_text().splitlines() == [
        "SAME_AS(cudaMalloc_ptsz, cudaMalloc)",
        'NOT_MODELLED("libcudart.so.13", cudaNew)',
        'NOT_MODELLED("libcublas.so.13", cublasDraw)',
        'NOT_MODELLED("libcuda.so.1", cuDraw)',
        'NOT_MODELLED("libcuda.so.1", cuDraw_v2)',
        'NOT_MODELLED("libcuda.so.1", cuWait)',
        'NOT_MODELLED("libcuda.so.1", cuWait_ptsz)',
    ]


def add_cudnn(packages, minor):
    include = packages / "nvidia" / "cudnn" / "include"
    include.mkdir(parents=True, exist_ok=True)
    (include / "cudnn_ops.h").write_text(CUDNN_HEADER)
    version = f"#define CUDNN_MAJOR 9\n#define CUDNN_MINOR {minor}\n"
    (include / "cudnn_version.h").write_text(version)


@pytest.mark.parametrize(("minor", "is_compiled"), [(7, False), (8, True), (24, True)])
def test_cudnn_is_compiled_where_it_plans_without_a_device(
    packages, cache, programs, minor, is_compiled
):
    without = build.library_folder(packages)
    add_cudnn(packages, minor)
    assert (build.library_folder(packages) != without) == is_compiled
    assert (f"{build.OF_CUDNN} -o" in (programs / "log").read_text()) == is_compiled
    # Functions with a handle need a device, if they are not modelled.
    lines = [line for line in (programs / "inc").read_text().splitlines() if "cudnn" in line]
    assert lines == is_compiled * ['NOT_MODELLED("libcudnn.so.9", cudnnNormalize)']


def test_a_version_of_cudnn_that_cannot_be_read_is_left_out(packages, cache):
    without = build.library_folder(packages)
    add_cudnn(packages, 24)
    (packages / "nvidia/cudnn/include/cudnn_version.h").write_text('#include "other.h"\n')
    assert build.library_folder(packages) == without


def test_the_headers_of_cuda_12_are_in_another_package(packages, cache):
    (packages / "torch/version.py").write_text("cuda: Optional[str] = '12.4'\n")
    (packages / "nvidia/cu13").rename(packages / "nvidia/cuda_runtime")
    assert (build.library_folder(packages) / build.LIBRARY).is_file()


@pytest.mark.parametrize(
    ("system", "machine", "named"),
    [
        ("Windows", "AMD64", "Windows on AMD64"),
        ("Darwin", "arm64", "macOS on arm64"),
        ("Darwin", "x86_64", "macOS on x86_64"),
        ("Linux", "aarch64", "Linux on aarch64"),
    ],
)
def test_other_systems_are_refused(system, machine, named, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(ValueError, match=rf"needs Linux on x86-64, and this is {named}\.$"):
        build.library_folder()


def test_an_environment_without_torch_is_refused(packages, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs torch, which .* does not have: pip install torch"):
        build.library_folder()
    with pytest.raises(ValueError, match=f"needs torch, and {tmp_path} does not have it"):
        build.library_folder(tmp_path)


@pytest.mark.parametrize("text", ["cuda: Optional[str] = None\n", "cuda = None\nhip = '6.2.4'\n"])
def test_a_build_of_torch_without_cuda_is_refused(packages, cache, text):
    (packages / "torch/version.py").write_text(text)
    with pytest.raises(ValueError, match=r"built without CUDA: pip install torch from the package"):
        build.library_folder(packages)


@pytest.mark.parametrize("name", ["cuda.h", "cuda_runtime_api.h"])
def test_missing_headers_are_refused(packages, cache, name):
    (packages / "nvidia/cu13/include" / name).unlink()
    with pytest.raises(ValueError, match=rf"headers of CUDA 13, and .*/{name} does not exist"):
        build.library_folder(packages)


@pytest.mark.parametrize("name", build.REPLACED)
def test_missing_libraries_are_refused(packages, cache, name):
    (packages / f"nvidia/cu13/lib/{name}.so.13").unlink()
    with pytest.raises(ValueError, match=f"takes the place of {name}, and .*/nvidia does not have"):
        build.library_folder(packages)


def test_a_missing_compiler_is_refused(packages, cache, programs, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"g\+\+, which is not installed: apt install g\+\+"):
        build.library_folder(packages)


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("note: x\\na.cpp:3: error: no type\\nb.cpp: error: y\\n", "a.cpp:3: error: no type"),
        ("Killed\\n", "Killed"),
        ("ld: no -lx\\ncollect2: error: ld returned 1 exit status\\n", "ld: no -lx"),
        ("", "exit code 1"),
    ],
)
def test_the_first_error_of_the_compiler_is_shown_and_nothing_is_left(
    packages, cache, programs, printed, shown
):
    write_program(programs / "g++", f"#!/bin/sh\nprintf '{printed}' >&2\nexit 1\n")
    with pytest.raises(ValueError, match=rf"^g\+\+ cannot compile the simulated GPU: {shown}$"):
        build.library_folder(packages)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_refused(packages, cache):
    cache.parent.write_text("a file")
    with pytest.raises(ValueError, match=rf"compiled into {cache} \(.*\): name another folder in"):
        build.library_folder(packages)


def test_a_file_system_without_room_for_a_folder_is_refused(packages, cache, monkeypatch):
    def no_room(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "TemporaryDirectory", no_room)
    with pytest.raises(ValueError, match=rf"compiled into {cache} \(No space left on device\)"):
        build.library_folder(packages)


@pytest.mark.parametrize("separator", [":", ";"])
def test_a_folder_that_the_loader_would_cut_is_refused(packages, cache, monkeypatch, separator):
    monkeypatch.setenv("XDG_CACHE_HOME", f"/tmp/a{separator}b")
    with pytest.raises(ValueError, match=f"/tmp/a{separator}b/.* the loader separates folders"):
        build.library_folder(packages)


def test_a_user_without_home_folder_is_refused(packages, cache, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(ValueError, match="has no home folder: name a folder in XDG_CACHE_HOME"):
        build.library_folder(packages)


def test_a_cache_that_is_mounted_with_noexec_is_refused(packages, cache, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(ValueError, match=rf"{cache} cannot be loaded, .* mounted with noexec"):
        build.library_folder(packages)
    assert list(cache.iterdir()) == []


PARTS = {"cache": "", "folder": "{folder}", "library": "{folder}/libcuda_stub.so"}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_what_others_can_write_is_not_loaded(packages, cache, part, mode):
    folder = build.library_folder(packages)
    path = cache / PARTS[part].format(folder=folder.name)
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"from {path}, because other users can write to it"):
        build.library_folder(packages)


@pytest.mark.parametrize("part", PARTS)
def test_what_belongs_to_another_user_is_not_loaded(packages, cache, part, monkeypatch):
    folder = build.library_folder(packages)
    path = cache / PARTS[part].format(folder=folder.name)
    real = Path.stat

    def owned_by_another(self, **options):
        status = real(self, **options)
        changed = list(status)
        changed[stat.ST_UID] = os.geteuid() + 1
        return os.stat_result(changed) if self == path else status

    monkeypatch.setattr(Path, "stat", owned_by_another)
    with pytest.raises(ValueError, match=f"from {path}, because it belongs to another user"):
        build.library_folder(packages)


@pytest.mark.parametrize("name", [build.LIBRARY, *build.LINKS])
def test_a_folder_in_which_a_file_is_missing_is_made_again(packages, cache, name):
    folder = build.library_folder(packages)
    (folder / name).unlink()
    assert build.library_folder(packages) == folder
    assert (folder / name).is_file()
    assert [path.name for path in cache.iterdir()] == [folder.name]


def script(packages, **variables):
    return subprocess.Popen(
        [sys.executable, build.__file__],
        env={**os.environ, "PYTHONPATH": str(packages), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_can_compile_at_once(packages, cache, programs):
    """Each is in the compiler until the other one is, too."""
    wait = """
touch "$(dirname "$0")/started-$PPID"
for i in $(seq 500); do
  [ "$(ls "$(dirname "$0")" | grep -c started)" = 2 ] && break
  sleep 0.02
done
"""
    write_program(programs / "g++", COMPILER.replace("while", f"{wait}while", 1))
    processes = [script(packages), script(packages)]
    printed = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    (folder,) = cache.iterdir()
    assert printed == [(f"{folder}\n", "")] * 2
    assert len(list(programs.glob("started-*"))) == 2
    assert build.library_folder(packages) == folder


def test_the_script_prints_why_it_fails(packages, cache):
    (packages / "torch/version.py").write_text("cuda = None\n")
    process = script(packages)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    assert errors.startswith("The simulated GPU needs a CUDA build of torch")
    assert len(errors.splitlines()) == 1


def test_only_the_standard_library_is_imported():
    tree = ast.parse(Path(build.__file__).read_text())
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "relative"]
        )
    }
    assert names <= sys.stdlib_module_names
