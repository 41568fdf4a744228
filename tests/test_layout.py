"""The rules about who may import what, and who may touch Lightning's private attributes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_batchmem

PACKAGE = Path(lightning_batchmem.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
CALLBACKS = {"lightning_batchmem.batch_finder", "lightning_batchmem.memory_profiler"}
PURE = ("records", "plan", "fit", "search", "decide", "limits", "effective", "expected", "floors", "alarms")


def imports_of(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports, at its top or inside its functions."""
    package = ["lightning_batchmem", *path.relative_to(PACKAGE).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_the_standard_library_and_each_other(name: str) -> None:
    allowed = {"lightning_batchmem", *(f"lightning_batchmem.{pure}" for pure in PURE)}
    for imported in imports_of(PACKAGE / f"{name}.py"):
        top = imported.split(".")[0]
        of_ours = any(imported == one or imported.startswith(f"{one}.") for one in allowed - {"lightning_batchmem"})
        assert top in sys.stdlib_module_names or of_ours, imported


def test_nothing_imports_the_callbacks_except_the_package_itself() -> None:
    for path in FILES:
        if path != PACKAGE / "__init__.py":
            assert not imports_of(path) & CALLBACKS, path


def test_lightnings_private_attributes_are_touched_in_one_folder_only() -> None:
    found = []
    for path in FILES:
        if "_lightning" in path.parts:
            continue
        for imported in imports_of(path):
            if imported.startswith("lightning.") and any(part.startswith("_") for part in imported.split(".")):
                found.append(f"{path.name}: {imported}")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            owner = ast.unparse(node.value)
            if any(word in owner for word in ("trainer", "strategy", "module", "loop", "connector", "datamodule")):
                found.append(f"{path.name}:{node.lineno}: {owner}.{node.attr}")
    assert not found


HEAVY = {"matplotlib", "tensorboard", "pynvml", "sklearn", "pandas"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_heavy_is_imported_at_the_top_of_a_file(path: Path) -> None:
    """Lightning may have loaded such a package already, which the test in a process below cannot see."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            assert not HEAVY & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in HEAVY


def test_importing_the_package_brings_in_nothing_heavy() -> None:
    program = """
import sys
import lightning.pytorch  # may bring in what it likes
before = set(sys.modules)
import lightning_batchmem
import torch
brought = {name.split(".")[0] for name in set(sys.modules) - before}
assert not brought & {"matplotlib", "tensorboard", "pynvml", "sklearn", "pandas"}, brought
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_public_names_are_sorted_and_documented() -> None:
    assert lightning_batchmem.__all__ == sorted(lightning_batchmem.__all__)
    for name in lightning_batchmem.__all__:
        assert getattr(lightning_batchmem, name).__doc__, name
