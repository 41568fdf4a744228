"""End processes together with all that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

import psutil

END_SECONDS = 5.0


def end_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those that it started, which may have their own sessions, and wait.

    If the process is the first of a program, all others in its process group are killed, too: its
    children can no longer be listed after its end.
    """
    started: list[psutil.Process] = []
    if process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    with suppress(ProcessLookupError):
        # There is no such group if the process belongs to the group of its parent.
        os.killpg(process.pid, signal.SIGKILL)
    for child in started:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    # A device is not free before they have ended.
    psutil.wait_procs(started, timeout=END_SECONDS)
