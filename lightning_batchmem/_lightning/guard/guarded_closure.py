"""A step of Lightning's automatic optimization that runs in parts where memory runs out.

The private names used here are those of lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

import gc
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_batchmem._lightning.guard.gradients import Gradients, read_gradients
from lightning_batchmem._lightning.guard.logged_values import LoggedValues, read_values
from lightning_batchmem._lightning.guard.metric_states import MetricStates
from lightning_batchmem._lightning.hooks import replaced
from lightning_batchmem._lightning.packages import lightning_name
from lightning_batchmem.batches.split import Part, joined, split, splittable_samples
from lightning_batchmem.devices import device_memory_for
from lightning_batchmem.devices.out_of_memory import is_out_of_memory, release_traceback
from lightning_batchmem.devices.tensors import tensors_in
from lightning_batchmem.search.ranks import CollectiveDetector, CollectiveFoundError

if TYPE_CHECKING:
    from lightning_batchmem._lightning.guard.guarded_steps import GuardedSteps


class GuardedClosure:
    """Runs Lightning's closure of one step, and the batch in parts if memory runs out in it.

    Args:
        steps: the steps of the run.
        closure: Lightning's ``Closure``.
        kwargs: the arguments of ``training_step``.
        optimizer: the optimizer that steps.
        batch_idx: the number of the batch.
    """

    def __init__(
        self,
        steps: GuardedSteps,
        closure: Any,
        kwargs: OrderedDict[str, Any],
        optimizer: Optimizer,
        batch_idx: int,
    ) -> None:
        self.consume_result = closure.consume_result
        self._steps = steps
        self._trainer = steps.trainer
        self._module = steps.trainer.lightning_module
        self._closure = closure
        self._kwargs = kwargs
        self._optimizer = optimizer
        self._batch_idx = batch_idx
        # The error of the last failed attempt.
        self._error: Exception | None = None

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor | None:
        batch = self._kwargs["batch"]
        self._read()
        num_parts = self._known_parts(batch)
        if num_parts > 1:
            self._keep()
        while True:
            try:
                if num_parts == 1:
                    loss: Tensor | None = self._closure(*arguments, **keywords)
                else:
                    loss = self._run(split(batch, num_parts))
                break
            # An out-of-memory error has many types. Every other error is raised again.
            except Exception as error:
                more_parts = self._more_parts(error, batch, num_parts)
                if more_parts is None:
                    raise
                release_traceback(error)
                self._error = error
            if num_parts == 1:
                self._keep()
            self._release()
            num_parts = more_parts
        if num_parts > 1:
            self._steps.note_parts(batch, num_parts)
        return loss

    def _known_parts(self, batch: object) -> int:
        num_parts = self._steps.known_parts(batch)
        if num_parts == 1:
            return 1
        samples = splittable_samples(batch)
        return 1 if samples is None else min(num_parts, self._steps.most_parts(samples))

    def _read(self) -> None:
        """Read what a failed attempt may change; in most steps, nothing else happens."""
        model = self._trainer.strategy.model
        self._wrapper = model if isinstance(model, DistributedDataParallel) else None
        # Under accumulation only the last micro batch exchanges gradients.
        self._exchanges = self._wrapper is not None and self._wrapper.require_backward_grad_sync
        # Whether gradients are exchanged in the backward pass that runs now.
        self._is_exchanging = self._exchanges
        self._fx_name = self._module._current_fx_name
        self._error = None
        # What this step has called, also in an attempt that failed.
        self._has_cleared = False
        self._has_begun_backward = False
        # Where the step clears the gradients, none of them has to stay.
        is_cleared = self._closure._zero_grad_fn is not None
        self._gradients_before = [] if is_cleared else read_gradients(self._optimizer)
        self._counts_before = [metric.update_count for metric in self._steps.metrics]
        self._batch_before = _read_batch(self._kwargs["batch"])
        self._values_before = read_values(self._steps.results)

    def _keep(self) -> None:
        """Keep what the parts must not change, and what the failed attempt completed."""
        self._gradients = Gradients(self._gradients_before)
        self._metrics = MetricStates(self._steps.metrics, self._counts_before)
        self._logged = LoggedValues(self._steps.results, self._values_before)

    def _more_parts(self, error: Exception, batch: object, num_parts: int) -> int | None:
        """The number of parts to try next; None if the error ends the run."""
        if isinstance(error, CollectiveFoundError):
            error.add_note(
                "OomGuard: memory ran out on this rank, and the parts of its batch cannot take part"
                " in the exchanges of training_step. Use a smaller batch size."
            )
        if not is_out_of_memory(error):
            if self._error is not None:
                error.add_note(
                    "OomGuard: this error came while a batch was split or ran in parts, after"
                    f" {type(self._error).__name__}: {self._error}"
                )
            return None
        codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        if _code_of(self._closure._backward_fn) in codes:
            self._has_cleared = True
            self._has_begun_backward = True
            if self._is_exchanging:
                error.add_note(
                    "OomGuard: memory ran out in a backward pass that exchanges gradients with the"
                    " other ranks, which cannot be repeated. Use a smaller batch size."
                )
                return None
        # Outside of these two, a hook or the exchange of buffers failed.
        elif _code_of(self._module.training_step) not in codes:
            return None
        if _read_batch(batch) != self._batch_before:
            error.add_note(
                "OomGuard: training_step changed the batch before memory ran out, so that it cannot"
                " be repeated. Use a smaller batch size, or let training_step copy what it changes."
            )
            return None
        samples = splittable_samples(batch)
        if samples is None:
            error.add_note(
                "OomGuard: the batch has no common first dimension along which to split it. Use a"
                " smaller batch size."
            )
            return None
        more_parts = min(2 * num_parts, self._steps.most_parts(samples))
        if more_parts <= num_parts:
            error.add_note(
                f"OomGuard: a batch of {samples:,} samples did not fit in {num_parts} parts either,"
                " and is not split further. Use a smaller batch size."
            )
            return None
        return more_parts

    def _release(self) -> None:
        """Release what a failed attempt held, and leave its place in Lightning's loop."""
        self._module._current_fx_name = self._fx_name
        if self._wrapper is not None:
            # The ranks have exchanged buffers before forward. DDP notes this after forward only.
            self._wrapper.require_forward_param_sync = False
        device_memory = device_memory_for(self._trainer.strategy.root_device)
        if device_memory is None:
            gc.collect()
        else:
            device_memory.release_cached()

    @torch.enable_grad()
    def _run(self, parts: list[Part]) -> Tensor | None:
        """Run forward and backward of all parts, as one step."""
        for state in (self._gradients, self._metrics, self._logged):
            state.begin()
        samples = [part.samples for part in parts]
        loss: Tensor | None = None
        extras = []
        for part in parts:
            is_last = part is parts[-1]
            share = part.samples / sum(samples) if self._steps.reduction == "mean" else 1.0
            self._is_exchanging = is_last and self._exchanges
            with nullcontext() if is_last else self._without_exchange():
                output = self._forward(part)
                if part is parts[0]:
                    self._zero_grad()
                if self._is_exchanging:
                    # The exchange needs the whole gradient. Values of self.log are exchanged in
                    # forward by the other ranks, so before it.
                    self._complete()
                if output.closure_loss is not None:
                    self._backward(output.closure_loss * share)
            if output.loss is not None:
                loss = output.loss * share if loss is None else loss + output.loss * share
            extras.append(recursive_detach(output.extra))
            # The graph of this part is not needed in the next one.
            del output
        if not self._exchanges:
            self._complete()
        if self._has_begun_backward:
            self._call_hook("on_after_backward")
        result_type = self._steps.loop.output_result_cls
        self._closure._result = result_type(loss, extra=joined(extras, samples))
        return loss

    def _forward(self, part: Part) -> Any:
        kwargs = OrderedDict(self._kwargs, batch=part.batch)
        with self._logged.collected(part.samples), self._detected_collectives():
            output = self._steps.loop._make_step_fn(kwargs)()
        self._metrics.end_part(part.samples)
        return output

    def _zero_grad(self) -> None:
        """Clear the gradients where Lightning does, with its hooks once in a step."""
        zero_grad = self._closure._zero_grad_fn
        if zero_grad is None:
            return
        if self._has_cleared:
            epoch = self._trainer.current_epoch
            self._call_module_hook("optimizer_zero_grad", epoch, self._batch_idx, self._optimizer)
        else:
            zero_grad()
            self._has_cleared = True

    def _backward(self, loss: Tensor) -> None:
        backward = self._closure._backward_fn
        # Lightning skips backward in the last epoch of StochasticWeightAveraging.
        if backward is None:
            return
        if not self._has_begun_backward:
            self._call_hook("on_before_backward", loss)
            self._has_begun_backward = True
        module = self._module
        hooks = dict.fromkeys(("on_before_backward", "on_after_backward"), _nothing)
        with (
            self._gradients.counted(),
            replaced(self._trainer, callbacks=[]),
            replaced(module, **hooks),
        ):
            backward(loss)
        if self._gradients.may_be_partial and self._error is not None:
            self._error.add_note(
                "OomGuard: memory ran out in a backward pass that adds to a gradient several times,"
                " so the gradients of earlier batches cannot be set back. Use a smaller batch size."
            )
            raise self._error

    def _complete(self) -> None:
        for state in (self._gradients, self._metrics, self._logged):
            state.complete()

    def _without_exchange(self) -> AbstractContextManager[None]:
        if self._wrapper is None:
            return nullcontext()
        return self._wrapper.no_sync()

    @contextmanager
    def _detected_collectives(self) -> Iterator[None]:
        """Raise an error where ``training_step`` itself needs the other ranks, instead of waiting.

        They have no further part.
        """
        if self._wrapper is None:
            yield
            return
        training_step = self._module.training_step

        # DDP itself may exchange buffers before it calls this.
        def detected_step(*arguments: Any, **keywords: Any) -> Any:
            with CollectiveDetector():
                return training_step(*arguments, **keywords)

        with replaced(self._module, training_step=detected_step):
            yield

    def _call_hook(self, name: str, *arguments: Any) -> None:
        call_callbacks = lightning_name(self._trainer, "trainer.call._call_callback_hooks")
        call_callbacks(self._trainer, name, *arguments)
        self._call_module_hook(name, *arguments)

    def _call_module_hook(self, name: str, *arguments: Any) -> None:
        call_hook = lightning_name(self._trainer, "trainer.call._call_lightning_module_hook")
        call_hook(self._trainer, name, *arguments)


def _read_batch(batch: object) -> list[tuple[int, int | None]]:
    """The tensors of a batch, each with a number that grows with every change in place."""
    # _version is private in torch 2.5 to 2.14. Tensors of inference mode have none.
    return [
        (id(tensor), None if tensor.is_inference() else tensor._version)
        for tensor in tensors_in(batch)
    ]


def _code_of(function: object) -> CodeType | None:
    """The code by which a traceback shows that an error was raised in ``function``."""
    return getattr(function, "__code__", None)


def _nothing(*_: object) -> None:
    pass
