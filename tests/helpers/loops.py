"""Training loops in plain PyTorch, for searches that must leave no trace in them."""

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR

from tests.helpers.wrapped_optimizers import Delegating, TimmLookahead

FEATURES = 6


@dataclass
class Loop:
    """A loop, and everything that it changes."""

    model: Any
    optimizer: Any
    step: Any
    make_batch: Any
    state: list = field(default_factory=list)

    def train(self, steps=4):
        """Train for a few steps on batches of four samples; returns what is left."""
        losses = [self.step(self.make_batch(4)) for _ in range(steps)]
        return {"losses": losses, **self.left()}

    def left(self):
        models = self.model if isinstance(self.model, list) else [self.model]
        optimizers = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        holders = [one for one in self.state if hasattr(one, "state_dict")]
        return {
            "weights": [dict(model.state_dict()) for model in models],
            "flags": [module.training for model in models for module in model.modules()],
            "gradients": [p.grad for model in models for p in model.parameters()],
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "state": [one.state_dict() for one in holders],
            "generators": [one.get_state() for one in self.state if hasattr(one, "get_state")],
            "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1]),
        }


def network():
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)
    )


def random_batch(size):
    return torch.randn(size, FEATURES), torch.randn(size, 1)


def plain(model, optimizer, **changes):
    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Loop(model, optimizer, **{"step": step, "make_batch": random_batch, **changes})


def sgd():
    model = network()
    return plain(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def wrapped():
    """The optimizer holds another one, and does not call ``Optimizer.__init__``."""
    model = network()
    return plain(model, TimmLookahead(Delegating(torch.optim.Adam(model.parameters()))))


def gan():
    generator = network()
    discriminator = nn.Linear(1, 1)
    optimizers = [torch.optim.Adam(one.parameters()) for one in (generator, discriminator)]

    def step(batch):
        x, y = batch
        optimizers[1].zero_grad()
        fake = generator(x)
        loss = discriminator(y).mean() - discriminator(fake.detach()).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        generated = discriminator(fake).mean()
        generated.backward()
        optimizers[0].step()
        return (loss + generated).detach()

    return Loop([generator, discriminator], optimizers, step, random_batch)


def scaled():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Loop(model, optimizer, step, random_batch, [scaler])


def accumulated():
    """Gradients of two halves, left in place after the step and dropped before the next one."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch):
        model.zero_grad(set_to_none=False)
        total = torch.zeros(())
        for x, y in zip(*(part.chunk(2) for part in batch), strict=True):
            loss = functional.mse_loss(model(x), y) / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    # A half of one sample is an error to BatchNorm.
    model[1] = nn.LayerNorm(8)
    # These gradients are filled before the search.
    model[0].weight.grad = torch.ones(8, FEATURES)
    return Loop(model, optimizer, step, random_batch)


def across_steps():
    """Gradients are summed over two calls of the step, which counts them."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    counts = {"calls": 0}

    def step(batch):
        x, y = batch
        counts["calls"] += 1
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        if counts["calls"] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Loop(model, optimizer, step, random_batch, [counts])


def compiled(backend):
    def make():
        model = network()
        wrapper = torch.compile(model, backend=backend)
        return plain(wrapper, torch.optim.Adam(model.parameters()))

    return make


def lbfgs():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(batch):
        x, y = batch

        def closure():
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return Loop(model, optimizer, step, random_batch)


def scheduled():
    """A schedule of six steps; a search has more."""
    loop = sgd()
    scheduler = OneCycleLR(loop.optimizer, max_lr=0.1, total_steps=6)
    step_of_loop = loop.step

    def step(batch):
        loss = step_of_loop(batch)
        scheduler.step()
        return loss

    loop.step = step
    loop.state = [scheduler]
    return loop


class Average:
    """An average of weights that is not a module."""

    def __init__(self, model):
        self.shadow = {name: value.clone() for name, value in model.state_dict().items()}
        self.updates = 0

    def update(self, model):
        self.updates += 1
        for name, value in model.state_dict().items():
            # New tensors take the place of the old ones.
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * value

    def state_dict(self):
        return {"updates": self.updates, **self.shadow}


def averaged():
    loop = sgd()
    average = Average(loop.model)
    copied = torch.optim.swa_utils.AveragedModel(loop.model)
    step_of_loop = loop.step

    def step(batch):
        loss = step_of_loop(batch)
        average.update(loop.model)
        copied.update_parameters(loop.model)
        return loss

    loop.step = step
    loop.state = [average, copied]
    return loop


def several_models():
    encoder = network()
    teacher = copy.deepcopy(encoder).eval().requires_grad_(False)
    head = nn.Linear(1, 1)
    optimizer = torch.optim.RMSprop([*encoder.parameters(), *head.parameters()])

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        hidden = encoder(x)
        loss = functional.mse_loss(head(hidden), y) + functional.mse_loss(hidden, teacher(x))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for own, other in zip(teacher.parameters(), encoder.parameters(), strict=True):
                own.lerp_(other, 0.1)
        return loss.detach()

    return Loop([encoder, teacher, head], [optimizer], step, random_batch)


def filled():
    """The optimizer has state before the search."""
    model = network()
    loop = plain(model, torch.optim.Adam(model.parameters(), amsgrad=True))
    loop.train(2)
    return loop


def random_numbers():
    """Numbers of all generators, flags and attributes that a step changes."""
    model = network()
    generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.Adam(model.parameters())

    def make_batch(size):
        x = torch.randn(size, FEATURES, generator=generator)
        return x + random.random(), x.sum(1, keepdim=True) + float(np.random.rand())

    def step(batch):
        x, y = batch
        model.train(not model.training)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Loop(model, optimizer, step, make_batch, [generator])


LOOPS = {
    "sgd": sgd,
    "wrapped": wrapped,
    "gan": gan,
    "scaled": scaled,
    "accumulated": accumulated,
    "across_steps": across_steps,
    "compiled_eager": compiled("eager"),
    "compiled_aot": compiled("aot_eager"),
    "lbfgs": lbfgs,
    "scheduled": scheduled,
    "averaged": averaged,
    "several_models": several_models,
    "filled": filled,
    "random_numbers": random_numbers,
}


def seeded(make):
    """A new loop, whose weights and random numbers are those of every other."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    return make()
