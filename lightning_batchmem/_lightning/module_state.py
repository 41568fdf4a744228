"""Keep everything that a probing step changes, and put it back.

Read in lightning 2.5.0 and 2.6.6; the private attributes used are named where they are used.
"""

from __future__ import annotations

import copy
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device  # private in 2.5.0 to 2.6.6
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states  # private in 2.5.0 to 2.6.6
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.loop import _Loop  # private in 2.5.0 to 2.6.6
from lightning.pytorch.loops.progress import _BaseProgress  # private in 2.5.0 to 2.6.6
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_batchmem._lightning.attributes import AttributeState
from lightning_batchmem.measure.breakdown import plain_tensors

Loop = _Loop


class RandomStates:
    """The random number generators of the process (python, numpy, torch, every CUDA device) at one moment."""

    def __init__(self) -> None:
        self._states = _collect_rng_states()

    def restore(self) -> None:
        """Set every generator back to that moment."""
        _set_rng_states(self._states)


def record_before_optimizers(trainer: Trainer, keep: Callable[[], None]) -> Callable[[], object]:
    """Call ``keep`` just before ``configure_optimizers`` runs for the first time.

    That hook may draw numbers itself, or ask for ``estimated_stepping_batches``, which builds the train iterator and
    draws too, from a generator of the loader's own as well. To configure the optimizers again as if it were the first
    time, one has to go back to before it.

    Returns:
        To be called when ``fit`` ends before that: takes the recording away.
    """
    strategy = trainer.strategy
    original = strategy.setup_optimizers

    def stop_recording() -> object:
        return vars(strategy).pop("setup_optimizers", None)  # the class's own method is in force again

    def recording(trainer: Trainer) -> None:
        stop_recording()
        if trainer.fit_loop._combined_loader is not None:
            rank_zero_warn(
                "the training loader was built before configure_optimizers (by estimated_stepping_batches in a setup"
                " hook, say): what was derived from it is that of the old batch size, and the run may differ from one"
                " with BatchFinder's size hard-coded"
            )
        keep()
        original(trainer)

    vars(strategy)["setup_optimizers"] = recording
    return stop_recording


def freeze_schedulers(trainer: Trainer) -> None:
    """Keep the learning rate as it is in steps of a search; these schedulers are configured again afterwards."""
    for config in trainer.strategy.lr_scheduler_configs:
        vars(config.scheduler)["step"] = _stand_still


def configure_optimizers_again(trainer: Trainer) -> None:
    """Build optimizers and schedulers anew, as ``Strategy.setup`` does, so that they see the new batch size."""
    strategy = trainer.strategy
    strategy.setup_optimizers(trainer)
    strategy.setup_precision_plugin()
    _optimizers_to_device(strategy.optimizers, strategy.root_device)


class SavedStorages:
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
        weakref.finalize(self, self._file.close)  # also where a run ends before its search
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
        """Give every storage its bytes again; may be called repeatedly."""
        for flat, copied in self._on_device:
            flat.copy_(copied)
        self._file.seek(0)
        for flat in self._on_host:
            _read_all(self._file, flat)


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
    """Write back what differs: memory that was never changed may be mapped read-only, or shared until it is written."""
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        chunk = flat[start : start + _CHUNK_BYTES]
        buffer = bytearray(chunk.numel())
        rest = memoryview(buffer)
        while rest:
            count = file.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                raise OSError("the temporary copy of the weights is shorter than what was written to it")
            rest = rest[count:]
        kept = torch.frombuffer(buffer, dtype=torch.uint8)
        if not torch.equal(chunk, kept):
            chunk.copy_(kept)


class ModuleState:
    """A module as it is: parameters, buffers, gradients, flags, hooks and plain attributes.

    Args:
        module: the LightningModule.
        others: what else is kept in the same way: data module, optimizers, schedulers.

    Attributes:
        not_restorable: what cannot be put back, for people.
        schedulers: the learning-rate schedulers that the attributes lead to.

    Raises:
        ValueError: when a parameter is not initialized yet.
    """

    def __init__(self, module: LightningModule, others: Iterable[object] = ()) -> None:
        for name, parameter in module.named_parameters():
            if is_lazy(parameter):
                raise ValueError(
                    f"every parameter must be initialized before the search, got the lazy parameter {name!r};"
                    " run one forward pass in configure_model or before fit"
                )
        self._attributes = AttributeState([module, *others])
        self.not_restorable = self._attributes.not_restorable
        self.schedulers = self._attributes.schedulers
        tensors = self._attributes.tensors
        # hooks on tensors lie in no dictionary (private in torch 2.5.1 to 2.13)
        self._hooks = [
            (t, name, dict(hooks) if (hooks := getattr(t, name)) is not None else None)
            for t in tensors
            if t.is_leaf
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        ]
        self._aliases = [(t, t.detach(), t.requires_grad) for t in tensors if t.is_leaf]
        self._gradients = [
            (t, t.grad.detach().to("cpu", copy=True)) for t in tensors if t.is_leaf and t.grad is not None
        ]
        # those behind a DTensor: this rank's shard, where it lies
        self._storages = SavedStorages(plain for t in tensors if not is_lazy(t) for plain in plain_tensors(t))

    def restore(self) -> None:
        """Make the module what it was."""
        refused = self._attributes.restore()
        for tensor, alias, requires_grad in self._aliases:
            if tensor.grad_fn is not None:
                tensor.detach_()  # a step wrote into it what hangs on its graph
            if tensor.data_ptr() != alias.data_ptr() or tensor.shape != alias.shape:
                tensor.data = alias
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            tensor.grad = None
        for tensor, name, hooks in self._hooks:
            _put_hooks_back(tensor, name, hooks)
        self._storages.write_back()
        for tensor, gradient in self._gradients:
            tensor.grad = gradient.to(tensor.device)
        if refused:
            rank_zero_warn(f"BatchFinder could not put back: {'; '.join(refused)}")


def _put_hooks_back(tensor: Tensor, name: str, kept: dict[int, Any] | None) -> None:
    hooks = getattr(tensor, name)
    if hooks is None or (kept is not None and dict(hooks) == kept):
        return
    hooks.clear()  # the same dictionary: handles that the user holds refer to it
    hooks.update(kept or {})


class TrainerState:
    """The trainer's own attributes, its loops' progress and results, its connectors and the gradient scaler.

    Private attributes read in lightning 2.5.0 and 2.6.6: the loops, those below ``fit_loop`` too, their ``_results``,
    ``_logger_connector``.

    Args:
        trainer: before any loop has run.
        loop: what is about to run: ``fit_loop``, ``validate_loop``, ``test_loop`` or ``predict_loop``.
        schedulers: the module's own, beside those that the strategy knows.
    """

    def __init__(self, trainer: Trainer, loop: _Loop, schedulers: Iterable[Any] = ()) -> None:
        self._trainer = trainer
        holders: list[Any] = [trainer, trainer.state, trainer._logger_connector, *_loops(loop)]
        self._kept = [(holder, dict(vars(holder))) for holder in holders]
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)  # torch.amp.GradScaler of MixedPrecision
        self.lend_scaler()
        for one in _loops(loop):
            for name, value in list(vars(one).items()):
                if isinstance(value, _BaseProgress):
                    setattr(one, name, copy.deepcopy(value))
                elif name == "_results" and value is not None:  # a prediction has none
                    vars(one)[name] = type(value)(training=value.training)
        for name, value in list(vars(trainer._logger_connector).items()):
            if isinstance(value, dict):
                setattr(trainer._logger_connector, name, dict(value))
        known = [*schedulers, *(config.scheduler for config in trainer.strategy.lr_scheduler_configs)]
        self._schedulers = [(one, dict(vars(one))) for one in {id(one): one for one in known}.values()]
        for scheduler, _ in self._schedulers:  # made for the old size, it may end before the probes do
            vars(scheduler)["step"] = _stand_still

    def lend_scaler(self) -> None:
        """Give the probes a fresh copy of the gradient scaler (at the start, and after a step that was cut short)."""
        if self._scaler is not None:
            self._trainer.precision_plugin.scaler = copy.deepcopy(self._scaler)  # type: ignore[attr-defined]

    def restore(self) -> None:
        """Make the trainer what it was."""
        for holder, attributes in self._kept:
            vars(holder).clear()
            vars(holder).update(attributes)
        for scheduler, attributes in self._schedulers:
            vars(scheduler).clear()
            vars(scheduler).update(attributes)
        if self._scaler is not None:
            self._trainer.precision_plugin.scaler = self._scaler  # type: ignore[attr-defined]


def _stand_still(*_: Any, **__: Any) -> None:
    """A learning rate that stays as it is."""


def _loops(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for value in vars(loop).values():
        if isinstance(value, _Loop):
            yield from _loops(value)
