"""Steps of automatic optimization whose batches run in parts where memory runs out.

The private names used here are those of lightning 2.5.0 and 2.6.6, and of torch 2.5.1 to 2.14.1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.memory import garbage_collection_cuda
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_batchmem._lightning.batch_samples import BatchSamples
from lightning_batchmem._lightning.hooks import replaced
from lightning_batchmem._lightning.packages import lightning_name
from lightning_batchmem._lightning.parts_check import why_not_in_parts
from lightning_batchmem._lightning.trainer_state import callbacks_of, results_of
from lightning_batchmem.batches.split import (
    Part,
    has_number_of_samples,
    split,
    splittable_samples,
)
from lightning_batchmem.devices.foreign_values import add_note, value_or_none
from lightning_batchmem.devices.out_of_memory import is_out_of_memory, release_traceback
from lightning_batchmem.devices.tensors import tensors_in

Reduction = Literal["mean", "sum"]

# The values of reduce_fx with which Lightning logs a mean over samples.
_MEANS = ("mean", "avg", torch.mean)


class GuardedSteps:
    """The training steps of a run, whose batches can run in parts.

    Args:
        trainer: the Trainer, in ``on_train_start``.
        owner: the callback that guards. A search removes it from the trainer or replaces it by a
            copy that does nothing, and has to see the errors itself.
        reduction: whether the loss is the mean over the samples, or their sum.
        on_split: called with the number of the batch, its samples and its parts after each step in
            parts.
        on_refusal: called with the reason when a step shows that parts could not equal it.
    """

    def __init__(
        self,
        trainer: Trainer,
        owner: Callback,
        reduction: Reduction,
        *,
        on_split: Callable[[int, int, int], None],
        on_refusal: Callable[[str], None],
    ) -> None:
        self.trainer = trainer
        self.module = trainer.lightning_module
        self.results: Any = results_of(trainer.fit_loop.epoch_loop)
        self.reduction = reduction
        self.on_split = on_split
        self.on_refusal = on_refusal
        self.loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._samples = BatchSamples(trainer)
        self._owner = owner
        self._stateful = [
            (name or type(part).__name__, part)
            for name, part in self.module.named_modules()
            if part._buffers or isinstance(part, Metric)
        ]

    def attach(self) -> None:
        """Guard each step from now on."""
        vars(self.loop)["_make_closure"] = self._make_closure

    def detach(self) -> None:
        """Leave the steps to Lightning again."""
        vars(self.loop).pop("_make_closure", None)

    def samples_in(self, batch: object, batch_idx: int) -> int | None:
        """The samples of a batch, if they are the first dimension of all of its tensors."""
        samples = splittable_samples(batch)
        return samples if self._samples.may_have(samples, batch_idx) else None

    def read_state(self, batch: object) -> dict[str, Any] | None:
        """Numbers that differ after a change of what a repeated step would change again.

        None if they cannot be read.
        """
        return value_or_none("The state of a step", self._read_state, batch)

    def _read_state(self, batch: object) -> dict[str, Any]:
        state: dict[str, Any] = {"its batch": _versions(tensors_in(batch))}
        for name, part in self._stateful:
            state[f"the state of {name}"] = (
                part.update_count if isinstance(part, Metric) else _versions(part._buffers.values())
            )
        return state

    def _make_closure(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> Any:
        closure = type(self.loop)._make_closure(self.loop, kwargs, optimizer, batch_idx)
        if not any(callback is self._owner for callback in callbacks_of(self.trainer)):
            return closure
        return _GuardedClosure(self, closure, kwargs, optimizer, batch_idx)


class _LogCall(NamedTuple):
    """A call of ``self.log`` in one part."""

    name: str
    value: Any
    arguments: dict[str, Any]


class _GuardedClosure:
    """Runs Lightning's closure of one step, and the batch in parts if memory runs out in it."""

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
        self._closure = closure
        self._kwargs = kwargs
        self._batch = kwargs["batch"]
        self._optimizer = optimizer
        self._batch_idx = batch_idx

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor | None:
        self._before = self._steps.read_state(self._batch)
        self._logged_before = [result.value for result in self._steps.results.values()]
        # Whether an attempt that failed called the hooks before backward, and logged its values.
        self._has_begun_backward = False
        self._is_logged = False
        fx_name = self._steps.module._current_fx_name
        num_parts = 1
        parts: list[Part] | None = None
        while True:
            try:
                if parts:
                    return self._run_parts(parts)
                return self._run_whole(*arguments, **keywords)
            # An out-of-memory error has many types. Every other error is raised again.
            except Exception as error:
                # Lightning leaves the name of the hook that failed.
                place = self._steps.module._current_fx_name
                if num_parts > 1 and not is_out_of_memory(error):
                    # Nothing else in the error shows that the step had only a part of the batch.
                    add_note(
                        error,
                        f"OomGuard: when this error occurred, the batch ran in {num_parts} parts,"
                        " because memory had run out in it. If the parts are the cause, use a"
                        " smaller batch size.",
                    )
                if not is_out_of_memory(error) or place not in ("training_step", "backward"):
                    raise
                self._error = error
                reason = self._why_not_again(place, num_parts)
                if reason is not None:
                    self._refuse(reason)
                release_traceback(error)
            self._steps.module._current_fx_name = fx_name
            if place == "backward":
                self._has_begun_backward = True
                self._is_logged |= num_parts == 1
            # Where the device is not CUDA, this only collects garbage.
            garbage_collection_cuda()
            num_parts = min(
                2 * num_parts, self._steps.samples_in(self._batch, self._batch_idx) or 1
            )
            parts = value_or_none("A part of a batch", split, self._batch, num_parts)
            if not parts:
                self._refuse("it cannot be copied")

    def _run_whole(self, *arguments: Any, **keywords: Any) -> Tensor | None:
        loss: Tensor | None = self._closure(*arguments, **keywords)
        reason = self._why_not_equal(self._closure._result.extra)
        if reason is not None:
            self._steps.on_refusal(reason)
        return loss

    @torch.enable_grad()
    def _run_parts(self, parts: list[Part]) -> Tensor:
        """Run forward and backward of all parts, as one step."""
        samples = sum(part.samples for part in parts)
        losses = []
        logs = []
        for part in parts:
            calls, output = self._forward(part)
            share = part.samples / samples
            weight = share if self._steps.reduction == "mean" else 1.0
            loss = output.closure_loss * weight
            if part is parts[0]:
                self._begin_backward(loss)
            self._backward(loss)
            losses.append(output.loss * weight)
            logs.append([call._replace(value=call.value * share) for call in calls])
        self._call_hooks("on_after_backward")
        if not self._is_logged:
            self._log(logs, samples)
        total = torch.stack(losses).sum()
        self._closure._result = self._steps.loop.output_result_cls(total)
        self._steps.on_split(self._steps.trainer.fit_loop.total_batch_idx, samples, len(parts))
        return total

    def _forward(self, part: Part) -> tuple[list[_LogCall], Any]:
        """Run forward of a part; what it logs comes back instead of being logged."""
        calls: list[_LogCall] = []

        def note(fx: str, name: str, value: Any, **arguments: Any) -> None:
            calls.append(_LogCall(name, value, arguments))

        # In the first batch of an epoch, Lightning resets values that were reset at the end of the
        # previous epoch. This would drop those that the whole batch has logged.
        with replaced(self._steps.results, log=note, reset=_nothing):
            output = self._steps.loop._make_step_fn(OrderedDict(self._kwargs, batch=part.batch))()
        reason = self._why_not_equal(output.extra)
        if output.closure_loss is None:
            reason = "training_step returns no loss for a part of it"
        for name, value, arguments in calls:
            if not isinstance(value, Tensor) or arguments["reduce_fx"] not in _MEANS:
                reason = _no_mean(name)
            elif arguments["batch_size"] not in (None, part.samples):
                reason = f"self.log({name!r}) gets a batch_size that is not its number of samples"
        if reason is not None:
            self._refuse(reason)
        return calls, output

    def _why_not_again(self, place: str, num_parts: int) -> str | None:
        """Why a step that failed cannot run in more parts; None if it can."""
        if num_parts == self._steps.samples_in(self._batch, self._batch_idx):
            return "one sample does not fit"
        if has_number_of_samples(self._batch):
            return "the batch has its number of samples in it, which would be wrong in a part"
        # An update of a logged value replaces its tensor.
        logged_ids = [id(result.value) for result in self._steps.results.values()]
        is_first_forward = place == "training_step" and num_parts == 1
        if is_first_forward and logged_ids != [id(value) for value in self._logged_before]:
            return "training_step had logged values before memory ran out"
        return self._why_not_equal({}) or why_not_in_parts(self._steps.trainer)

    def _why_not_equal(self, extra: dict[str, Any]) -> str | None:
        """Why parts cannot equal the step that ran; None if they can."""
        if self._steps.samples_in(self._batch, self._batch_idx) is None:
            return "the first dimension of its tensors is not the number of its samples"
        after = self._steps.read_state(self._batch)
        if self._before is None or after is None:
            return "its state cannot be read"
        for name, numbers in after.items():
            if numbers != self._before[name]:
                return f"training_step changes {name}"
        if extra:
            return "training_step returns more than its loss"
        for result in self._steps.results.values():
            meta = result.meta
            if meta.fx == "training_step" and not (result.is_tensor and meta.is_mean_reduction):
                return _no_mean(meta.name)
        return None

    def _refuse(self, reason: str) -> NoReturn:
        add_note(
            self._error,
            f"OomGuard: the batch cannot run in parts, because {reason}. Use a smaller batch size.",
        )
        raise self._error

    def _begin_backward(self, loss: Tensor) -> None:
        """Clear the gradients, and call the hooks before backward once in a step."""
        if self._has_begun_backward:
            epoch = self._steps.trainer.current_epoch
            self._steps.module.optimizer_zero_grad(epoch, self._batch_idx, self._optimizer)
        else:
            self._closure._zero_grad_fn()
            self._call_hooks("on_before_backward", loss)
            self._has_begun_backward = True

    def _backward(self, loss: Tensor) -> None:
        """Run backward without its hooks."""
        hooks = dict.fromkeys(("on_before_backward", "on_after_backward"), _nothing)
        with replaced(self._steps.trainer, callbacks=[]), replaced(self._steps.module, **hooks):
            self._closure._backward_fn(loss)

    def _call_hooks(self, name: str, *arguments: Any) -> None:
        for call in ("_call_callback_hooks", "_call_lightning_module_hook"):
            lightning_name(self._steps.trainer, f"trainer.call.{call}")(
                self._steps.trainer, name, *arguments
            )

    def _log(self, logs: list[list[_LogCall]], samples: int) -> None:
        """Log once what each part has logged."""
        if any([call.name for call in calls] != [call.name for call in logs[0]] for calls in logs):
            self._refuse("its parts log different values")
        for calls in zip(*logs, strict=True):
            name, _, arguments = calls[0]
            if arguments["batch_size"] is not None:
                arguments["batch_size"] = samples
            value = torch.stack([call.value for call in calls]).sum()
            self._steps.results.log("training_step", name, value, **arguments)


def _no_mean(name: str) -> str:
    return f"self.log({name!r}) logs a metric, or has another reduce_fx than the mean"


def _versions(tensors: Iterable[Tensor | None]) -> list[tuple[int, int | None]]:
    """The tensors, each with a number that grows with every change in place."""
    # Tensors of inference mode have no such number.
    return [
        (id(tensor), None if tensor.is_inference() else tensor._version)
        for tensor in tensors
        if tensor is not None
    ]


def _nothing(*_: object, **__: object) -> None:
    pass
