"""Keep everything that a probing step changes, and put it back.

Read in lightning 2.5.0 and 2.6.6; the private attributes used are named where they are used.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device  # private in 2.5.0 to 2.6.6
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states  # private in 2.5.0 to 2.6.6
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.loop import _Loop  # private in 2.5.0 to 2.6.6
from lightning.pytorch.loops.progress import _BaseProgress  # private in 2.5.0 to 2.6.6
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

_LARGEST_COPIED_ATTRIBUTE_BYTES = 64 * 2**20
"""A plain tensor attribute above this is data rather than state: a copy of it would change what is being measured."""

_SHARED_TYPES = (
    nn.Parameter,
    nn.Module,
    Trainer,
    Callback,
    Logger,
    LightningDataModule,
    Dataset,
    DataLoader,
    Optimizer,
    LRScheduler,
    torch.Generator,
)
"""Attributes of these types are either kept by other means or not the module's to change."""


def _is_shared(value: object) -> bool:
    if isinstance(value, _SHARED_TYPES):
        return True
    return isinstance(value, Tensor) and value.nbytes > _LARGEST_COPIED_ATTRIBUTE_BYTES


class RandomStates:
    """The random number generators of the process (python, numpy, torch, every CUDA device) at one moment."""

    def __init__(self) -> None:
        self._states = _collect_rng_states()

    def rewind(self) -> None:
        """Set every generator back to that moment."""
        _set_rng_states(self._states)


def record_before_optimizers(trainer: Trainer, keep: Callable[[RandomStates], None]) -> None:
    """Hand ``keep`` the random states as they are just before ``configure_optimizers`` runs for the first time.

    That hook may draw numbers itself, or ask for ``estimated_stepping_batches``, which builds the train iterator and
    draws too. To configure the optimizers again as if it were the first time, one has to rewind to before it.
    """
    strategy = trainer.strategy
    original = strategy.setup_optimizers

    def recording(trainer: Trainer) -> None:
        del strategy.__dict__["setup_optimizers"]  # the class's own method is in force again
        keep(RandomStates())
        original(trainer)

    strategy.__dict__["setup_optimizers"] = recording


def configure_optimizers_again(trainer: Trainer) -> None:
    """Build optimizers and schedulers anew, as ``Strategy.setup`` does, so that they see the new batch size."""
    strategy = trainer.strategy
    strategy.setup_optimizers(trainer)
    strategy.setup_precision_plugin()
    _optimizers_to_device(strategy.optimizers, strategy.root_device)


class KeptStorages:
    """The bytes of tensors' storages, kept where they do not disturb what is measured, and written back in place.

    For a device the copy lies in host memory; for the host in an unlinked temporary file, since a copy in memory would
    raise the resident set that the probes measure. A storage shared by several tensors is kept once.

    Args:
        tensors: whose storages to keep.
    """

    def __init__(self, tensors: Iterator[Tensor]) -> None:
        self._on_device: list[tuple[Tensor, Tensor]] = []
        self._on_host: list[Tensor] = []
        self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (lives as long as the search)
        seen: set[tuple[torch.device, int]] = set()
        for tensor in tensors:
            flat = _flat_bytes(tensor)
            key = (flat.device, flat.data_ptr())
            if flat.numel() == 0 or key in seen:
                continue
            seen.add(key)
            if flat.device.type == "cpu":
                _write_all(self._file, flat)
                self._on_host.append(flat)
            else:
                self._on_device.append((flat, flat.cpu()))

    def write_back(self) -> None:
        """Give every storage the bytes it had, and forget them."""
        for flat, copied in self._on_device:
            flat.copy_(copied)
        with self._file as file:
            file.seek(0)
            for flat in self._on_host:
                _read_all(file, flat)
        self._on_device.clear()
        self._on_host.clear()


def _flat_bytes(tensor: Tensor) -> Tensor:
    """All bytes of the storage behind ``tensor``, as a flat uint8 tensor that shares them."""
    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


_CHUNK_BYTES = 2**24  # one read or write of Linux moves at most 2 GiB; small chunks keep the page cache's share low


def _write_all(file: IO[bytes], flat: Tensor) -> None:
    view = memoryview(flat.numpy())  # type: ignore[arg-type]  # an array of bytes is a buffer
    for start in range(0, len(view), _CHUNK_BYTES):
        piece = view[start : start + _CHUNK_BYTES]
        while piece:
            piece = piece[file.write(piece) :]


def _read_all(file: IO[bytes], flat: Tensor) -> None:
    view = memoryview(flat.numpy())  # type: ignore[arg-type]  # an array of bytes is a buffer
    while view:
        count = file.readinto(view[:_CHUNK_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise OSError("the temporary copy of the weights is shorter than what was written to it")
        view = view[count:]


class KeptModule:
    """A module's parameters, buffers, gradients, flags and plain attributes.

    Storages are written back in place. Plain attributes are handled the other way round: the probes get deep copies
    to play with, and the originals, which nobody has touched, are put back. What cannot be copied stays shared;
    ``not_restorable`` names it.

    Args:
        root: the LightningModule.
    """

    def __init__(self, root: LightningModule) -> None:
        for name, parameter in root.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise ValueError(
                    f"every parameter must be initialized before the search, got the lazy parameter {name!r};"
                    " run one forward pass in configure_model or before fit"
                )
        self.not_restorable: list[str] = []
        tensors = {id(t): t for t in [*root.parameters(), *root.buffers()]}
        self._aliases = [(t, t.detach(), t.requires_grad) for t in tensors.values()]
        self._gradients = [(t, t.grad.detach().to("cpu", copy=True)) for t in tensors.values() if t.grad is not None]
        self._storages = KeptStorages(iter(tensors.values()))
        self._attributes: list[tuple[nn.Module, dict[str, Any], dict[str, dict[Any, Any]]]] = []
        memo: dict[int, Any] = {id(t): t for t in tensors.values()}
        memo.update({id(module): module for module in root.modules()})
        memo.update(_shared_values(root))
        for path, module in root.named_modules():
            self._lend_copies(path, module, memo)

    def _lend_copies(self, path: str, module: nn.Module, memo: dict[int, Any]) -> None:
        internals = vars(nn.Module())  # _parameters, _buffers, _modules, the hook tables, training
        original = dict(vars(module))
        tables = {k: dict(v) for k, v in original.items() if k in internals and isinstance(v, dict)}
        for name, value in original.items():
            if name in internals:
                continue
            try:
                vars(module)[name] = copy.deepcopy(value, memo)
            except Exception:  # noqa: BLE001 - a user's object may refuse to be copied in any way it likes
                self.not_restorable.append(f"{path}.{name}" if path else name)
        self._attributes.append((module, original, tables))

    def put_back(self) -> None:
        """Make the module what it was."""
        for module, original, tables in self._attributes:
            vars(module).clear()
            vars(module).update(original)
            for name, table in tables.items():  # in place: handles of registered hooks refer to these very tables
                vars(module)[name].clear()
                vars(module)[name].update(table)
        for tensor, alias, requires_grad in self._aliases:
            if tensor.data_ptr() != alias.data_ptr() or tensor.shape != alias.shape:
                tensor.data = alias
            tensor.requires_grad_(requires_grad)
            tensor.grad = None
        self._storages.write_back()
        for tensor, gradient in self._gradients:
            tensor.grad = gradient.to(tensor.device)


def _shared_values(root: nn.Module) -> dict[int, Any]:
    """What a deep copy of the attributes must refer to instead of copying, by ``id``; looks one container deep."""
    shared: dict[int, Any] = {}
    for module in root.modules():
        for value in vars(module).values():
            members = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ()
            shared.update({id(item): item for item in (value, *members) if _is_shared(item)})
    return shared


class KeptTrainer:
    """The trainer's own attributes, its loops' progress and results, its connectors and the gradient scaler.

    Private attributes read in lightning 2.5.0 and 2.6.6: ``fit_loop`` and the loops below it, their ``_results``,
    ``_logger_connector``.

    Args:
        trainer: in ``on_fit_start``, before any loop has run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        holders: list[Any] = [trainer, trainer.state, trainer._logger_connector, *_loops(trainer.fit_loop)]
        self._kept = [(holder, dict(vars(holder))) for holder in holders]
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)  # torch.amp.GradScaler of MixedPrecision
        self.lend_scaler()
        for loop in _loops(trainer.fit_loop):
            for name, value in list(vars(loop).items()):
                if isinstance(value, _BaseProgress):
                    setattr(loop, name, copy.deepcopy(value))
                elif name == "_results":
                    vars(loop)[name] = type(value)(training=value.training)
        for name, value in list(vars(trainer._logger_connector).items()):
            if isinstance(value, dict):
                setattr(trainer._logger_connector, name, dict(value))

    def lend_scaler(self) -> None:
        """Give the probes a fresh copy of the gradient scaler (at the start, and after a step that was cut short)."""
        if self._scaler is not None:
            self._trainer.precision_plugin.scaler = copy.deepcopy(self._scaler)  # type: ignore[attr-defined]

    def put_back(self) -> None:
        """Make the trainer what it was."""
        for holder, attributes in self._kept:
            vars(holder).clear()
            vars(holder).update(attributes)
        if self._scaler is not None:
            self._trainer.precision_plugin.scaler = self._scaler  # type: ignore[attr-defined]


def _loops(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for value in vars(loop).values():
        if isinstance(value, _Loop):
            yield from _loops(value)
