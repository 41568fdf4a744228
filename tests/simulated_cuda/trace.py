"""The storages that a network's steps create and release, recorded on the meta device and replayed at any size.

Eager training requests a + b * B bytes for each storage: a and b come from two sizes, and a third one checks them.
"""

from __future__ import annotations

import math
import weakref
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.simulated_cuda.networks import NETWORKS, Network

TRAINING_PHASES = ("forward", "backward", "optimizer_step")
RECORDED_SIZES = (2, 3, 5)
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
_WORKSPACE_SHARES = (0.0, 0.25, 1.0, 2.0)  # invented, of the convolution's input


class Event(NamedTuple):
    """A storage of ``fixed + per_sample * B`` bytes begins, or ends where both are 0.

    A convolution's number marks its workspace, which begins and ends here and whose bytes are those of the input.
    """

    slot: int
    fixed: int = 0
    per_sample: int = 0
    convolution: int | None = None


Steps = dict[str, tuple[Event, ...]]  # of each phase


class Trace:
    """The storages of one network.

    Slots, in this order: parameters and buffers, gradients, states of the optimizer, storages that end with the step.

    Attributes:
        persistent_bytes: sizes of parameters and buffers.
        first: phases of a step that creates the optimizer's state.
        steady: phases of every later step.
        evaluation: the one phase ``"evaluation"``.
        gradients, states: their slots.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        recorded = [_record(network, size) for size in RECORDED_SIZES]
        self.persistent_bytes, self.gradients, self.states = recorded[0][:3]
        self.first, self.steady, self.evaluation = (
            _fit([program[index] for *_, program in recorded]) for index in range(3)
        )
        self.events = lru_cache(maxsize=64)(self._events)

    def _events(self, size: int, *, steady: bool = True, evaluation: bool = False) -> dict[str, list[tuple[int, int]]]:
        """Pairs of slot and bytes of each phase at ``size`` samples; 0 bytes end a storage."""
        program = self.evaluation if evaluation else self.steady if steady else self.first
        phases: dict[str, list[tuple[int, int]]] = {}
        for phase, events in program.items():
            pairs = phases[phase] = []
            for slot, fixed, per_sample, convolution in events:
                size_bytes = fixed + per_sample * size
                if convolution is None:
                    pairs.append((slot, size_bytes))
                elif workspace_bytes := int(workspace_share(convolution, size) * size_bytes):
                    pairs += [(slot, workspace_bytes), (slot, 0)]
        return phases

    def peak_bytes(self, size: int) -> int:
        """Highest requested bytes of a step with gradients and states: no allocator can train with less."""
        live = dict(enumerate(self.persistent_bytes))
        parameters_bytes = {slot: size_bytes for slot, size_bytes in self._events(size)["backward"] if size_bytes}
        live |= {slot: parameters_bytes[slot] for slot in self.gradients}
        live |= {slot: n for slot, n in self._events(size, steady=False)["optimizer_step"] if slot in self.states}
        current = peak = sum(live.values())
        for phase, pairs in self.events(size).items():
            if phase == "backward":
                current -= sum(live.pop(slot) for slot in self.gradients)
            for slot, size_bytes in pairs:
                current += size_bytes or -live.pop(slot)
                if size_bytes:
                    live[slot] = size_bytes
                peak = max(peak, current)
        return peak


@cache
def trace_of(name: str) -> Trace:
    """The trace of a network in ``NETWORKS``, recorded once in a process (0.2 to 3 seconds)."""
    return Trace(next(network for network in NETWORKS if network.name == name))


def workspace_share(convolution: int, size: int) -> float:
    """Share of its input that a convolution takes as workspace; it changes every 19 % of the size."""
    return _WORKSPACE_SHARES[(3 * convolution + int(4 * math.log2(size))) % 4]


class _Recorder(TorchDispatchMode):
    """Records meta storages: (number, bytes, convolution or None); 0 bytes end a storage."""

    def __init__(self, *, workspaces: bool) -> None:
        super().__init__()
        self.events: list[tuple[int, int, int | None]] = []
        self.numbers: dict[int, int] = {}  # of the live storages
        self.num_convolutions = 0
        self._workspaces = workspaces
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                self._see(tensor.untyped_storage())
        if self._workspaces and func in _CONVOLUTIONS:
            tensor = args[0] if func is _CONVOLUTIONS[0] else args[1]
            self._count += 1
            self.events.append((self._count, tensor.untyped_storage().nbytes(), self.num_convolutions))
            self.num_convolutions += 1
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.numbers and storage.nbytes():
            self._count += 1
            self.numbers[key] = self._count
            self.events.append((self._count, storage.nbytes(), None))
            weakref.finalize(storage, lambda: self.events.append((self.numbers.pop(key), 0, None)))

    def taken(self) -> list[tuple[int, int, int | None]]:
        taken, self.events = self.events, []
        return taken


def _record(network: Network, size: int) -> tuple[list[int], range, range, list[dict[str, list[Any]]]]:
    with torch.device("meta"):
        module = network.module()
    parameters = list(module.parameters())
    persistent = [tensor.untyped_storage() for tensor in (*parameters, *module.buffers())]
    optimizer = network.optimizer(parameters)
    recorder = _Recorder(workspaces=network.workspaces)
    recorder.numbers |= {storage._cdata: -1 - index for index, storage in enumerate(persistent)}
    steps: list[dict[str, list[Any]]] = []
    kept: list[list[int]] = []
    gradients = range(len(persistent), len(persistent) + len(parameters))
    with recorder:
        for _ in range(3):
            recorder.num_convolutions = 0
            step = {}
            batch = network.batch(size)
            loss = network.loss(module, batch)
            step["forward"] = recorder.taken()
            optimizer.zero_grad()
            recorder.taken()  # the replay releases the gradients itself, before the backward pass
            loss.backward()
            step["backward"] = recorder.taken()
            optimizer.step()
            del loss, batch
            step["optimizer_step"] = recorder.taken()
            steps.append(step)
            kept.append(_kept(recorder, optimizer))
            assert len(recorder.numbers) == len(persistent) + len(kept[-1])
        module.eval()
        recorder.num_convolutions = 0
        with torch.no_grad():
            batch = network.batch(size)
            loss = network.loss(module, batch)
            del loss, batch
        steps.append({"evaluation": recorder.taken()})
        kept.append(kept[-1])
        states = range(gradients.stop, gradients.start + len(kept[-1]))
        programs = [_with_slots(step, numbers, gradients.start) for step, numbers in zip(steps, kept, strict=True)]
    assert programs[1] == programs[2], "the second step and the third differ"
    return [storage.nbytes() for storage in persistent], gradients, states, [programs[0], programs[1], programs[3]]


def _kept(recorder: _Recorder, optimizer: torch.optim.Optimizer) -> list[int]:
    """Numbers of the gradients and of the optimizer's states."""
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values() if value.is_meta]
    return [recorder.numbers[tensor.untyped_storage()._cdata] for tensor in (*gradients, *states)]


def _with_slots(step: dict[str, list[Any]], kept: list[int], first_slot: int) -> dict[str, list[Any]]:
    slots = {number: first_slot + index for index, number in enumerate(kept)}
    result = {}
    for phase, events in step.items():
        result[phase] = [(slots.setdefault(number, first_slot + len(slots)), *rest) for number, *rest in events]
    return result


def _fit(programs: list[dict[str, list[Any]]]) -> Steps:
    small, large, check = RECORDED_SIZES
    steps: Steps = {}
    for phase in programs[0]:
        fitted = []
        for rows in zip(*(program[phase] for program in programs), strict=True):
            (slot, low, convolution), (_, high, _), (_, third, _) = rows
            assert all((row[0], row[2]) == (slot, convolution) for row in rows), f"{phase}: storages depend on the size"
            per_sample, rest = divmod(high - low, large - small)
            fixed = low - per_sample * small
            assert (rest, third) == (0, fixed + per_sample * check), f"{phase}: {low}, {high}, {third} bytes"
            fitted.append(Event(slot, fixed, per_sample, convolution))
        steps[phase] = tuple(fitted)
    return steps
