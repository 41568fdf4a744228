"""Ranks of one process group: new processes in which torch and Lightning are already imported."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WAIT_SECONDS = 240


def run_ranks(
    target: Callable[..., None], directory: Path, *arguments: Any, ranks: int = 2
) -> tuple[list[int | None], list[str]]:
    """Run ``target(rank, directory, *arguments)`` on each rank.

    Returns the exit codes and the outputs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.search_ranks"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [
        context.Process(target=_run_rank, args=(target, rank, directory, port, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + WAIT_SECONDS
    for process in processes:
        process.join(max(0, until - time.monotonic()))
        # A process that has not ended by now gets -SIGKILL as its exit code.
        process.kill()
        process.join()
    exit_codes = [process.exitcode for process in processes]
    outputs = [(directory / f"{rank}.out").read_text() for rank in range(ranks)]
    return exit_codes, outputs


def _run_rank(
    target: Callable[..., None], rank: int, directory: Path, port: int, arguments: tuple[Any, ...]
) -> None:
    # The search collects garbage often, and half a million objects of torch are not part of it.
    gc.freeze()
    torch.set_num_threads(1)
    os.chdir(directory)
    output = os.open(f"{rank}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    target(rank, directory, *arguments)
