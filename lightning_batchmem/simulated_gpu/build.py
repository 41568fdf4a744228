"""Compiles the stub of the CUDA runtime into the cache folder of the user.

``python build.py`` prints the folder. It imports the standard library only, so that it can run
before torch is imported.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
MODELLED = tuple(HERE / f"{name}_stub.cpp" for name in ("cuda", "math", "nccl"))
OF_CUDNN = HERE / "cudnn_stub.cpp"
NOT_MODELLED = HERE / "not_modelled.cpp"
EXPORTED = HERE / "exported.map"
OWN_HEADERS = HERE / "include"
LIBRARY = "libcuda_stub.so"
# Torch, Triton and Python's binding to NVML load these names, and some versions of Triton link to
# the second one. They are the same file, so that all of them see one device.
LINKS = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1")
COMPILER_FLAGS = ("-c", "-O1", "-fPIC", "-std=c++17")
LINKER_FLAGS = ("-shared", "-Xlinker", f"--version-script={EXPORTED}", "-ldl", "-lpthread")

# The libraries whose functions the stub takes the place of. Those of libcuda are in cuda.h.
REPLACED = (
    "libcudart", "libcublas", "libcublasLt", "libcufft", "libcurand", "libcusolver", "libcusparse",
    "libnccl",
)  # fmt: skip
# Functions that do not need a device, so that those of the library itself are called.
REAL = re.compile(
    r"cu(blas|blasLt|fft|rand|solver|sparse)Get"
    r"(Version|Property|CudartVersion|StatusName|StatusString|ErrorName|ErrorString)"
    r"|cu(blas|blasLt|sparse)(Logger|SetLogger|GetLogger)\w+"
    r"|p?nccl(GetVersion|GetErrorString|GetLastError|ResetDebugInit\w*|Param\w+)"
)
# The first version of cuDNN that plans for a device which is described to it.
FIRST_CUDNN_WITHOUT_DEVICE = (9, 8)
# As nm has them: functions with a global, a weak or an indirect symbol.
FUNCTION_SYMBOLS = "TWi"
SYSTEMS = {"Darwin": "macOS"}


def library_folder(site_packages: Path | None = None) -> Path:
    """The folder of the compiled stub, which is compiled when it is new.

    Args:
        site_packages: folder that torch is installed in; None: where this Python would find it.

    Returns:
        A folder for ``LD_LIBRARY_PATH``, with ``libcuda_stub.so`` for ``LD_PRELOAD`` and with links
        that have the names of the driver's libraries. ``LD_PRELOAD`` takes the name without the
        folder, in which it would not accept a space.

    Raises:
        ValueError: if it cannot be compiled here, or if another user can change what is compiled.
    """
    _require_linux()
    packages = site_packages or _packages_with_torch()
    headers = _header_folder(packages)
    libraries = _replaced_libraries(packages)
    cudnn = _cudnn_headers(packages)
    cache = _cache_folder()
    folder = cache / _name(headers, cudnn, libraries)
    is_complete = _is_complete(folder)
    if not is_complete:
        _require_compiler()
        _make(cache)
    _check(cache)
    if not is_complete:
        _build(folder, headers, cudnn, libraries)
    _require_own(folder)
    _require_own(folder / LIBRARY)
    return folder


def _require_linux() -> None:
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine != "x86_64":
        raise ValueError(
            "The simulated GPU needs Linux on x86-64, and this is"
            f" {SYSTEMS.get(system, system)} on {machine}."
        )


def _packages_with_torch() -> Path:
    """Find torch without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise ValueError(
            f"The simulated GPU needs torch, which {sys.executable} does not have:"
            " pip install torch from the package index."
        )
    return Path(spec.origin).parents[1]


def _header_folder(site_packages: Path) -> Path:
    """The folder of CUDA's headers, in a package that a CUDA build of torch requires."""
    try:
        text = (site_packages / "torch" / "version.py").read_text()
    except OSError:
        raise ValueError(
            f"The simulated GPU needs torch, and {site_packages} does not have it:"
            " pip install torch from the package index."
        ) from None
    version = re.search(r"^cuda\b.*= *['\"](\d+)\.", text, re.MULTILINE)
    if version is None:
        raise ValueError(
            f"The simulated GPU needs a CUDA build of torch, and the torch in {site_packages} was"
            " built without CUDA: pip install torch from the package index."
        )
    major = int(version[1])
    package = "cuda_runtime" if major == 12 else f"cu{major}"
    headers = site_packages / "nvidia" / package / "include"
    for name in ("cuda.h", "cuda_runtime_api.h"):
        if not (headers / name).is_file():
            raise ValueError(
                f"The simulated GPU needs the headers of CUDA {major}, and {headers / name} does"
                " not exist (torch from conda does not bring it): pip install torch from the"
                " package index."
            )
    return headers


def _cudnn_headers(site_packages: Path) -> Path | None:
    """The folder of cuDNN's headers; ``None`` where its version cannot plan without a device."""
    headers = site_packages / "nvidia" / "cudnn" / "include"
    text = "".join(path.read_text() for path in headers.glob("cudnn_version.h"))
    version = re.findall(r"^#define CUDNN_(?:MAJOR|MINOR) (\d+)$", text, re.MULTILINE)
    return headers if tuple(map(int, version)) >= FIRST_CUDNN_WITHOUT_DEVICE else None


def _replaced_libraries(site_packages: Path) -> list[Path]:
    found = {name: sorted(site_packages.glob(f"nvidia/*/lib/{name}.so.*")) for name in REPLACED}
    for name, libraries in found.items():
        if not libraries:
            raise ValueError(
                f"The simulated GPU takes the place of {name}, and {site_packages / 'nvidia'} does"
                " not have it: pip install torch from the package index."
            )
    return [library for libraries in found.values() for library in libraries]


def _require_compiler() -> None:
    if shutil.which("g++") is None:
        raise ValueError(
            "The simulated GPU is compiled with g++, which is not installed: apt install g++"
            " (Debian, Ubuntu), dnf install gcc-c++ (Fedora, Red Hat), or"
            " conda install -c conda-forge gxx."
        )


def _cache_folder() -> Path:
    """The folder of this package in the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        folder = home.expanduser().absolute() / "lightning-batchmem"
    except RuntimeError:
        raise ValueError(
            "The simulated GPU is compiled into a cache folder, and this user has no home folder:"
            " name a folder in XDG_CACHE_HOME."
        ) from None
    if set(str(folder)) & set(":;"):
        raise ValueError(
            f"Libraries in {folder} cannot be loaded, because the loader separates folders with"
            " colons and semicolons: name another folder in XDG_CACHE_HOME."
        )
    return folder


def _make(folder: Path) -> None:
    try:
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(folder, error) from None


def _check(folder: Path) -> None:
    """Refuse a cache folder that others can write to, or whose libraries cannot be loaded."""
    _require_own(folder)
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise ValueError(
            f"Libraries in {folder} cannot be loaded, because its file system is mounted with"
            " noexec: name another folder in XDG_CACHE_HOME."
        )


def _not_writable(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"The simulated GPU cannot be compiled into {folder} ({error.strerror}):"
        " name another folder in XDG_CACHE_HOME."
    )


def _require_own(path: Path) -> None:
    """Refuse what another user may have written, which would run as this user."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        fault = "it belongs to another user"
    elif status.st_mode & 0o022:
        fault = "other users can write to it"
    else:
        return
    raise ValueError(
        f"No library is loaded from {path}, because {fault}:"
        " remove it, or name another folder in XDG_CACHE_HOME."
    )


def _name(headers: Path, cudnn: Path | None, libraries: list[Path]) -> str:
    """A name that changes with everything that the library is made of."""
    inputs = [Path(__file__), *MODELLED, NOT_MODELLED, EXPORTED, *sorted(OWN_HEADERS.rglob("*.h"))]
    inputs += [headers / "cuda.h", headers / "cuda_runtime_api.h"]
    if cudnn is not None:
        inputs += [OF_CUDNN, *sorted(cudnn.glob("cudnn*.h"))]
    checksum = hashlib.sha256()
    for path in inputs:
        checksum.update(path.read_bytes())
    # Only the names of their functions are read, so that their size tells versions apart.
    for library in libraries:
        checksum.update(f"{library.name} {library.stat().st_size} ".encode())
    return f"{_package_version()}-{checksum.hexdigest()[:16]}"


def _package_version() -> str:
    """The version of the package, whose import could fail where this file runs alone."""
    version: str = run_path(str(HERE.parent / "_version.py"))["__version__"]
    return version


def _is_complete(folder: Path) -> bool:
    """Whether nothing was removed from a folder, as programs that clean caches do."""
    return all((folder / name).is_file() for name in (LIBRARY, *LINKS))


def _build(folder: Path, headers: Path, cudnn: Path | None, libraries: list[Path]) -> None:
    """Compile into a temporary folder, and give it the name when it is complete.

    Another process may build the same at the same time. The first one of them gives it the name.
    """
    try:
        with TemporaryDirectory(dir=folder.parent, prefix="unfinished-") as temporary:
            made = Path(temporary) / folder.name
            made.mkdir(mode=0o700)
            _compile(made / LIBRARY, headers, cudnn, libraries, Path(temporary))
            for link in LINKS:
                (made / link).symlink_to(LIBRARY)
            _rename(made, folder)
    except OSError as error:
        raise _not_writable(folder.parent, error) from None


def _compile(
    made: Path, headers: Path, cudnn: Path | None, libraries: list[Path], scratch: Path
) -> None:
    """Compile the functions that are modelled, then one for each other function of a library."""
    folders = [OWN_HEADERS, headers, scratch]
    sources = [*MODELLED]
    functions = {library.name: _functions(library) for library in libraries}
    functions["libcuda.so.1"] = _driver_functions((headers / "cuda.h").read_text())
    if cudnn is not None:
        folders = [cudnn, *folders]
        sources.append(OF_CUDNN)
        functions["libcudnn.so.9"] = _handle_functions(cudnn)
    includes = [f"-I{folder}" for folder in folders]
    objects = [_compiled(source, includes, scratch) for source in sources]
    modelled = set().union(*map(_functions, objects))
    lines = _lines_for_others(functions, modelled)
    (scratch / "not_modelled.inc").write_text("".join(f"{line}\n" for line in lines))
    objects.append(_compiled(NOT_MODELLED, includes, scratch))
    _run("g++", *objects, *_static_flags(), *LINKER_FLAGS, "-o", made)
    # The umask of the user may allow more.
    made.chmod(0o700)


def _compiled(source: Path, includes: list[str], scratch: Path) -> Path:
    """The object file of a source."""
    made = scratch / f"{source.stem}.o"
    _run("g++", *COMPILER_FLAGS, *includes, source, "-o", made)
    return made


def _functions(path: Path) -> set[str]:
    """Names of the functions of a library or an object file, without those of C++."""
    # The name of the program that belongs to g++. nm is a part of the tools that g++ requires.
    program = _run("g++", "-print-prog-name=nm").strip()
    dynamic = ["-D"] if path.suffix != ".o" else []
    rows = [line.split() for line in _run(program, *dynamic, "--defined-only", path).splitlines()]
    names = {row[2].split("@")[0] for row in rows if len(row) == 3 and row[1] in FUNCTION_SYMBOLS}
    return {name for name in names if not name.startswith(("_Z", "_init", "_fini"))}


def _driver_functions(header: str) -> set[str]:
    """Names of the functions that cuda.h declares, in all their versions."""
    declared = set(re.findall(r"\bCUresult CUDAAPI (cu\w+)\(", header))
    versions = set(re.findall(r"^#define cu\w+ +(cu\w+)$", header, re.MULTILINE))
    renamed = r"^#define cu\w+ +__CUDA_API_(PTDS|PTSZ)\((cu\w+)\)"
    of_threads = {
        f"{name}_{suffix.lower()}" for suffix, name in re.findall(renamed, header, re.MULTILINE)
    }
    return declared | versions | {name[:-5] for name in of_threads} | of_threads


def _handle_functions(headers: Path) -> set[str]:
    """Names of the functions of cuDNN that take a handle, which need a device.

    The others are those of cuDNN itself.
    """
    declared = r"CUDNNWINAPI\s+(cudnn\w+)\(\s*cudnnHandle_t\b"
    return {
        name
        for header in sorted(headers.glob("cudnn*.h"))
        for name in re.findall(declared, header.read_text())
    }


def _lines_for_others(functions: dict[str, set[str]], modelled: set[str]) -> list[str]:
    """A line of ``not_modelled.inc`` for each function that is not modelled."""
    lines: dict[str, str] = {}
    for library, names in functions.items():
        for name in sorted(names - modelled):
            base = re.sub("_(ptds|ptsz)$", "", name)
            if base in modelled:
                lines.setdefault(name, f"SAME_AS({name}, {base})")
            elif not REAL.fullmatch(name):
                lines.setdefault(name, f'NOT_MODELLED("{library}", {name})')
    return list(lines.values())


def _static_flags() -> list[str]:
    """Flags that take the C++ library into the stub, where the compiler has its static form.

    The stub is loaded first. If it loaded the system's C++ library, then an environment of conda
    could not load its own, newer one.
    """
    printed = _run("g++", "-print-file-name=libstdc++.a")
    has_static_form = Path(printed.strip()).is_absolute()
    if not has_static_form:
        return []
    return ["-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL"]


def _run(*command: str | Path) -> str:
    ran = subprocess.run(  # noqa: S603
        command,
        capture_output=True,
        text=True,
        # Errors are looked for in English.
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    if ran.returncode != 0:
        lines = ran.stderr.splitlines() or [f"exit code {ran.returncode}"]
        # A line of the linker has no such word, and that of collect2 has no reason.
        errors = [line for line in lines if "error" in line and "collect2" not in line]
        raise ValueError(
            f"{command[0]} cannot compile the simulated GPU: {(errors or lines)[0].strip()}"
        )
    return ran.stdout


def _rename(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if _is_complete(folder):
            return
        shutil.rmtree(folder)
        made.rename(folder)


def main() -> int:
    """Print the folder, or on the other stream why there is none."""
    try:
        folder = library_folder()
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
