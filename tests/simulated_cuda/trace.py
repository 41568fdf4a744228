"""The storages that a network's steps create and release, recorded on the meta device and replayed at any size.

Eager training requests a + b * B bytes for each storage: a and b come from two sizes, and a third one checks them.
"""

from __future__ import annotations

import math
import weakref
from functools import cache, lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.simulated_cuda.networks import NETWORKS, Network

TRAINING_PHASES = ("forward", "backward", "optimizer_step")
RECORDED_SIZES = (2, 3, 5)
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
_WORKSPACE_SHARES = (0.0, 0.25, 1.0, 2.0)  # invented, of the input of a convolution

# Of each phase: (slot, fixed bytes, bytes per sample, convolution or None). A storage ends where its bytes are 0. The
# number of a convolution marks its workspace, whose bytes are those of the input.
Program = dict[str, list[tuple[int, int, int, int | None]]]


class Trace:
    """The storages of one network: of a step that creates the optimizer's state, of later steps, and of evaluation.

    Slots, in this order: parameters and buffers, ``gradients``, ``states`` of the optimizer, what ends with the step.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        recorded = [_record(network, size) for size in RECORDED_SIZES]
        self.persistent_bytes, self.gradients, self.states = recorded[0][:3]
        self.first, self.steady, self.evaluation = (fit([programs[i] for *_, programs in recorded]) for i in range(3))
        self.events = lru_cache(maxsize=64)(self._events)

    def _events(self, size: int, program: str = "steady") -> dict[str, list[tuple[int, int]]]:
        """Pairs of slot and bytes of each phase at ``size`` samples; 0 bytes end a storage."""
        phases: dict[str, list[tuple[int, int]]] = {}
        for phase, events in getattr(self, program).items():
            pairs = phases[phase] = []
            for slot, fixed, per_sample, convolution in events:
                size_bytes = fixed + per_sample * size
                if convolution is None:
                    pairs.append((slot, size_bytes))
                elif share := workspace_share(convolution, size):
                    pairs += [(slot, int(share * size_bytes)), (slot, 0)]
        return phases

    def peak_bytes(self, size: int) -> int:
        """Highest requested bytes of a step with gradients and states: no allocator can train with less."""
        first = self.events(size, "first")
        made = {slot: size_bytes for phase in first.values() for slot, size_bytes in phase if size_bytes}
        live = dict(enumerate(self.persistent_bytes))
        live |= {slot: made[slot] for slot in (*self.gradients, *self.states)}
        current = peak = sum(live.values())
        for phase, pairs in self.events(size).items():
            if phase == "backward":
                current -= sum(live[slot] for slot in self.gradients)
            for slot, size_bytes in pairs:
                current += size_bytes or -live[slot]
                live[slot] = size_bytes
                peak = max(peak, current)
        return peak


@cache
def trace_of(name: str) -> Trace:
    """The trace of a network in ``NETWORKS``, recorded once in a process."""
    return Trace(next(network for network in NETWORKS if network.name == name))


def workspace_share(convolution: int, size: int) -> float:
    """Share of its input that a convolution takes as workspace; it changes every 19 % of the size."""
    return _WORKSPACE_SHARES[(3 * convolution + int(4 * math.log2(size))) % 4]


class _Recorder(TorchDispatchMode):
    """Records meta storages as (number, bytes, convolution or None); a storage ends where its bytes are 0."""

    def __init__(self, persistent: list[torch.UntypedStorage], *, workspaces: bool) -> None:
        super().__init__()
        self.events: list[tuple[int, int, int | None]] = []
        self.numbers = {storage._cdata: -1 - index for index, storage in enumerate(persistent)}  # of the live ones
        self.num_convolutions = 0
        self._workspaces = workspaces
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._add(tensor.untyped_storage())
        if self._workspaces and func in _CONVOLUTIONS:
            self._count += 1
            size_bytes = args[_CONVOLUTIONS.index(func)].untyped_storage().nbytes()
            self.events.append((self._count, size_bytes, self.num_convolutions))
            self.num_convolutions += 1
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.numbers and storage.nbytes():
            self._count += 1
            self.numbers[key] = self._count
            self.events.append((self._count, storage.nbytes(), None))
            weakref.finalize(storage, lambda: self.events.append((self.numbers.pop(key), 0, None)))

    def take(self) -> list[Any]:
        taken, self.events = self.events, []
        return taken


def _record(network: Network, size: int) -> tuple[list[int], range, range, list[dict[str, list[Any]]]]:
    with torch.device("meta"):
        module = network.module()
    parameters = list(module.parameters())
    persistent = [tensor.untyped_storage() for tensor in (*parameters, *module.buffers())]
    optimizer = network.optimizer(parameters)
    num_persistent = len(persistent)
    programs = []
    with _Recorder(persistent, workspaces=network.workspaces) as recorder:
        for _ in range(3):
            recorder.num_convolutions = 0
            batch = network.batch(size)
            loss = network.criterion(module(batch[0]), batch[1])
            step = {"forward": recorder.take()}
            optimizer.zero_grad()
            recorder.take()  # the replay releases the gradients itself, before the backward pass
            loss.backward()
            step["backward"] = recorder.take()
            optimizer.step()
            del loss, batch
            step["optimizer_step"] = recorder.take()
            kept = _kept(recorder, optimizer)
            assert len(recorder.numbers) == num_persistent + len(kept)
            programs.append(_with_slots(step, kept, num_persistent))
        module.eval()
        recorder.num_convolutions = 0
        with torch.no_grad():
            batch = network.batch(size)
            loss = network.criterion(module(batch[0]), batch[1])
            del loss, batch
        programs.append(_with_slots({"evaluation": recorder.take()}, kept, num_persistent))
    first, second, third, evaluation = programs
    assert second == third, "the second step and the third differ"
    gradients = range(num_persistent, num_persistent + len(parameters))
    states = range(gradients.stop, num_persistent + len(kept))
    return [storage.nbytes() for storage in persistent], gradients, states, [first, second, evaluation]


def _kept(recorder: _Recorder, optimizer: torch.optim.Optimizer) -> list[int]:
    """Numbers of the gradients and of the optimizer's states."""
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values() if value.is_meta]
    return [recorder.numbers[tensor.untyped_storage()._cdata] for tensor in (*gradients, *states)]


def _with_slots(step: dict[str, list[Any]], kept: list[int], first: int) -> dict[str, list[Any]]:
    slots = {number: first + index for index, number in enumerate(kept)}
    return {
        phase: [(slots.setdefault(number, first + len(slots)), *rest) for number, *rest in events]
        for phase, events in step.items()
    }


def fit(programs: list[dict[str, list[Any]]]) -> Program:
    """Fit bytes to the first two of ``RECORDED_SIZES``, and check them at the third."""
    small, large, check = RECORDED_SIZES
    fitted: Program = {phase: [] for phase in programs[0]}
    for phase, events in fitted.items():
        for rows in zip(*(program[phase] for program in programs), strict=True):
            (slot, low, convolution), (_, high, _), (_, third, _) = rows
            assert {(row[0], row[2]) for row in rows} == {(slot, convolution)}, f"{phase}: storages depend on the size"
            per_sample, rest = divmod(high - low, large - small)
            fixed = low - per_sample * small
            assert (rest, third) == (0, fixed + per_sample * check), f"{phase}: {low}, {high}, {third} bytes"
            events.append((slot, fixed, per_sample, convolution))
    return fitted
