"""Rules of the layout: imports, sizes, and who touches Lightning's private attributes."""

import ast
import io
import subprocess
import sys
import tokenize
from graphlib import TopologicalSorter
from pathlib import Path

import lightning_batchmem

PACKAGE = Path(lightning_batchmem.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"matplotlib", "tensorboard", "pynvml", "sklearn", "pandas"}

# A file imports its own folder and folders of a lower number only.
LEVELS = {
    "_version": 0,
    # It imports a module once a name of it is used.
    "__init__": 1,
    "plan": 0,
    "devices": 1,
    "state": 2,
    "batches": 3,
    "search": 4,
    "_lightning": 5,
    "loop": 5,
    "profile": 6,
    "memory_profiler": 7,
    "batch_finder": 7,
    "callback_adder": 7,
    "find": 8,
    "pytorch_lightning": 8,
    "factory": 9,
    "script": 10,
    "comparison": 9,
    "check": 11,
    "simulated_gpu": 12,
    "__main__": 13,
}


def module_name(path):
    return ".".join(
        ["lightning_batchmem", *path.relative_to(PACKAGE).with_suffix("").parts]
    ).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


def room(module):
    return [*module.split("."), "__init__"][1]


def imports_of(path, tree=None, *, skips_types=False):
    """Absolute names of the modules that a file, or a part of it, imports anywhere."""
    package = ["lightning_batchmem", *path.relative_to(PACKAGE).parts[:-1]]
    names = set()
    tree = tree or ast.parse(path.read_text())
    typed = [node for node in tree.body if isinstance(node, ast.If)]
    only_for_types = {id(node) for block in typed for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in only_for_types and skips_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            inside = {f"{module}.{alias.name}" for alias in node.names}
            names |= inside & MODULES.keys() if inside & MODULES.keys() else {module}
    return names


GRAPH = {
    module: {name for name in imports_of(path, skips_types=True) if name in MODULES}
    for module, path in MODULES.items()
}


def test_every_import_goes_down():
    wrong = [
        f"{module} imports {imported}"
        for module, imports in GRAPH.items()
        for imported in imports
        if room(module) != room(imported) and LEVELS[room(module)] <= LEVELS[room(imported)]
    ]
    assert not wrong
    # Raises CycleError where a file imports itself through others.
    list(TopologicalSorter(GRAPH).static_order())


def test_plan_imports_only_the_standard_library_rich_matplotlib_and_itself():
    paths = [path for module, path in MODULES.items() if room(module) == "plan"]
    assert paths
    for path in paths:
        for imported in imports_of(path):
            known = {*sys.stdlib_module_names, "rich", "matplotlib"}
            # _typeshed is imported for types only.
            assert imported.split(".")[0] in known | {"_typeshed"} or room(imported) == "plan", (
                f"{path}: {imported}"
            )


def count_statements(path):
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(path.read_text())))


def count_tokens(path):
    """Names, operators and numbers: comments, docstrings and layout are free."""
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return sum(token.type in kinds for token in tokens)


def test_sizes():
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "_version.py"}
    assert len(modules) <= 10, modules
    assert len(list(PACKAGE.glob("*/__init__.py"))) <= 9
    assert [str(path) for path in FILES if count_statements(path) > 230] == []
    # What belongs to the simulated GPU is apart: nobody needs it to read a search.
    simulated = [path for path in FILES if "simulated_gpu" in path.parts]
    assert sum(map(count_tokens, simulated)) <= 20_185
    assert sum(map(count_tokens, FILES)) - sum(map(count_tokens, simulated)) <= 107_705


# A reader keeps about ten fields in mind.
MOST_FIELDS = 12


def fields_of(kind):
    """Names that a class declares, or that its methods assign to ``self``."""
    declared = {
        node.target.id
        for node in kind.body
        if isinstance(node, ast.AnnAssign)
        if isinstance(node.target, ast.Name) and "ClassVar" not in ast.unparse(node.annotation)
    }
    assigned = {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if ast.unparse(node.value) == "self"
    }
    return declared | assigned


def test_records_have_about_ten_fields_or_are_made_of_parts():
    too_large = {
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and len(fields_of(node)) > MOST_FIELDS
    }
    assert not too_large


# Nobody assigns to an attribute of another object of the package. `_lightning/` assigns to those of
# Lightning, and these files to those of torch, numpy, Lightning and Python.
ASSIGNED = {
    "batches/loader_size.py": {"kind.fetch"},
    "batches/byte_counts.py": {"pickler.dispatch_table"},
    "comparison.py": {"torch.backends.cudnn.benchmark"},
    "devices/out_of_memory.py": {"error.__traceback__"},
    "find.py": {"strategy.model", "strategy.optimizers", "strategy.lr_scheduler_configs"},
    "simulated_gpu/child.py": {
        "sys.argv",
        "kind.__init__",
        "kind.fit",
        "loader.exec_module",
        "torch.backends.cudnn.enabled",
        "torch._C._set_cudnn_enabled",
        "type(torch.backends.cudnn).enabled",
        "layer.flatten_parameters",
    },
    "state/saved_storages.py": {"leaf.grad", "leaf.data", "self.tensor.grad"},
    # Users assign the policy too. The limit of the saved bytes is of a process that ends then.
    "check.py": {"finder.policy"},
    "simulated_gpu/search.py": {
        "trainer.callbacks",
        "finder.policy",
        "SavedStorages.largest_bytes",
        "torch.autograd.backward",
    },
    "simulated_gpu/ranks.py": {"nccl_bytes.restype"},
    "simulated_gpu/one_rank.py": {"c10d.ProcessGroup.monitored_barrier"},
    # A second way to make an object.
    "batch_finder.py": {"finder._is_optional"},
    "memory_profiler.py": {"profiler._options"},
    "plan/figures.py": {"figure._repr_png_"},
}


def test_nobody_assigns_to_the_attributes_of_another_object():
    found = {}
    for path in FILES:
        names = {
            ast.unparse(node)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
            if ast.unparse(node.value) not in ("self", "cls")
        }
        if names and "_lightning" not in path.parts:
            found[str(path.relative_to(PACKAGE))] = names
    assert found == ASSIGNED


def test_lightnings_private_attributes_are_touched_in_one_folder_only():
    found = []
    for path in FILES:
        if "_lightning" in path.parts:
            continue
        for imported in imports_of(path):
            if imported.startswith("lightning.") and any(
                part.startswith("_") for part in imported.split(".")
            ):
                found.append(f"{path.name}: {imported}")
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                not isinstance(node, ast.Attribute)
                or not node.attr.startswith("_")
                or node.attr.startswith("__")
            ):
                continue
            owner = ast.unparse(node.value)
            if any(
                word in owner
                for word in ("trainer", "strategy", "module", "loop", "connector", "datamodule")
            ):
                found.append(f"{path.name}:{node.lineno}: {owner}.{node.attr}")
    assert not found


def private_names_in_strings(path):
    """Private names of Lightning in the strings from which ``lightning_name`` imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lightning_name":
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from (text for text in texts if any(p[:1] == "_" for p in text.split(".")))


def test_no_private_name_of_lightning_hides_in_a_string():
    outside = [path for path in FILES if "_lightning" not in path.parts]
    assert [(path.name, name) for path in outside for name in private_names_in_strings(path)] == []


def test_the_search_imports_no_lightning():
    for module, path in MODULES.items():
        if room(module) in ("search", "state"):
            for imported in imports_of(path):
                assert imported.split(".")[0] not in ("lightning", "pytorch_lightning"), path
                assert room(imported) != "_lightning", path


def test_nothing_heavy_is_imported_at_the_top_of_a_file():
    """Lightning may have loaded such a package, which the test in a process below cannot see."""
    for path in FILES:
        top = [
            node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not HEAVY & {name.split(".")[0] for name in imports_of(path, ast.Module(top, []))}, (
            path
        )


def test_importing_the_package_loads_nothing_heavy_and_starts_no_cuda_context():
    program = f"""
import sys
import lightning.pytorch  # may load what it likes
before = set(sys.modules)
import lightning_batchmem
import torch
loaded = {{name.split(".")[0] for name in set(sys.modules) - before}}
assert not loaded & {HEAVY}, loaded
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_public_names_are_sorted_and_documented():
    assert lightning_batchmem.__all__ == sorted(lightning_batchmem.__all__)
    assert set(lightning_batchmem.__all__) <= set(dir(lightning_batchmem))
    for name in lightning_batchmem.__all__:
        assert getattr(lightning_batchmem, name).__doc__, name
