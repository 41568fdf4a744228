"""The plan of an earlier run: its size is used again where it passes a rehearsal."""

from __future__ import annotations

import os
import socket
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import get_args

from torch.nn import Module
from torch.nn.parameter import is_lazy

from lightning_batchmem.plan.json_fields import read_small
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.plan import Plan
from lightning_batchmem.plan.records import Chosen, SizeLimit, Trial, device_text, mib
from lightning_batchmem.plan.sizes import rounded, size_range
from lightning_batchmem.search.ranks import Ranks

LIMIT_TOLERANCE = 0.1
"""Limits are equal if they differ by at most this share: free memory always varies."""


def is_missing_plan(given: object) -> bool:
    """Whether this is the path of a JSON file that does not exist yet."""
    if not isinstance(given, str | Path):
        return False
    return Path(given).suffix == ".json" and not os.path.lexists(given)


def write_missing_plan(given: object, plan: Plan) -> None:
    """Write a verified plan to the file that was given for it, if there is none.

    Several trainings may write it at a time, and each reader sees a whole file. An error is a
    warning.
    """
    if not (plan.verified and is_missing_plan(given)):
        return
    path = Path(str(given))
    try:
        write_plan(path, plan)
    except OSError as error:
        warnings.warn(f"The plan could not be written to {path}: {error}", stacklevel=2)


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan, so that each reader sees a whole file.

    Raises:
        OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    unfinished.write_text(plan.to_json(), encoding="utf-8")
    unfinished.replace(path)


def find_earlier_plan(
    given: Plan | str | Path | None,
    parameters: str,
    *,
    device: str,
    limit_bytes: int,
    ranks: Ranks,
) -> tuple[Plan | None, list[Note]]:
    """The plan to rehearse, or ``None`` and a note why not; the first rank decides for all.

    Args:
        given: a plan, its file, or a log directory; without one, or with a file that is still to be
            written, there is no note.
        parameters: the number of parameters, as in a plan.
        device: the name of the device.
        limit_bytes: the limit of this rank.
        ranks: the processes that search together.
    """
    if given is None:
        return None, []
    # The first run of a sweep has no file, and writes it. The file may belong to the first rank.
    if ranks.exchange(is_missing_plan(given))[0]:
        return None, []
    limit_bytes = min(ranks.exchange(limit_bytes))
    plan = None
    try:
        plan = load_plan(given)
    except (OSError, ValueError) as error:
        changes = [f"{given} cannot be read ({error})"]
    else:
        changes = changes_since(plan, device, limit_bytes)
        unknown = next((trial for trial in plan.trials if not trial.is_known), None)
        if unknown is not None:
            changes = [
                f"this version does not know a run of the kind {unknown.kind[:80]!r} with the"
                f" outcome {unknown.outcome[:80]!r}"
            ]
        elif not ((plan.verified or plan.simulated) and plan.parameters):
            changes = ["it was not verified by a fit of this version"]
        elif plan.parameters != parameters:
            changes.append(changed("number of parameters", plan.parameters, parameters))
    plan, changes = ranks.exchange((plan, changes))[0]
    if changes:
        return None, [earlier_plan_not_used(*changes)]
    return plan, []


def earlier_plan_not_used(*reasons: str) -> Note:
    """A note with clauses that say why."""
    return Note("earlier_plan", f"The earlier plan was not used: {', and '.join(reasons)}.")


def load_plan(plan: Plan | str | Path) -> Plan:
    """A plan, or the plan of a file, or the newest readable plan of a fit below a log directory.

    Raises:
        OSError: if there is no such file.
        ValueError: if a file has no plan.
    """
    if isinstance(plan, Plan):
        return plan
    path = Path(plan)
    if path.is_dir():
        found = (file for file in path.rglob("batch_plan*.json") if file.is_file())
        files = sorted(found, key=lambda file: file.stat().st_mtime)
        for file in reversed(files):
            # A run that was killed may leave a part of a file.
            with suppress(OSError, ValueError):
                earlier = Plan.from_json(read_small(file))
                # The plan of an evaluation has no number of parameters, and is skipped.
                if earlier.parameters:
                    return earlier
        path = files[-1] if files else path / "batch_plan.json"
    return Plan.from_json(read_small(path))


def changes_since(plan: Plan, device: str, limit_bytes: int) -> list[str]:
    """A clause for each of device and limit that differs from the plan's."""
    changes = []
    # The real device has another name.
    if device != plan.device and not plan.simulated:
        changes.append(changed("device", device_text(plan.device), device_text(device)))
    if abs(limit_bytes - plan.limit_bytes) > LIMIT_TOLERANCE * plan.limit_bytes:
        changes.append(changed("limit", mib(plan.limit_bytes), mib(limit_bytes)))
    return changes


def changed(name: str, old: object, new: object) -> str:
    """A clause about a value that differs."""
    return f"the {name} was {old} and is {new}"


def parameters_text(module: Module) -> str:
    """The number of parameters."""
    counts = [parameter.numel() for parameter in module.parameters()]
    return f"{sum(counts):,} in {len(counts)} tensors"


def parameters_made_text(module: Module) -> str:
    """The number of parameters; empty where there are none yet, or they have no shape yet."""
    parameters = list(module.parameters())
    if not parameters or any(is_lazy(parameter) for parameter in parameters):
        return ""
    return parameters_text(module)


def why_not_allowed(plan: Plan, limits: SearchLimits) -> str:
    """Why the size of ``plan`` is not worth a rehearsal; empty if it is."""
    size = plan.batch_size
    lowest, highest = size_range(limits)
    is_allowed = lowest <= size <= highest and size in (highest, rounded(size, limits))
    # Where something else than memory limited it, this may allow a larger size now.
    is_largest = size == highest or plan.limited_by not in get_args(SizeLimit)
    if is_allowed and is_largest and plan.budget_name == limits.unit.budget_name:
        return ""
    if is_allowed and not is_largest:
        return (
            f"{limits.unit.size(size)} were limited by {plan.limited_by}, and larger sizes are"
            " allowed now"
        )
    multiple_of = limits.options.multiple_of or 1
    sizes = f"multiples of {multiple_of}" if multiple_of > 1 else "sizes"
    return (
        f"it has {limits.unit.size(size)}, and {sizes} from {lowest:,} to {highest:,} are allowed:"
        f" {limits.largest_text}"
    )


def reused(plan: Plan, trial: Trial) -> tuple[Chosen, tuple[Trial, ...]]:
    """The size of ``plan`` after ``trial``, a rehearsal that passed, and the trials of both."""
    size = plan.batch_size
    chosen = Chosen(
        size,
        plan.limited_by,
        "the size of an earlier plan, which passed a rehearsal on this device.",
        fastest_batch_size=plan.fastest_batch_size,
        largest_batch_size=plan.largest_batch_size,
    )
    earlier = [
        # Times of another process cannot be compared with times of this one.
        replace(t, step_seconds=None, samples_per_s=None)
        for t in plan.trials
        if (t.batch_size, t.kind) != (size, "rehearsal") and not plan.simulated
    ]
    return chosen, (*earlier, trial)
