"""What the memory of a training step is made of: exact bytes, every storage counted once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torchmetrics import Metric

# The walk meets lists of thousands of these in text batches; a set lookup keeps that cheap.
_LEAVES = frozenset({str, bytes, int, float, bool, complex, type(None)})


@dataclass(frozen=True)
class MemoryBreakdown:
    """What fills the memory at the peak of a step; the fields add up to :attr:`peak_bytes`.

    The first four are the storages that are alive *when a step begins*, each counted in the first part that holds it.
    From its second step on Lightning keeps the gradients through the next forward (``zero_grad`` runs after
    ``training_step``), so they are part of the peak there. Where somebody frees them between two steps (a manual
    ``zero_grad`` at the end of ``training_step``) they are 0 here, and inside ``activations_bytes`` instead.

    Args:
        parameters_bytes: parameters and buffers of the module.
        gradients_bytes: gradients that were alive when the step began.
        optimizer_state_bytes: state of the optimizers, and parameters that only they know (master copies).
        batch_bytes: the batch, as far as it lies on the measured device.
        activations_bytes: the peak less all other parts: activations, and temporaries of backward and of the optimizer
            with them; on the host also the heap that they leave behind.
        other_bytes: what was in use when the step began and is none of the above: workspaces and tensors that the user
            keeps on a GPU; interpreter and libraries on the host (there as it was before the first step, since the
            resident set still holds what a step has freed). Below 0 where not all of the tensors are resident
            (swapped out, or mapped from a file and never touched).
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    batch_bytes: int
    activations_bytes: int
    other_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Sum of the parts: the peak of the step, in bytes."""
        return self.start_bytes + self.activations_bytes

    @property
    def start_bytes(self) -> int:
        """What was in use when the step began, in bytes: every part but the activations."""
        known = self.parameters_bytes + self.gradients_bytes + self.optimizer_state_bytes + self.batch_bytes
        return known + self.other_bytes

    def at_peak(self, peak_bytes: int) -> MemoryBreakdown:
        """The same parts under another peak: what it holds beyond the start of the step is activations.

        A peak below the start (the host's two readings may differ by some pages) is taken off the rest, so that the
        activations are never negative and the sum stays exact.

        Args:
            peak_bytes: the peak of the step, in bytes.
        """
        below = min(0, peak_bytes - self.start_bytes)
        activations = max(0, peak_bytes - self.start_bytes)
        return replace(self, activations_bytes=activations, other_bytes=self.other_bytes + below)


def measure_breakdown(
    module: Module,
    optimizers: Iterable[Optimizer],
    batch: object,
    device: torch.device,
    *,
    start_bytes: int,
    peak_bytes: int | None = None,
) -> MemoryBreakdown:
    """What the memory of a step is made of; to be called when the step begins, with the batch on the device.

    Args:
        module: the module that is trained.
        optimizers: its optimizers.
        batch: the batch of the step, however nested.
        device: tensors elsewhere are not counted.
        start_bytes: what is in use now, in bytes.
        peak_bytes: the peak of the step in bytes, where it is known already; else see :meth:`MemoryBreakdown.at_peak`.

    Returns:
        The parts; without ``peak_bytes`` the activations are 0.

    Example:
        >>> linear = torch.nn.Linear(3, 5)
        >>> measure_breakdown(linear, [], torch.ones(2, 3), torch.device("cpu"), start_bytes=1000, peak_bytes=1500)
        MemoryBreakdown(parameters_bytes=80, gradients_bytes=0, optimizer_state_bytes=0, batch_bytes=24,\
 activations_bytes=500, other_bytes=896)
    """
    optimizers = list(optimizers)
    weights = list(module.parameters())
    groups = [optimizer.param_groups for optimizer in optimizers]
    inner = [one for optimizer in optimizers for one in vars(optimizer).values() if isinstance(one, Optimizer)]
    states = [list(optimizer.state.values()) for optimizer in (*optimizers, *inner)]
    seen: set[tuple[torch.device, int]] = set()

    def held(tensors: Iterable[Tensor]) -> int:
        return sum(_held_bytes(tensor, device, seen) for tensor in tensors)

    parameters = held(weights) + held(module.buffers())
    masters = [tensor for tensor in tensors_in(groups) if tensor.is_leaf]
    gradients = held(tensor.grad for tensor in (*weights, *masters) if tensor.grad is not None)
    state = held(masters) + held(tensors_in(states))
    data = held(tensors_in(batch))
    rest = start_bytes - parameters - gradients - state - data
    breakdown = MemoryBreakdown(parameters, gradients, state, data, 0, rest)
    return breakdown if peak_bytes is None else breakdown.at_peak(peak_bytes)


def tensors_in(data: object) -> list[Tensor]:
    """The tensors of a nested collection, in order: mappings, lists, tuples, sets, data classes and own batch types.

    An own batch type is what Lightning moves between devices: an object with a method ``to``. Iterators are not
    touched, for looking into them would use them up.

    Args:
        data: a batch or any other nested collection.

    Example:
        >>> [tuple(tensor.shape) for tensor in tensors_in({"image": torch.ones(2, 3), "labels": [torch.ones(2), "a"]})]
        [(2, 3), (2,)]
    """
    found: list[Tensor] = []
    _collect(data, found, set())
    return found


def copied(sample: Any, *, share_tensors: bool = False) -> Any:
    """A copy of a sample in which tensors hold no more than themselves: not the storage that they are a view of.

    Args:
        sample: however nested.
        share_tensors: whether the tensors are those of the sample itself, and all else is new.
    """
    tensors = tensors_in(sample)
    memo = {id(tensor): tensor if share_tensors else tensor.clone() for tensor in tensors}
    return copy.deepcopy(sample, memo)


def samples_in(batch: object) -> int | None:
    """How many samples a batch holds: the common first dimension of its tensors.

    Lightning's own ``extract_batch_size`` gives the same number where it is sure. In doubt it returns the first size it
    met, and warns once a process (2.6.6), so a caller cannot tell a guess from a reading.

    Args:
        batch: the batch, however nested; tensors without dimensions and everything that is no tensor are passed over.

    Returns:
        The number of samples, or ``None`` where the tensors disagree or there are none.

    Example:
        >>> samples_in({"image": torch.ones(8, 3), "label": torch.ones(8), "names": ["a"] * 8})
        8
    """
    sizes = set()
    if type(batch) in (list, tuple):  # most batches are plain, and this is asked of every one
        for item in batch:  # type: ignore[attr-defined]
            if type(item) is not Tensor:
                break
            if item.dim():
                sizes.add(item.size(0))
        else:
            return sizes.pop() if len(sizes) == 1 else None
    sizes = {tensor.size(0) for tensor in tensors_in(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def list_state_bytes(module: Module) -> dict[str, int]:
    """What torchmetrics' list states hold: they keep what every update gives them until they are reset.

    Args:
        module: whose submodules are looked through.

    Returns:
        Name of each metric that has list states -> their bytes now.
    """
    sizes = {}
    for name, metric in module.named_modules():
        if isinstance(metric, Metric):
            lists = [state for state in metric.metric_state.values() if isinstance(state, list)]
            if lists:
                sizes[name] = sum(tensor.nbytes for state in lists for tensor in state)
    return sizes


def _collect(data: Any, found: list[Tensor], on_the_way: set[int]) -> None:
    if isinstance(data, Tensor):
        found.append(data)
        return
    if id(data) in on_the_way or isinstance(data, Module):  # a batch that refers to itself, or to its model
        return
    items: Iterable[Any]
    if isinstance(data, Mapping):
        items = data.values()
    elif isinstance(data, (Sequence, Set)) and not isinstance(data, (str, bytes, bytearray, memoryview, range)):
        items = data
    elif is_dataclass(data) and not isinstance(data, type):
        items = [getattr(data, field.name, None) for field in fields(data)]  # a field may not be set yet
    elif callable(getattr(data, "to", None)) and hasattr(data, "__dict__"):
        items = vars(data).values()
    else:
        return
    on_the_way.add(id(data))
    for item in items:
        if type(item) not in _LEAVES:
            _collect(item, found, on_the_way)
    on_the_way.discard(id(data))


def _held_bytes(tensor: Tensor, device: torch.device, seen: set[tuple[torch.device, int]]) -> int:
    """Bytes of the storages behind a tensor that lie on ``device`` and were not ``seen``."""
    held_bytes = 0
    for plain in () if is_lazy(tensor) else plain_tensors(tensor):
        if is_on(plain.device, device):
            storage = plain.untyped_storage()
            key = (plain.device, storage.data_ptr())
            if key not in seen:
                seen.add(key)
                held_bytes += storage.nbytes()
    return held_bytes


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The ordinary tensors behind one: the local shard of a DTensor, indices and values of a sparse one.

    Args:
        tensor: any but a lazy parameter, which has nothing behind it.
    """
    if hasattr(tensor, "__tensor_flatten__"):  # DTensor, jagged and quantised tensors wrap others
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]  # in torch 2.13 a DTensor names its device mesh as well
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and (wrapped := tensors_in(vars(tensor))):
        inner = wrapped  # such as torch.masked.MaskedTensor, which says nothing of what it wraps
    elif tensor.layout is not torch.strided:
        inner = list(_sparse_parts(tensor))
    else:
        yield tensor
        return
    for part in inner:
        if isinstance(part, Tensor):
            yield from plain_tensors(part)


def is_on(place: torch.device, device: torch.device) -> bool:
    """Whether what lies in ``place`` counts for ``device``; a device without an index is any of its kind."""
    return place.type == device.type and device.index in (None, place.index)


def _sparse_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.sparse_coo:  # gradients of Embedding(sparse=True); indices() refuses uncoalesced ones
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()  # no storage to ask (oneDNN's own layout)
