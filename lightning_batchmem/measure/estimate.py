"""Estimate by arithmetic what a training step holds; :mod:`.breakdown` measures it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_batchmem.measure.breakdown import is_on, plain_tensors, tensors_in


@dataclass(frozen=True)
class Estimate:
    """Elements times bytes per element, for the parts of a step that have such a rule; activations have none.

    The fields are named as in :class:`lightning_batchmem.measure.breakdown.MemoryBreakdown`.

    Args:
        parameters_bytes: parameters and buffers of the module.
        gradients_bytes: one dense gradient for every trainable parameter of the module or of an optimizer.
        optimizer_state_bytes: what the optimizers keep once they have stepped, and parameters that only they know
            (master copies); ``None`` where an optimizer has no rule here.
        batch_bytes: the tensors of the batch.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int | None
    batch_bytes: int


@dataclass(frozen=True)
class _Rule:
    """What an optimizer keeps for a parameter from its first step on.

    Args:
        copies: tensors with the shape and type of the parameter.
        options: each that is set in the parameter's group adds a copy.
        scalars: tensors of one element (a count of steps, mostly): float32, or float64 where that is torch's default.
        on_device: options of a group that put the scalars beside the parameter; otherwise they lie on the CPU.
        always_on_device: the scalars lie beside the parameter without an option.
        factored: a matrix or larger has a row and a column instead of the copies.
        frozen_too: parameters that do not train have state as well.
    """

    copies: int
    options: tuple[str, ...] = ()
    scalars: int = 0
    on_device: tuple[str, ...] = ()
    always_on_device: bool = False
    factored: bool = False
    frozen_too: bool = False


_ADAM = _Rule(2, options=("amsgrad",), scalars=1, on_device=("capturable", "fused"))  # exp_avg, exp_avg_sq

# Source: what `_init_group` of each class (`step` of SGD and SparseAdam, `__init__` of Adagrad) puts into `self.state`,
# read in torch 2.5.1 and 2.13, where it is the same. LBFGS has no rule: its history grows over the steps.
_RULES: dict[type[Optimizer], _Rule] = {
    torch.optim.SGD: _Rule(0, options=("momentum",)),  # momentum_buffer
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.NAdam: _Rule(2, scalars=2, on_device=("capturable",)),  # as Adam; scalars step and mu_product
    torch.optim.RAdam: _Rule(2, scalars=1, on_device=("capturable",)),  # as Adam
    torch.optim.Adamax: _Rule(2, scalars=1, on_device=("capturable",)),  # exp_avg, exp_inf
    torch.optim.SparseAdam: _Rule(2),  # exp_avg, exp_avg_sq, dense; its step is an int
    torch.optim.RMSprop: _Rule(1, options=("momentum", "centered"), scalars=1, on_device=("capturable",)),  # square_avg
    torch.optim.Adagrad: _Rule(1, scalars=1, on_device=("fused",), frozen_too=True),  # sum, made with the optimizer
    torch.optim.Adadelta: _Rule(2, scalars=1, on_device=("capturable",)),  # square_avg, acc_delta
    torch.optim.ASGD: _Rule(1, scalars=3, always_on_device=True),  # ax; scalars step, eta and mu
    torch.optim.Rprop: _Rule(2, scalars=1, on_device=("capturable",)),  # prev, step_size
    torch.optim.Adafactor: _Rule(1, scalars=1, factored=True),  # row_var and col_var, or variance
}
if hasattr(torch.optim, "Muon"):  # not in torch 2.5.1
    _RULES[torch.optim.Muon] = _Rule(1)  # momentum_buffer, whatever the momentum


def estimate_parts(module: Module, optimizers: Iterable[object], batch: object, device: torch.device) -> Estimate:
    """What a training step holds by the rule of thumb: parameters times bytes, times two more for Adam, and so on.

    Nothing is looked up that a step has allocated: a module that has not trained yet has the same estimate as later.
    Where the measurement is lower, something spares memory (gradients freed in backward, a parameter that no loss
    reaches); where it is higher, something is kept twice. A parameter that is shared counts once. Gradients that are
    sparse are smaller than estimated, and so is the momentum that SGD keeps of them.

    Args:
        module: the module that is trained.
        optimizers: its optimizers, as torch's or in Lightning's wrapper. A subclass of one of torch's counts as that
            one as long as it does not override its step. Any other, and what is no torch optimizer at all (a
            strategy's may be none), makes the state unknown.
        batch: the batch of the step, however nested.
        device: what lies elsewhere is not counted; a DTensor counts with its local shard.

    Returns:
        The bytes of each part.

    Example:
        >>> linear = torch.nn.Linear(3, 5)  # 20 parameters of 4 bytes; Adam counts the steps of weight and bias
        >>> estimate_parts(linear, [torch.optim.Adam(linear.parameters())], torch.ones(2, 3), torch.device("cpu"))
        Estimate(parameters_bytes=80, gradients_bytes=80, optimizer_state_bytes=168, batch_bytes=24)
    """
    unwrapped = [one.optimizer if isinstance(one, LightningOptimizer) else one for one in optimizers]
    known = [one for one in unwrapped if isinstance(one, Optimizer)]
    weights = list(module.parameters())
    own = {id(weight) for weight in weights}
    in_groups = {id(tensor): tensor for tensor in tensors_in([one.param_groups for one in known]) if tensor.is_leaf}
    masters = [tensor for key, tensor in in_groups.items() if key not in own]
    trainable = [tensor for tensor in (*weights, *masters) if tensor.requires_grad]
    state = sum(_bytes_on(tensor, device) for tensor in masters)
    by_rule = [_state_bytes(one, device) for one in known]
    counted = [number for number in by_rule if number is not None]
    return Estimate(
        parameters_bytes=sum(_bytes_on(tensor, device) for tensor in (*weights, *module.buffers())),
        gradients_bytes=sum(_bytes_on(tensor, device) for tensor in trainable),
        optimizer_state_bytes=state + sum(counted) if len(counted) == len(unwrapped) else None,
        batch_bytes=sum(_bytes_on(tensor, device) for tensor in {id(one): one for one in tensors_in(batch)}.values()),
    )


def _state_bytes(optimizer: Optimizer, device: torch.device) -> int | None:
    """Bytes of an optimizer's state on ``device``; ``None`` for one without a rule."""
    rule = _rule_for(type(optimizer))
    if rule is None:
        return None
    return sum(
        _state_bytes_of(parameter, group, rule, device)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (parameter.requires_grad or rule.frozen_too) and not is_lazy(parameter)
    )


def _state_bytes_of(parameter: Tensor, group: Mapping[str, Any], rule: _Rule, device: torch.device) -> int:
    beside = rule.always_on_device or any(group.get(option) for option in rule.on_device)
    scalars = rule.scalars if is_on(parameter.device if beside else torch.device("cpu"), device) else 0
    # `_get_scalar_dtype` in torch/optim/optimizer.py, torch 2.5.1 and 2.13; fused kernels take float32 only
    wide = torch.get_default_dtype() is torch.float64 and not group.get("fused")
    scalar_bytes = scalars * (torch.float64 if wide else torch.float32).itemsize
    if rule.factored and parameter.dim() > 1:
        *rest, rows, columns = parameter.shape
        # of a DTensor too: torch makes tensors of another shape than the parameter's whole on every rank
        numel = prod(rest) * (rows + columns) if is_on(parameter.device, device) else 0
        return numel * parameter.itemsize + scalar_bytes
    copies = rule.copies + sum(bool(group.get(option)) for option in rule.options)
    return copies * _bytes_on(parameter, device) + scalar_bytes


def _rule_for(kind: type[Optimizer]) -> _Rule | None:
    """The rule of a class or of the nearest class above it, where it makes its state in the same code."""
    for above in kind.__mro__:
        if rule := _RULES.get(above):
            return rule if _state_code(kind) == _state_code(above) else None
    return None


def _state_code(kind: type[Optimizer]) -> tuple[object, object]:
    # torch wraps `step` of a class, or of the first subclass to be made, for its hooks and for the profiler
    return inspect.unwrap(kind.step), getattr(kind, "_init_group", None)


def _bytes_on(tensor: Tensor, device: torch.device) -> int:
    """Bytes of a tensor's elements, as far as they lie on ``device``."""
    return sum(plain.nbytes for plain in plain_tensors(tensor) if is_on(plain.device, device))
