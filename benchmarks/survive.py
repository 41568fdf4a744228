"""Does a training at a size survive? Each in a fresh process of its own.

python -m benchmarks.survive WORKLOAD SIZE CAP [--steps N]      # {"error": ...} as JSON in the last line
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import warnings
from typing import Any

from lightning.pytorch import seed_everything

from benchmarks.caps import Cap, Capped, caps_here, kills, own_group, room_bytes
from benchmarks.common import answer, described, in_fresh_process, trainer_for
from benchmarks.search_table import KILLED
from benchmarks.watched import Watched, watched
from benchmarks.workloads import WORKLOADS

STEPS = 20


def train(name: str, batch_size: int, kind: str, steps: int = STEPS) -> dict[str, Any]:
    """Train in this process; an error in ``result["error"]`` is what it did not survive."""
    trainer = trainer_for([Capped(Cap(kind, room_bytes(name)))], steps * WORKLOADS[name].optimizers)
    try:
        trainer.fit(watched(name, batch_size))
    except Exception as error:  # noqa: BLE001 - under the cap memory may run out anywhere, as anything
        return {"error": described(error)}
    assert Watched.samples_by_size == {batch_size: steps * batch_size}
    return {"error": None}


def attempt(kind: str, module: str, *arguments: str, timeout_seconds: float) -> dict[str, Any]:
    """The answer of a fresh process under a cap; where it has none, an ``error`` that says how it ended."""
    with own_group(kind) as group:
        try:
            return in_fresh_process(module, *arguments, timeout_seconds=timeout_seconds, group=group)
        except subprocess.TimeoutExpired:
            return {"error": f"hangs: no end after {timeout_seconds:g} s"}
        except subprocess.CalledProcessError as error:
            if kills(group):
                return {"error": f"{KILLED}: its memory control group was full"}
            last = error.stderr.strip().splitlines()[-1:]
            return {"error": f"the process ended with {error.returncode}: {''.join(last)}"}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("size", type=int)
    parser.add_argument("cap", choices=caps_here())
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(0, verbose=False)
    answer(train(arguments.workload, arguments.size, arguments.cap, arguments.steps))


if __name__ == "__main__":
    main()
