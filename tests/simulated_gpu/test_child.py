"""Programs in the process of a simulated GPU, here without its library: on a build for the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_batchmem.simulated_gpu import child, search

WAIT_SECONDS = 120

TRAIN = """
import os
import sys
from lightning.pytorch import Trainer
from tests.helpers.lawful import Lawful, law
from tests.helpers.fake_device import FakeDevice

print("arguments", sys.argv[1:], "preload", os.environ.get("LD_PRELOAD"), os.environ["OTHER"])
trainer = Trainer({trainer} logger=False, enable_checkpointing=False)
{fit}
print("trained")
"""
FIT = "trainer.fit(Lawful(FakeDevice(available_bytes=2**30), law))"


@pytest.fixture
def run(tmp_path):
    """Run a program as the child of a simulation; returns its process and its result."""

    def run_program(text, kind="script", target="train.py", **request):
        (tmp_path / "train.py").write_text(text)
        result = tmp_path / "result"
        request = {
            "kind": kind,
            "target": target,
            "arguments": ["--epochs", "3"],
            "trainer": {},
            "options": {},
            "gpu": "RTX-4090",
            "devices": None,
            "nodes": None,
            "environment": {"LD_PRELOAD": None, "OTHER": "the user's own"},
            "result": str(result),
            **request,
        }
        (tmp_path / "request").write_text(json.dumps(request))
        root = str(Path(__file__).parents[2])
        process = subprocess.run(
            [sys.executable, child.__file__, str(tmp_path / "request")],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": root, "OTHER": "of the simulation"},
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        found = json.loads(result.read_text()) if result.exists() else None
        return process, found

    return run_program


def program(trainer="", fit=FIT):
    return TRAIN.format(trainer=trainer, fit=fit)


def test_a_training_on_the_cpu_is_refused_and_does_not_run(run):
    process, result = run(program("accelerator='cpu',"))
    refusal = "the Trainer trains on cpu, so no GPU limits its batch size; run the program with"
    assert result == {"error": f'{refusal} accelerator="gpu"'}
    assert process.returncode == 0
    assert "arguments ['--epochs', '3'] preload None the user's own" in process.stdout
    assert "trained" not in process.stdout


@pytest.mark.parametrize(
    ("trainer", "refusal"),
    [
        ("devices=16,", "the Trainer has devices=16 and num_nodes=1, and a node has at most 8"),
        ("fast_dev_run=True,", "the Trainer has fast_dev_run"),
        ("max_epochs=0,", "the Trainer has max_epochs=0, so nothing is trained"),
    ],
)
def test_a_training_that_cannot_be_searched_is_one_sentence(run, trainer, refusal):
    _, result = run(program(trainer))
    assert refusal in result["error"]


def test_an_error_of_the_program_before_fit_is_its_own(run):
    process, result = run(program(fit="raise KeyError('mine')"))
    assert result is None
    assert process.returncode == 1
    assert process.stderr.endswith("KeyError: 'mine'\n")


def test_a_program_without_fit(run):
    _, result = run("print('nothing')")
    assert result == {"error": "train.py ended without a call of Trainer.fit"}


# The fake device says of a weight of the host that it is on a GPU.
PRETRAIN = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
if {on_device}:
    class OnDevice(torch.nn.Parameter):
        is_cuda = True
    weight = OnDevice(weight.data)
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(3):
    weight.grad = torch.ones(2)
    optimizer.step()
    print("stepped")
"""


def test_a_training_on_the_device_without_fit_ends_after_its_first_step(run):
    process, result = run(PRETRAIN.format(on_device=True))
    start = "train.py trains without Trainer.fit, or before it (train.py:11: optimizer.step()), and"
    assert result["error"].startswith(start)
    assert "stepped" not in process.stdout


def test_a_small_training_on_the_host_may_come_before_fit(run):
    process, result = run(PRETRAIN.format(on_device=False))
    assert result == {"error": "train.py ended without a call of Trainer.fit"}
    assert process.stdout.count("stepped") == 3


def test_memory_that_ends_before_fit_has_the_assumptions(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(child.Child, "finish", lambda _, result: found.append(result))
    program = child.Child(
        {"kind": "script", "target": str(tmp_path / "train.py"), "arguments": [], "environment": {}}
    )
    program._values = SimpleNamespace(assumptions=["A shape is assumed."])
    monkeypatch.setattr(child.sys, "argv", [])
    monkeypatch.setattr(child.sys, "path", list(sys.path))
    monkeypatch.setattr(child.sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(child.signal, "signal", lambda *_: None)
    monkeypatch.setattr(child.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: None))
    (tmp_path / "train.py").write_text("""
class OutOfMemoryError(RuntimeError): pass
raise OutOfMemoryError("CUDA out of memory. GPU 0 has")
""")
    program.run()
    text = "Nothing fits: before Trainer.fit, CUDA out of memory. A shape is assumed."
    assert found[0] == {"nothing_fits": text}


def test_a_program_that_leaves(run):
    process, result = run("raise SystemExit(3)")
    assert (process.returncode, result) == (3, None)


def test_a_program_that_reads_what_a_launcher_sets(run, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    process, result = run('import os\nos.environ["LOCAL_RANK"]')
    text = "reads LOCAL_RANK, which a launcher sets for several processes: give --devices"
    assert result == {"error": f"train.py {text} with 2 or more"}
    assert "KeyError" in process.stderr


def test_an_error_inside_fit_is_not_given_to_the_program(run):
    fit = f"""
trainer.__class__ = type("Own", (Trainer,), {{"strategy": property(lambda _: 1 / 0)}})
try:
    {FIT}
except ZeroDivisionError:
    print("caught")
"""
    process, result = run(program(fit=fit))
    assert result == {"error": "train.py ended with ZeroDivisionError: division by zero"}
    assert "ZeroDivisionError: division by zero" in process.stderr
    assert "caught" not in process.stdout


def test_an_error_after_assumptions_names_the_last_one(monkeypatch):
    found = []
    monkeypatch.setattr(child.Child, "finish", lambda _, result: found.append(result))
    monkeypatch.setattr(search, "use_devices", lambda *_: 1 / 0)
    program = child.Child({"target": "train.py"})
    program._values = SimpleNamespace(assumptions=["one", "two"])
    program._checked("use_devices", {}, {})
    text = "train.py ended with ZeroDivisionError: division by zero after this was assumed: two"
    assert found == [{"error": text}]


def test_a_module_and_a_function(run):
    _, result = run(program("accelerator='cpu',"), kind="module", target="train")
    assert "trains on cpu" in result["error"]
    make = "from tests.helpers.loops import *\ndef make():\n    return 3\n"
    _, result = run(make, kind="function", target="train:make")
    refusal = {"error": "make must return a LightningModule, or (module, data), got int"}
    assert result == refusal
    _, result = run(make, kind="memory_test", target="train:make")
    assert result == refusal


def test_a_changed_module_is_loaded_once_and_others_are_left_alone(tmp_path, monkeypatch):
    (tmp_path / "found_by_change.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    changed = []
    finder = child.ChangedModules({"found_by_change": changed.append, "no_such_module": print})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    import found_by_change

    assert changed == [found_by_change]
    assert found_by_change.value == 1
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        __import__("no_such_module")


@pytest.mark.parametrize(("value", "seen"), [("3", "0"), ("", ""), ("-1", "-1")])
def test_another_gpu_of_the_machine_is_the_simulated_one(monkeypatch, value, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    child.show_the_gpu("0")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    ("library", "way"),
    [
        (b"libcusparse.so.12", "Leave this line out, or let it compute on the CPU, to plan"),
        (b"libcudnn.so.9", "With CUDA_STUB_CUDNN=0 torch takes kernels of its own."),
    ],
)
def test_a_function_that_is_not_modelled_is_refused_with_a_way_on(library, way, monkeypatch):
    sentences = []
    one = child.Child({})
    monkeypatch.setattr(one, "refuse", sentences.append)
    one._refuse_function(b"open", library)
    (sentence,) = sentences
    assert f"does not have open of {library.decode()}, which a library (test_child.py:" in sentence
    assert way in sentence
