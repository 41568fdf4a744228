"""One call of a function in a new interpreter, which imports the script again up to this call.

A process of :mod:`multiprocessing` cannot run a function of a script whose code is not guarded by
``if __name__ == "__main__"``.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_batchmem.factory import VARIABLE

# This variable is set in the new processes, and in their own subprocesses.
_IN_NEW_PROCESS = "LIGHTNING_BATCHMEM_VARIANT"


class NotImportableError(Exception):
    """A new process cannot import the function or its arguments."""


class _ScriptRunsAgainError(BaseException):
    """Ends a script without a guard that runs again in a new process.

    It is no ``Exception``, so ``except Exception`` in the script does not catch it.
    """


def end_repeated_script() -> None:
    """End the script here if it runs in a new process, where only its names are needed."""
    if os.environ.get(_IN_NEW_PROCESS):
        raise _ScriptRunsAgainError


def call_in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``, which a new process computes.

    The result must not contain objects of the script's own classes.

    Raises:
        NotImportableError: if that process cannot import the function or an argument.
        ChildProcessError: if it ends without a result.
    """
    try:
        call = pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise NotImportableError(str(error)) from error
    main = sys.modules["__main__"]
    script = None
    if b"__main__" in call:
        script = getattr(main, "__file__", None)
        if script is None or not Path(script).is_file():
            raise NotImportableError("they are defined in a notebook or an interactive session")
    # The callbacks of the variable are not for the runs in the new process.
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment[_IN_NEW_PROCESS] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "request"
        answer = Path(folder) / "answer"
        request.write_bytes(pickle.dumps((script, main.__package__, sys.argv, call)))
        # The kernel closes the second descriptor when this process ends, whatever ends it.
        watched, kept_open = os.pipe()
        call_arguments = f"{str(request)!r}, {str(answer)!r}, {watched}"
        program = f"from {__name__} import _answer; _answer({call_arguments})"
        command = [sys.executable, "-c", program]
        try:
            # The program is this interpreter, and no shell is involved.
            process = subprocess.run(command, env=environment, pass_fds=(watched,))  # noqa: S603
        finally:
            os.close(watched)
            os.close(kept_open)
        if not answer.exists():
            text = f"its process ended with exit code {process.returncode}"
            if process.returncode == -9:
                text += ", killed perhaps because the host's memory was full"
            raise ChildProcessError(text)
        # The file was written by a process of the same user.
        result = pickle.loads(answer.read_bytes())  # noqa: S301
    if isinstance(result, NotImportableError):
        raise result
    return result


def _end_with_parent(watched: int, folder: Path) -> None:
    """End this process, and remove its folder, when the first process has ended."""
    os.read(watched, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _answer(request: str, answer: str, watched: int) -> None:
    """Run in the new process: read the call from a file, and write its result to another one.

    The first process holds the other end of the pipe ``watched``.
    """
    folder = Path(request).parent
    threading.Thread(target=_end_with_parent, args=(watched, folder), daemon=True).start()
    # The file was written by a process of the same user.
    script, package, sys.argv, call = pickle.loads(Path(request).read_bytes())  # noqa: S301
    try:
        if script:
            _load_script(script, package)
        # The call is from the same file.
        function, arguments = pickle.loads(call)  # noqa: S301
    # A script may raise any error when it runs again.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        result = NotImportableError(f"{type(error).__name__}: {error}")
    else:
        for name in ("lightning.pytorch", "pytorch_lightning"):
            # Lightning would otherwise print the same lines about devices in every process.
            logging.getLogger(name).setLevel(logging.WARNING)
        result = function(*arguments)
    Path(answer).write_bytes(pickle.dumps(result))


def _load_script(script: str, package: str | None) -> None:
    """Run the script up to its call of :func:`end_repeated_script`.

    A script with the guard ``if __name__ == "__main__"`` runs without the code under it.
    """
    # The module has the name that multiprocessing gives it.
    main = types.ModuleType("__mp_main__")
    main.__file__ = script
    main.__package__ = package
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    with suppress(_ScriptRunsAgainError):
        # The code is the user's own script, which already runs in the first process.
        exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))  # noqa: S102
