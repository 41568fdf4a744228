"""A Trainer of either Lightning package: its names, what it has and does, and calls before methods.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from lightning_batchmem.devices.foreign_values import attributes_of
from lightning_batchmem.devices.tensors import bytes_of

_UNIFIED = "lightning.pytorch"
_STANDALONE = "pytorch_lightning"


def lightning_name(owner: object, path: str) -> Any:
    """The object at ``path``, such as ``"loops.loop._Loop"``, in the package of ``owner``.

    The owner is a trainer or a loop, and its class decides which Lightning package is used.
    """
    kinds = type(owner).__mro__
    is_standalone = any(kind.__module__.startswith(f"{_STANDALONE}.") for kind in kinds)
    package = _STANDALONE if is_standalone else _UNIFIED
    return resolve_name(f"{package}.{path}")


def in_every_package(*paths: str) -> tuple[Any, ...]:
    """The objects at these paths, in each Lightning package that is imported."""
    packages = [package for package in (_UNIFIED, _STANDALONE) if package in sys.modules]
    return tuple(resolve_name(f"{package}.{path}") for package in packages for path in paths)


def end_of_tuning(trainer: object) -> BaseException:
    """An exception that ends ``fit`` without an error, as after a tuner."""
    # _TunerExitException is private in lightning 2.5.0 to 2.6.6.
    exception: BaseException = lightning_name(trainer, "utilities.exceptions._TunerExitException")()
    return exception


@dataclass
class _CallsBefore:
    """Calls functions, and then a method. Unlike a closure, it can be pickled if its function can.

    Args:
        owner: the object with the method.
        method: its name.
        of_project: what a project has set in place of the method; None for the method itself.
        functions: the functions.
    """

    owner: Any
    method: str
    of_project: Any
    functions: list[Callable[[], object]] = field(default_factory=list)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        for function in self.functions.copy():
            function()
        if self.of_project is not None:
            return self.of_project(*arguments, **keywords)
        return getattr(type(self.owner), self.method)(self.owner, *arguments, **keywords)

    def remove(self, function: Callable[[], object]) -> None:
        """Stop calling this function; after the last one the owner is as it was before."""
        if function in self.functions:
            self.functions.remove(function)
        # A project may have set something else since.
        if not self.functions and vars(self.owner).get(self.method) is self:
            delattr(self.owner, self.method)
            if self.of_project is not None:
                setattr(self.owner, self.method, self.of_project)


def call_before(owner: Any, method: str, function: Callable[[], object]) -> Callable[[], None]:
    """Call a function before each ``owner.method()``; returns a function that ends this."""
    calls = vars(owner).get(method)
    # Several callers share the attribute.
    if not isinstance(calls, _CallsBefore):
        calls = _CallsBefore(owner, method, calls)
        setattr(owner, method, calls)
    calls.functions.append(function)
    return partial(calls.remove, function)


def call_once_before(owner: Any, method: str, function: Callable[[], object]) -> Callable[[], None]:
    """Call a function before the next ``owner.method()`` only; returns one that cancels it."""

    def call() -> None:
        cancel()
        function()

    cancel = call_before(owner, method, call)
    return cancel


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give ``owner`` other attributes for a while; methods of its class are replaced too."""
    # The object itself stays, since a step may look for it by identity, type or place.
    of_owner = attributes_of(owner)
    before = {name: of_owner[name] for name in attributes if name in of_owner}
    of_owner.update(attributes)
    try:
        yield
    finally:
        of_owner.update(before)
        for name in attributes.keys() - before.keys():
            of_owner.pop(name, None)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def set_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    """Give the trainer other callbacks."""
    trainer.callbacks = callbacks  # type: ignore[attr-defined]


def is_one_of_several(callback: Any, trainer: Trainer, kind: type[Callback]) -> bool:
    """Whether the trainer has another callback of this kind.

    Raises:
        ValueError: where Lightning calls a hook of a class, with the trainer as its object.
    """
    if isinstance(callback, in_every_package("trainer.Trainer")):
        # The next hook of the class would raise an error of Python after this one.
        set_callbacks(
            callback, [one for one in callbacks_of(callback) if not isinstance(one, type)]
        )
        raise ValueError(
            "callbacks must have an object, got a class: write BatchFinder() or MemoryProfiler()"
        )
    return sum(isinstance(one, kind) for one in callbacks_of(trainer)) > 1


def weight_average_bytes(trainer: Trainer) -> int:
    """Bytes that StochasticWeightAveraging will take on the trainer's device.

    Until then its copy of the weights is on the CPU.
    """
    kinds = in_every_package("callbacks.StochasticWeightAveraging")
    device = trainer.strategy.root_device
    # _device is private in lightning 2.5.0 to 2.6.6. None stands for the device of the module.
    moves = any(
        torch.device(callback._device or device).type == device.type
        for callback in callbacks_of(trainer)
        if isinstance(callback, kinds)
    )
    return bytes_of(trainer.lightning_module.parameters()) if moves else 0


def datamodules_of(trainer: Trainer) -> list[LightningDataModule]:
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    return [] if datamodule is None else [datamodule]


# Attributes of a strategy with optimizers. A search configures these again.
OF_OPTIMIZERS = ("_optimizers", "_lightning_optimizers", "lr_scheduler_configs")


def parts_of(trainer: Any) -> list[object]:
    """The trainer and its parts of Lightning's own kinds, without callbacks, loggers and data.

    The callbacks of this package are part of it, because their state is that of the search.
    """
    if not isinstance(trainer, in_every_package("trainer.Trainer")):
        return [] if trainer is None else [trainer]
    not_parts = in_every_package(
        "callbacks.Callback", "loggers.Logger", "core.LightningDataModule", "core.LightningModule"
    )
    parts = [*vars(trainer).values(), *vars(trainer.strategy).values()]
    others = [
        part
        for part in parts
        if _has_kind_of(part, "lightning", "pytorch_lightning", "lightning_fabric")
        and not isinstance(part, not_parts)
    ]
    others += [one for one in callbacks_of(trainer) if _has_kind_of(one, "lightning_batchmem")]
    return [trainer, trainer.strategy, trainer.precision_plugin, trainer.accelerator, *others]


def _has_kind_of(value: object, *packages: str) -> bool:
    kinds = type(value).__mro__
    return any(kind.__module__.partition(".")[0] in packages for kind in kinds)


def call_module_hook(trainer: Trainer, hook: str) -> None:
    """Call a hook of the module as Lightning does: profiled, and with the name in ``self.log``."""
    lightning_name(trainer, "trainer.call._call_lightning_module_hook")(trainer, hook)


def logger_connector(trainer: Trainer) -> Any:
    """The part of a Trainer that collects the values of ``self.log``."""
    return trainer._logger_connector


def results_of(loop: Any) -> Any:
    """The values of ``self.log`` that a loop collects; ``None`` where it collects none."""
    # The loop of an epoch collects the results. The loop around it only shows them.
    return vars(loop).get("_results")


def renew_results(loop: Any) -> None:
    """Give a loop that collects values new results, which have seen no batch."""
    results = results_of(loop)
    if results is not None:
        loop._results = type(results)(training=results.training)


def accumulates(trainer: Trainer) -> bool:
    """Whether the current batch only adds to the gradients, and no optimizer steps after it."""
    return trainer.fit_loop._should_accumulate()


def count_optimizer_step(trainer: Trainer) -> None:
    """Count a batch after which an optimizer stepped, as Lightning does after validating."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += 1


def stop_progress_bar(trainer: Trainer, module: LightningModule, stage: str) -> None:
    """End the progress bar of Lightning; a subclass of the user is torn down only by Lightning."""
    bar = trainer.progress_bar_callback
    kind: Any
    for kind in type(bar).__mro__:
        if kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
            kind.teardown(bar, trainer, module, stage)
            return


def is_of_lightning(owner: object, method: str) -> bool:
    """Whether a method of a logger or a callback was written in Lightning or in this package."""
    found = attributes_of(owner).get(method, getattr(type(owner), method, None))
    return str(getattr(found, "__module__", "")).partition(".")[0] in (
        "lightning",
        "pytorch_lightning",
        "lightning_batchmem",
    )


def has_hook_of_user(owner: object, *beginnings: str) -> bool:
    """Whether the user has written a hook of a callback or module with such a beginning."""
    names = [name for name in dir(Callback) if name.startswith(beginnings)]
    return not all(is_of_lightning(owner, name) for name in names)


def trains_no_more(trainer: Trainer) -> bool:
    """Whether a training has no step to run, because it has ended or has none at all."""
    max_epochs = trainer.max_epochs
    if 0 in (max_epochs, trainer.max_steps, trainer.limit_train_batches):
        return True
    if trainer.ckpt_path is not None:
        # A checkpoint may be of an earlier epoch.
        return False
    has_epochs = max_epochs is None or max_epochs < 0 or trainer.current_epoch < max_epochs
    has_steps = trainer.max_steps < 0 or trainer.global_step < trainer.max_steps
    return not (has_epochs and has_steps)


def is_fast_dev_run(trainer: Trainer) -> bool:
    # mypy does not see attributes that Lightning sets outside the class Trainer.
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def idle_callbacks_text(trainer: Trainer) -> str:
    """A sentence about callbacks that may keep tensors, and do nothing in a search."""
    hooks = ("on_train", "on_validation", "on_before", "on_after")
    names = [type(one).__name__ for one in callbacks_of(trainer) if has_hook_of_user(one, *hooks)]
    if not names:
        return ""
    return (
        "Callbacks do nothing in a search, so tensors that these keep are not counted:"
        f" {', '.join(dict.fromkeys(names))}. Leave room for them with max_batch_size."
    )
