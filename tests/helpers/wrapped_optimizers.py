"""Optimizers of projects, which hold another one and do not call ``Optimizer.__init__``."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import torch
from torch.optim import Optimizer


class _Wrapper(Optimizer):
    """Asks the optimizer inside, and does not call ``Optimizer.__init__``."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


class Lookahead(_Wrapper):
    """Many copies of it have nothing of what ``Optimizer.__init__`` makes.

    Every second step moves the weights halfway back to slow copies.
    """

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        self.state = defaultdict(dict)
        self.steps = 0

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.steps += 1
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                slow = state.setdefault("slow", weight.detach().clone())
                if self.steps % 2 == 0:
                    slow.lerp_(weight.detach(), 0.5)
                    weight.data.copy_(slow)
        return loss


class TimmLookahead(Lookahead):
    """timm's has the dictionaries of hooks, and nothing calls the hooks."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    def step(self, closure=None):
        return super().step(closure)


class Delegating(_Wrapper):
    """Asks the optimizer inside for everything, as accelerate's AcceleratedOptimizer does."""

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        self.optimizer.step(closure)


class Several(Delegating):
    """Holds its optimizers in a list, and the wrapper around the first one."""

    def __init__(self, optimizer):
        super().__init__(None)
        self.optimizers = [Delegating(optimizer)]

    param_groups = property(lambda self: self.optimizers[0].param_groups)
    state = property(lambda self: self.optimizers[0].state)
    defaults = property(lambda self: self.optimizers[0].defaults)

    def step(self, closure=None):
        self.optimizers[0].step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizers[0].zero_grad(set_to_none)


class ByHand(Optimizer):
    """SGD with momentum, without a hook anywhere."""

    def __init__(self, weights):
        self.param_groups = [{"params": list(weights), "lr": 0.1}]
        self.defaults = {"lr": 0.1}
        self.state = defaultdict(dict)

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                momentum.mul_(0.9).add_(weight.grad)
                weight.data.add_(momentum, alpha=-group["lr"])
        return loss

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad = None

    def state_dict(self):
        return {}


def adam(weights):
    return torch.optim.Adam(weights, lr=0.01)


WRAPPED = {
    "Lookahead": lambda weights: Lookahead(adam(weights)),
    "timm's Lookahead": lambda weights: TimmLookahead(adam(weights)),
    "delegating": lambda weights: Delegating(adam(weights)),
    "in a list": lambda weights: Several(adam(weights)),
    "two wrappers": lambda weights: Lookahead(Delegating(adam(weights))),
    "no hook": ByHand,
}
"""The name of each kind, with a function that makes one for weights."""
