"""The steps of one network on a simulated device, in a loop without a Trainer."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_batchmem import Plan, find_batch_size
from lightning_batchmem.loop.session import LoopSession
from tests.helpers.simulated_cuda.device import SimulatedCuda
from tests.helpers.simulated_cuda.search import simulated_module


def search_loop(device: SimulatedCuda, **options: Any) -> Plan:
    """Search in a loop whose steps are those of ``simulated_module`` in a Trainer."""
    module = simulated_module(device)
    optimizers = module.configure_optimizers()
    assert isinstance(optimizers, list)

    def step(batch: Tensor) -> None:
        device.begin_step(len(batch))
        for number, optimizer in enumerate(optimizers):
            slots = device.trace.optimizers[number]

            def closure(number: int = number, slots: Any = slots) -> Tensor:
                loss: Tensor = module.loss(number)
                if len(optimizers) == 1:
                    module.zero_grad()
                else:
                    device.drop(slots.gradients)
                # The storages of backward exist from its begin, which autograd marks.
                hook = loss.register_hook(lambda _: device.run_phase("backward", number))
                # torch does not annotate this method.
                loss.backward()  # type: ignore[no-untyped-call]
                hook.remove()
                return loss

            optimizer.step(closure)

    class Session(LoopSession):
        """A session that restores the device too, which has no tensors of the loop."""

        def again(self) -> None:
            super().again()
            device.drop(device.trace.gradients | device.trace.states)

    path = "lightning_batchmem.loop.search"
    with (
        mock.patch(f"{path}.device_memory_for", lambda _: device),
        mock.patch(f"{path}.LoopSession", Session),
    ):
        return find_batch_size(
            step, torch.zeros, model=nn.ModuleList(module.layers), optimizer=optimizers, **options
        )
