"""The package under test is what a user installs: a wheel, built from this tree and installed into a folder."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from benchmarks.common import ROOT, environment


def install(folder: Path) -> dict[str, str]:
    """Build the wheel and install it, alone, into ``folder / "package"``.

    Args:
        folder: an empty folder.

    Returns:
        What the head of the results says of it: ``version``, ``wheel`` (file name), ``sha256``, ``commit``, and
        ``package`` (where it is).

    Raises:
        RuntimeError: when pip fails, with what it said, or when the import does not find what was installed.
    """
    package = folder / "package"
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(package), str(wheel))
    told = "import lightning_batchmem as it; print(it.__file__); print(it.__version__)"
    variables = {**environment(), "PYTHONPATH": str(package)}
    output = subprocess.run(
        [sys.executable, "-P", "-c", told], capture_output=True, text=True, check=True, env=variables
    )
    file, version = output.stdout.split()
    if not Path(file).is_relative_to(package):
        raise RuntimeError(f"lightning_batchmem was to come from {package}, and came from {file}")
    changed = _run("git", "-C", str(ROOT), "status", "--porcelain", "--", "lightning_batchmem", "pyproject.toml")
    commit = _run("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    return {
        "version": version,
        "wheel": wheel.name,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "commit": commit + (", with changes that are not committed" if changed else ""),
        "package": str(package),
    }


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout.strip()
