"""The stub of the CUDA runtime in tests: new processes with other settings of the device.

The stub and the allocator read their settings once in a process, so a test that needs other ones
runs a case of a script in a new process. Such a script is a file beside this one: its cases are
functions that return a dictionary, and it calls :func:`print_case`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from benchmarks.processes import end_with_children
from tests.helpers.lawful import MIB, quiet_trainer

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 280
"""Less than the timeout of a test."""


def is_cuda_stub() -> bool:
    """Whether this process runs on the stub."""
    # Only Linux has the stub, and on Windows this function of ctypes needs a name.
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "cuda_stub_resize")


def is_setting(name: str) -> bool:
    """Whether an environment variable is a setting of the stub or of the allocator."""
    return name.startswith("CUDA_STUB_") or name in (
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
    )


def has_own_settings() -> bool:
    """Whether this process has another allocator or another kind of device than by default."""
    capability = os.environ.get("CUDA_STUB_CAPABILITY", "8.0")
    others = any(is_setting(name) for name in os.environ if not name.startswith("CUDA_STUB_"))
    return others or float(capability) != 8


# A test that makes processes with settings of its own would repeat itself where tests/gpu runs
# with several settings.
needs_stub = pytest.mark.skipif(
    not is_cuda_stub() or has_own_settings(),
    reason="runs on the CUDA stub, once, where capability and allocator are the default",
)


def on_stub(script: str, case: str, *arguments: str, **settings: str) -> dict[str, Any]:
    """Run a case of ``tests/helpers/<script>.py`` in a new process on the stub.

    Args:
        script: name of the file.
        case: name of a function in it.
        arguments: its arguments.
        settings: environment variables of the process; all other settings are the default.

    Returns:
        What the case returned.

    Raises:
        RuntimeError: if the process ended with an error.
    """
    printed = output_on_stub(f"tests.helpers.{script}", case, *arguments, **settings)
    # Libraries may print lines before it.
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def output_on_stub(module: str, *arguments: str, **settings: str) -> str:
    """Run ``python -m module`` in a new process on the stub, and return what it prints.

    No process that it started is left afterwards.

    Args:
        module: module with a command line.
        arguments: its arguments.
        settings: environment variables of the process; all other settings are the default.

    Raises:
        RuntimeError: if the process ended with an error.
        subprocess.TimeoutExpired: if it has not ended after ``WAIT_SECONDS``.
    """
    launcher = ROOT / "tests" / "cuda_stub" / "run"
    inherited = {name: value for name, value in os.environ.items() if not is_setting(name)}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**inherited, "PYTHONPATH": os.pathsep.join(paths), **settings}
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [str(launcher), sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=variables,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = process.wait(WAIT_SECONDS)
        finally:
            end_with_children(process)
        output.seek(0)
        errors.seek(0)
        if code != 0:
            raise RuntimeError(f"{module} {arguments} ended with {code}:\n{errors.read()}")
        return output.read()


def require(condition: bool, found: object) -> None:
    """Raise an error where a test that is expected to fail would fail for another reason.

    It is no AssertionError, which such a test would accept.
    """
    if not condition:
        raise RuntimeError(f"the test measured something else: {found}")


def print_case(cases: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Run the case that the command line names, and print what it returns as the last line."""
    warnings.filterwarnings("ignore")
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    seed_everything(0, verbose=False)
    # Kernels do nothing on the stub, so threads would only wait for each other.
    torch.set_num_threads(1)
    name, *arguments = sys.argv[1:]
    sys.stdout.write(json.dumps(cases[name](*arguments)) + "\n")
    sys.stdout.flush()
    # The threads of autograd may abort the process where Python 3.11 ends them.
    os._exit(0)


def gpu_trainer(*callbacks: Any, **arguments: Any) -> Trainer:
    """A trainer on one CUDA device that writes and prints nothing."""
    return quiet_trainer(*callbacks, **{"accelerator": "gpu", "devices": 1, **arguments})


class PeakOfTraining(Callback):
    """Keeps the reserved peak of the training, and the share of the device that it may take."""

    def on_train_start(self, *_: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, *_: Any) -> None:
        self.peak_bytes = torch.cuda.max_memory_reserved()
        self.fraction = torch.cuda.get_per_process_memory_fraction()


def mib(used_bytes: float) -> float:
    """Bytes in MiB, rounded for messages."""
    return round(used_bytes / MIB, 1)
