"""The storages that a network's steps create and release, at any size.

They are recorded on the meta device and replayed at the size. Eager training requests a + b * B
bytes for each storage: a and b come from two sizes, and a third one checks them.
"""

from __future__ import annotations

import math
import weakref
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.held_out_networks import HELD_OUT_NETWORKS
from benchmarks.large_networks import NETWORKS, Network
from benchmarks.unseen_networks import UNSEEN_NETWORKS

RECORDED_SIZES = (2, 3, 5)
# Workspaces are invented, as shares of the input of a convolution.
WORKSPACE_SHARES = (0.0, 0.25, 1.0, 2.0)
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
# A phase of a step, and the number of the optimizer that it belongs to.
Phase = tuple[str, int]
# The events of each phase are (slot, bytes, convolution or None). A storage ends where its bytes
# are 0. The number of a convolution marks its workspace; the bytes are then those of its input.
_Phases = dict[Phase, list[tuple[int, Any, int | None]]]


class OptimizerSlots(NamedTuple):
    """The slots of the gradients and of the states of one optimizer."""

    gradients: set[int]
    states: set[int]


class Trace:
    """The storages of one network.

    Its programs are the step that creates the optimizer's state, later steps, and an evaluation.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        recorded = [_record(network, size) for size in RECORDED_SIZES]
        self.persistent_bytes, self.optimizers, _ = recorded[0]
        self.gradients = set[int]().union(*(slots.gradients for slots in self.optimizers))
        self.states = set[int]().union(*(slots.states for slots in self.optimizers))
        self._programs = {
            name: fit([programs[name] for *_, programs in recorded]) for name in recorded[0][2]
        }
        self.events = lru_cache(maxsize=64)(self._events)

    def _events(self, size: int, program: str) -> dict[Phase, list[tuple[int, int]]]:
        """Pairs of slot and bytes of each phase at ``size`` samples; 0 bytes end a storage."""
        phases: dict[Phase, list[tuple[int, int]]] = {}
        for phase, events in self._programs[program].items():
            pairs = phases[phase] = []
            for slot, (fixed, per_sample), convolution in events:
                if convolution is None:
                    pairs.append((slot, fixed + per_sample * size))
                elif self.network.workspaces and (share := workspace_share(convolution, size)):
                    pairs += [(slot, int(share * (fixed + per_sample * size))), (slot, 0)]
        return phases


def trace_of(name: str, gigabytes: int = 8) -> Trace:
    """The trace of a network on a device with these gigabytes, recorded once in a process."""
    networks = (*NETWORKS, *HELD_OUT_NETWORKS, *UNSEEN_NETWORKS)
    network = next(network for network in networks if network.name == name)
    return _trace(network, gigabytes if network.fills_device else None)


@cache
def _trace(network: Network, gigabytes: int | None) -> Trace:
    if gigabytes is not None:
        network = network._replace(module=partial(network.module, gigabytes))
    return Trace(network)


def workspace_share(convolution: int, size: int) -> float:
    """Share of its input that a convolution takes as workspace.

    The share changes every 19 % of the size.
    """
    return WORKSPACE_SHARES[(3 * convolution + int(4 * math.log2(size))) % 4]


# TorchDispatchMode.__init_subclass__ has no type annotations.
class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        # TorchDispatchMode.__init__ has no type annotations.
        super().__init__()  # type: ignore[no-untyped-call]
        # The slot of each live storage.
        self.slots = {tensor.untyped_storage()._cdata: slot for slot, tensor in enumerate(tensors)}
        self.count = len(tensors)
        self.convolutions = 0
        self.events = list[tuple[int, int, int | None]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._add(tensor.untyped_storage())
        if func in _CONVOLUTIONS:
            self.events.append(
                (self.count, args[_CONVOLUTIONS.index(func)].nbytes, self.convolutions)
            )
            self.count += 1
            self.convolutions += 1
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self.slots and storage.nbytes():
            self.slots[key] = self.count
            self.events.append((self.count, storage.nbytes(), None))
            weakref.finalize(storage, lambda: self.events.append((self.slots.pop(key), 0, None)))
            self.count += 1

    def slots_of(self, tensors: Any) -> set[int]:
        """The slots of the tensors on the meta device, in any nested structure."""
        leaves = (leaf for leaf in tree_leaves(list(tensors)) if isinstance(leaf, torch.Tensor))
        return {self.slots[leaf.untyped_storage()._cdata] for leaf in leaves if leaf.is_meta}

    def take(self) -> list[tuple[int, int, int | None]]:
        taken = self.events
        self.events = []
        return taken


def _record(
    network: Network, size: int
) -> tuple[list[int], list[OptimizerSlots], dict[str, _Phases]]:
    """Record the programs of a network at one size.

    Returns the bytes of parameters and buffers, the slots of each optimizer, and the programs.
    """
    with torch.device("meta"):
        module = network.module()
    persistent = [*module.parameters(), *module.buffers()]
    optimizers = network.optimizers(module)
    slots = [OptimizerSlots(set(), set()) for _ in optimizers]
    programs: dict[str, _Phases] = {"first": {}, "steady": {}, "evaluation": {}}
    with _Recorder(persistent) as recorder:
        for name in ("first", "steady"):
            recorder.convolutions = 0
            module.train()
            batch = network.batch(size)
            for number, optimizer in enumerate(optimizers):
                loss = network.loss(module, batch, number)
                programs[name]["forward", number] = recorder.take()
                optimizer.zero_grad()
                # These events are dropped: the replay releases the gradients itself.
                recorder.take()
                # torch does not annotate this method.
                loss.backward()  # type: ignore[no-untyped-call]
                programs[name]["backward", number] = recorder.take()
                optimizer.step()
                slots[number].gradients.update(recorder.slots_of(gradients_of(optimizer)))
                slots[number].states.update(recorder.slots_of(optimizer.state.values()))
                del loss
                if number == len(optimizers) - 1:
                    del batch
                programs[name]["optimizer_step", number] = recorder.take()
        recorder.convolutions = 0
        module.eval()
        with torch.no_grad():
            batch = network.batch(size)
            for number in range(len(optimizers)):
                network.loss(module, batch, number)
            del batch
        programs["evaluation"]["evaluation", 0] = recorder.take()
    return [tensor.nbytes for tensor in persistent], slots, programs


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def fit(programs: list[_Phases]) -> _Phases:
    """Fit bytes to the first two of ``RECORDED_SIZES``, and check them at the third."""
    small, large, check = RECORDED_SIZES
    fitted: _Phases = {phase: [] for phase in programs[0]}
    for phase, events in fitted.items():
        same_events = zip(*(program[phase] for program in programs), strict=True)
        for (slot, low, convolution), *others in same_events:
            per_sample = (others[0][1] - low) // (large - small)
            fixed = low - per_sample * small
            expected = [(slot, fixed + per_sample * size, convolution) for size in (large, check)]
            assert others == expected, f"{phase}: {others} instead of {expected}"
            events.append((slot, (fixed, per_sample), convolution))
    return fitted
