"""Programs of a command line, and what their processes leave behind."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_batchmem.check import MeasuredStep, PhaseMemory
from lightning_batchmem.script import Script
from lightning_batchmem.simulated_gpu import launch
from lightning_batchmem.simulated_gpu.gpus import gpu_named
from lightning_batchmem.simulated_gpu.launch import AS_THE_PROGRAM, FoundWorld, World
from tests.helpers.lawful import SAVED_PLAN

CONTEXT_BYTES = 300 * 2**20


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "train.py").write_text("")
    return tmp_path


def test_a_script_and_a_module(project):
    program = Script.of_command(["train.py", "--epochs", "3"])
    assert program == Script("script", "train.py", ("--epochs", "3"))
    program = Script.of_command(["-m", "train.part", "fit"])
    assert program == Script("module", "train.part", ("fit",))


def test_an_installed_program(project, monkeypatch):
    monkeypatch.setenv("PATH", str(project))
    for name, first_line in (("my-train", f"#!{sys.executable}"), ("other", "#!/bin/sh")):
        (project / name).write_text(f"{first_line}\n")
        (project / name).chmod(0o755)
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    assert Script.of_command(["my-train"]).target == str(project / "my-train")
    with pytest.raises(ValueError, match="other must be a Python script"):
        Script.of_command(["other"])
    for content in (b"#!/bin/sh\n", b"\x7fELF\0\n"):
        Path("own").write_bytes(content)
        with pytest.raises(ValueError, match="own must be a Python script"):
            Script.of_command(["own"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian.py"], "there is no script 'trian.py' in "),
        (["-m", "no_such_module.train"], "there is no module 'no_such_module.train'"),
        (["-m"], "-m must be followed by the name of a module"),
    ],
)
def test_a_program_that_does_not_exist(project, words, message):
    with pytest.raises(ValueError, match=message):
        Script.of_command(words)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a child that does something else, without a library of CUDA."""
    monkeypatch.setattr(launch, "library_folder", lambda: tmp_path)
    monkeypatch.setattr(launch, "_architectures", lambda: ["sm_80", "sm_90"])
    # The loader would complain about a library that does not exist.
    monkeypatch.setattr(launch, "LIBRARY", "")
    commands = []

    def run_child(body, gpu="RTX-4090", world=AS_THE_PROGRAM, **keywords):
        script = tmp_path / "child.py"
        script.write_text(f"import json, os, sys\nrequest = json.load(open(sys.argv[1]))\n{body}")
        started = launch.subprocess.run

        def start(command, **settings):
            commands.append(command)
            return started([command[0], str(script), command[2]], **settings)

        with monkeypatch.context() as patch:
            patch.setattr(launch.subprocess, "run", start)
            program = Script("script", "train.py")
            options = {"multiple_of": 8}
            outcome = launch.run(program, gpu_named(gpu), CONTEXT_BYTES, options, world, **keywords)
        assert Path(commands[-1][1]).name == "child.py"
        # Nothing is left behind.
        assert not Path(commands[-1][2]).parent.exists()
        return outcome

    return run_child


def writing(result):
    return f"open(request['result'], 'w').write({json.dumps(result)!r})"


def test_a_plan_comes_back(run):
    outcome = run(
        writing({"plan": SAVED_PLAN, "assumptions": ["All are assumed."], "multiple_of": 8})
    )
    assert outcome.multiple_of == 8
    assert outcome.assumptions == ("All are assumed.",)
    assert outcome.plan.batch_size == SAVED_PLAN["batch_size"]
    assert not outcome.error


def test_the_memory_of_a_step_comes_back(run):
    memory = MeasuredStep({"forward": PhaseMemory(3, 4)}, {"torch": "2"}, "simulated RTX-4090")
    outcome = run(writing({"memory": asdict(memory), "assumptions": ["All are assumed."]}))
    assert outcome.memory == memory
    assert outcome.assumptions == ("All are assumed.",)
    assert outcome.plan is None
    assert not outcome.error


def test_the_request_and_the_variables(run, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    body = """
names = ("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_STUB_BYTES")
names += ("CUDA_STUB_CAPABILITY", "CUDA_STUB_CONTEXT_MIB")
seen = [{name: os.environ[name] for name in names}, request["environment"], request["options"]]
open(request["result"], "w").write(json.dumps({"nothing_fits": json.dumps(seen)}))
"""
    gpu = gpu_named("RTX-4090")
    variables, environment, options = json.loads(run(body).nothing_fits)
    folder, own = variables.pop("LD_LIBRARY_PATH").split(os.pathsep)
    assert own == "/own"
    assert Path(folder).is_dir()
    assert variables == {
        "OMP_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "0",
        "CUDA_STUB_BYTES": str(gpu.memory_bytes),
        "CUDA_STUB_CAPABILITY": "8.9",
        "CUDA_STUB_CONTEXT_MIB": "300.0",
    }
    assert environment["LD_LIBRARY_PATH"] == "/own"
    assert environment["CUDA_STUB_BYTES"] is None
    assert options == {"multiple_of": 8}


@pytest.mark.parametrize("world", [World(8, 4, 2**20), World(), World(2)])
def test_the_request_has_the_world_that_was_asked_for(run, world):
    body = """
seen = [request[name] for name in ("devices", "nodes", "nccl_bytes")]
open(request["result"], "w").write(json.dumps({"nothing_fits": json.dumps(seen)}))
"""
    outcome = run(body, world=world)
    assert json.loads(outcome.nothing_fits) == [world.devices, world.nodes, world.nccl_bytes]
    assert outcome.asked == world


def test_the_world_that_was_found_comes_back(run):
    found = {"devices": 8, "nodes": 4, "nccl_bytes": 2**20, "gathered_bytes": None}
    outcome = run(writing({"plan": SAVED_PLAN, "world": found}), world=World(8))
    assert outcome.world == FoundWorld(**found, nccl_source="NVIDIA/nccl#964, A100")
    given = run(writing({"plan": SAVED_PLAN, "world": found}), world=World(8, nccl_bytes=2**20))
    assert given.world == FoundWorld(**found, nccl_source="as given")
    assert outcome.devices == "8 x 4"
    alone = run(writing({"plan": SAVED_PLAN, "world": None}))
    assert alone.world is None
    assert alone.devices == "1"


def test_what_a_program_prints_is_shown_at_its_error_only(run, capfd):
    printing = "print('\\n'.join(map(str, range(100))), flush=True)\n"
    printing += "print('on stderr', file=sys.stderr, flush=True)\n"
    run(printing + writing({"plan": SAVED_PLAN}), shows_output=False)
    assert capfd.readouterr() == ("", "")
    run(printing + "sys.exit(3)", shows_output=False)
    output, errors = capfd.readouterr()
    assert output == ""
    # The last lines, of both streams in their order.
    assert errors.splitlines() == [*map(str, range(81, 100)), "on stderr"]
    run(printing + "sys.exit(3)")
    assert capfd.readouterr().out.startswith("0\n1\n")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (writing({"error": "it trains on cpu"}), "it trains on cpu"),
        ("sys.exit(0)", "train.py ended without a call of Trainer.fit"),
        ("sys.exit(3)", "train.py ended with exit code 3 before Trainer.fit"),
        ("os.kill(os.getpid(), 9)", "train.py was ended by SIGKILL"),
        (
            "open(os.environ['CUDA_STUB_REPORT'], 'w').write('cufftPlan is not there\\n')\n"
            "sys.exit(70)",
            "cufftPlan is not there",
        ),
    ],
)
def test_what_a_process_without_a_plan_leaves(run, body, error):
    assert run(body).error == error


def test_a_gpu_without_kernels_is_refused(run):
    with pytest.raises(ValueError, match=r"no kernels for V100-16GB \(7\.0\)"):
        run("", gpu="V100-16GB")
