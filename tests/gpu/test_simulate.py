"""``simulate``, ``find --gpu`` and ``check --gpu`` with a CUDA build of torch.

The commands run outside of the stub that the other tests of this folder run on.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_batchmem import Plan
from tests.helpers.cuda_stub import is_setting, needs_stub
from tests.helpers.simulated_training import one_more_block

ROOT = Path(__file__).parents[2]
SCRIPT = "tests/helpers/simulated_training.py"
MATH = "tests/helpers/simulated_math.py"
MODULE = "tests.helpers.simulated_training"
WAIT_SECONDS = 280

# A command of the pages, and the end of what it prints.
EXAMPLE = re.compile(
    r"^```text\n\$ python -m lightning_batchmem (.*)\n((?s:.*?))^```$", re.MULTILINE
)
PAGES = "".join((ROOT / "docs" / name).read_text() for name in ("any-gpu.md", "how-many-gpus.md"))
# A long command goes on in the next line.
EXAMPLES = EXAMPLE.findall(PAGES.replace("\\\n", ""))
README_EXAMPLES = EXAMPLE.findall((ROOT / "README.md").read_text())

# The sizes that this version of the package finds with torch 2.14.1.
SIZES = {"gpt": {"8GiB": 62, "24GiB": 200}, "unet": {"8GiB": 1264, "24GiB": 3936}}


def run(*words, prefix=()):
    """Run the command line as a user would; returns the process."""
    deepspeed = find_spec("deepspeed")
    paths = [ROOT, *([] if deepspeed is None else [Path(deepspeed.origin).parents[1]])]
    own = {
        name: value
        for name, value in os.environ.items()
        if not is_setting(name) and name not in ("LD_PRELOAD", "LD_LIBRARY_PATH")
    }
    return subprocess.run(
        [*prefix, sys.executable, "-m", "lightning_batchmem", *words],
        cwd=ROOT,
        env={**own, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )


def plan_of(tmp_path, *words):
    """The plan of a command, and its process."""
    process = run(words[0], "--out", str(tmp_path / "plan.json"), *words[1:])
    assert process.returncode == 0, process.stderr
    return Plan.from_json((tmp_path / "plan.json").read_text()), process


@needs_stub
@pytest.mark.parametrize("network", SIZES)
def test_memory_limits_the_sizes_on_two_gpus(network, tmp_path):
    out = tmp_path / "plans.json"
    process = run("simulate", "8GiB,24GiB", "--out", str(out), SCRIPT, network)
    assert process.returncode == 0, process.stderr
    plans = [Plan.from_json(json.dumps(plan)) for plan in json.loads(out.read_text())]
    assert {plan.device.split()[-1]: plan.batch_size for plan in plans} == SIZES[network]
    assert [plan.limited_by for plan in plans] == ["memory", "memory"]
    assert [(plan.simulated, plan.verified) for plan in plans] == 2 * [(True, False)]
    assert [plan.project_batch_size for plan in plans] == [4, 4]
    lines = process.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    # Nothing that Lightning prints is between the rows.
    assert [line.partition(" ")[0] for line in lines[:5]] == ["|", lines[1], "|", "|", ""]
    assert process.stderr == ""


# Its first training is that of the first layers.
TWO_FITS = """
from lightning.pytorch import Trainer
from tests.helpers.simulated_training import TRAINER, make

trainer = Trainer(**TRAINER)
trainer.fit(make())
trainer.fit(make())
"""


@needs_stub
def test_a_second_fit_is_named(tmp_path):
    (tmp_path / "train.py").write_text(TWO_FITS)
    options = ("--max_batch_size", "2")
    plan, _ = plan_of(tmp_path, "simulate", "8GiB", *options, str(tmp_path / "train.py"))
    note = "Only the first Trainer.fit is searched: line 7 of train.py calls fit too."
    assert [one.text for one in plan.notes if "first Trainer" in one.text] == [note]


@needs_stub
def test_the_script_does_not_go_on_and_lightning_writes_nothing(tmp_path):
    files = {path for path in ROOT.rglob("*") if "__pycache__" not in path.parts}
    plan, process = plan_of(tmp_path, "simulate", "RTX-4090", SCRIPT, "gpt", "loggers")
    assert {path for path in ROOT.rglob("*") if "__pycache__" not in path.parts} == files
    assert "variables in a program: []" in process.stdout
    assert "the script went on" not in process.stdout
    assert plan.device == "simulated RTX-4090"
    assert all(trial.step_seconds is None for trial in plan.trials)
    # The parent prints last.
    last = process.stdout.splitlines()[-1]
    assert last == "  next      search again on the GPU itself; nothing here ran on one"


@needs_stub
def test_a_function_with_find(tmp_path):
    command = ["find", f"{MODULE}:make", "--gpu", "8GiB"]
    plan, _ = plan_of(tmp_path, *command, "--trainer.accelerator=gpu")
    assert plan.batch_size == SIZES["gpt"]["8GiB"]


@needs_stub
@pytest.mark.parametrize(("command", "printed"), EXAMPLES)
def test_the_pages_have_what_their_commands_print(command, printed):
    process = run(*shlex.split(command))
    assert process.returncode == 0, process.stderr
    assert printed in process.stdout


@needs_stub
@pytest.mark.parametrize(("command", "table"), README_EXAMPLES)
def test_the_readme_has_the_table_that_its_command_prints(command, table):
    process = run(*shlex.split(command))
    assert process.returncode == 0, process.stderr
    assert table in process.stdout


def check(reference, name="make", gpu="8GiB", **options):
    """Run the memory test on a simulated GPU; returns the process."""
    words = [f"--{option}={value}" for option, value in options.items()]
    return run("check", f"{MODULE}:{name}", "--gpu", gpu, f"--reference={reference}", *words)


@needs_stub
def test_a_step_has_the_same_memory_in_two_processes_and_a_deeper_network_more(tmp_path):
    path = tmp_path / "memory.json"
    written = check(path, update="true")
    assert written.returncode == 0, written.stderr
    same = check(path, tolerance=0)
    assert same.returncode == 0, same.stderr
    where = "memory of a step on a simulated 8GiB; nothing here ran on a GPU"
    assert same.stdout.splitlines()[-2:] == [where, f"equal to {path} within 0 %"]
    deeper = check(path, "make_deeper")
    assert deeper.returncode == 1, deeper.stderr
    lines = deeper.stdout.splitlines()
    grown = lines[lines.index(where) + 1 :]
    assert grown[0].startswith("forward, a sample: ")
    before, after = re.match(
        r"optimizer step, fixed part: (\S+) -> (\S+) bytes", grown[-1]
    ).groups()
    more_bytes = int(after.replace(",", "")) - int(before.replace(",", ""))
    # Weights, gradients and two states of AdamW, whose step makes roots of the second.
    weights = sum(parameter.nbytes for parameter in one_more_block().parameters())
    assert more_bytes == pytest.approx(5 * weights, rel=0.01)


@needs_stub
def test_a_step_that_fits_nowhere_has_not_grown(tmp_path):
    process = check(tmp_path / "memory.json", gpu="700MiB", update="true")
    assert process.returncode == 2
    *_, error = process.stderr.splitlines()
    assert error.startswith("error: simulated 700MiB: Nothing fits")
    assert not (tmp_path / "memory.json").exists()


@needs_stub
def test_ddp_on_one_device_has_its_buckets(tmp_path):
    words = ("simulate", "8GiB", "--max_batch_size", "4", SCRIPT, "gpt")
    alone, _ = plan_of(tmp_path, *words)
    with_buckets, _ = plan_of(tmp_path, *words, "ddp")
    parameters = next(iter(alone.parameters.split()))
    bucket_bytes = 4 * int(parameters.replace(",", ""))
    more_bytes = with_buckets.measured_peak_bytes - alone.measured_peak_bytes
    # Gradients are views of the buckets, which DDP makes before the first step.
    assert 0 <= more_bytes <= 1.05 * bucket_bytes
    assert with_buckets.memory.lines["forward"].intercept > alone.memory.lines["forward"].intercept


@needs_stub
def test_spectrograms_have_a_plan_that_names_its_work_area(tmp_path):
    plan, _ = plan_of(tmp_path, "simulate", "2GiB", MATH, "sound")
    assert plan.limited_by == "dataset"
    (note,) = [note for note in plan.notes if "cuFFT" in note.text]
    assert note.text.startswith("The work area of cuFFT is assumed to be a copy")
    assert "(simulated_math.py:" in note.text
    assert "torch.stft(" in note.text
    # Spectra of a second: 201 complex numbers for each of 101 windows, and the signal, which is
    # padded. That of torch.fft has a factor above 127: twice 32,768 complex numbers.
    spectra_bytes = 8 * 201 * 101
    assert plan.memory.lines["forward"].slope > 3 * spectra_bytes


@needs_stub
def test_linear_algebra_has_a_plan(tmp_path):
    plan, _ = plan_of(tmp_path, "simulate", "8GiB", MATH, "poses")
    assert plan.limited_by == "dataset"
    (note,) = [note for note in plan.notes if "cuSOLVER" in note.text]
    assert note.text.startswith("The work area of cuSOLVER is assumed to be")
    # What torch reads inside of its functions is not assumed to depend on the model.
    assert not [note for note in plan.notes if "not computed" in note.text]


@needs_stub
def test_what_is_not_modelled_ends_with_the_line_of_the_project():
    process = run("simulate", "8GiB", MATH, "graph")
    assert process.returncode == 2
    *_, error = process.stderr.splitlines()
    assert re.fullmatch(
        r"error: simulated 8GiB: The simulated GPU does not have cusparseSpGEMM\w+ of"
        r" libcusparse\.so\.\d+, which aten::mm \(simulated_math\.py:\d+: .*eye @ eye.*\) calls\."
        r" Leave this line out, or let it compute on the CPU, to plan the rest\.",
        error,
    )


@needs_stub
def test_a_host_that_refuses_address_space_is_no_full_device():
    limit = ["bash", "-c", 'ulimit -v 30000000; exec "$@"', "bash"]
    process = run("simulate", "80GiB", SCRIPT, "mlp", prefix=limit)
    assert process.returncode == 2
    *_, error = process.stderr.splitlines()
    assert "address space" in error


@needs_stub
def test_a_compiled_network_has_memory_of_its_own(tmp_path):
    words = ("simulate", "8GiB", "--max_batch_size", "2048", SCRIPT, "mlp")
    eager, _ = plan_of(tmp_path, *words)
    compiled, _ = plan_of(tmp_path, *words, "compiled")
    # The compiler chooses how much, so only a difference shows that it was at work.
    assert eager.memory.lines["forward"] != compiled.memory.lines["forward"]
