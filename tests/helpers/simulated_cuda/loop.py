"""The steps of one network on a simulated device, in a loop without a Trainer."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_batchmem import Plan, find_batch_size
from lightning_batchmem.loop.session import LoopSession
from tests.helpers.simulated_cuda.device import SimulatedCuda
from tests.helpers.simulated_cuda.search import simulated_module


def search_loop(device: SimulatedCuda, **options: Any) -> Plan:
    """Search in a loop whose steps are those of ``simulated_module`` in a Trainer."""
    # The layers and the methods of this module have no annotations.
    module: Any = simulated_module(device)
    optimizers = module.configure_optimizers()

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
                def replay(_: Tensor) -> None:
                    device.run_phase("backward", number)

                # torch does not annotate these methods.
                loss.register_hook(replay)  # type: ignore[no-untyped-call]
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            optimizer.step(closure)

    class Session(LoopSession):
        """A session that restores the device too, which has no tensors of the loop."""

        def again(self) -> None:
            super().again()
            device.drop(device.trace.gradients | device.trace.states)

    path = "lightning_batchmem.loop.search"
    with (
        mock.patch(f"{path}.device_memory_for", return_value=device),
        mock.patch(f"{path}.LoopSession", Session),
    ):
        return find_batch_size(
            step, torch.zeros, model=module.layers, optimizer=optimizers, **options
        )
