"""What a search needs of a training program: the seam between the search and Lightning.

A program is one stage (a training with its validation, or one evaluation) on this rank. Subclass
:class:`Program` and :class:`Steps`; members that are not overridden say that there is nothing.

- ``restart`` goes to the state in which the stage starts, with optimizers that have not stepped,
  and sets the batch size. Nothing that a step has made or changed is left. It is called before each
  trial, also after one that has failed.
- ``training`` and ``evaluation`` are the steps of the stage; at least one of them exists.
- Steps run on batches of real samples, of any size, as the stage itself would run them. They tell
  ``phases`` when backward and the optimizer step start.
- Sizes are in samples for each rank; the batch size of the project, to which loaders may apply a
  factor.

Steps run as ``begin(size)``; then ``make_batch(size, 0)``, ``run()``, ``make_batch(size, 1)``,
``run()`` and so on; then ``complete()``, unless a step failed; then ``end()``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_batchmem.devices.peaks import PhasePeaks
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.records import Bound


class Steps:
    """Steps of one kind on batches of any size: training steps, or the steps of an evaluation."""

    first_phase = "forward"
    """``"forward"`` or ``"evaluation"``, in which each step begins."""

    @property
    def sample_bytes(self) -> int:
        """Bytes of the samples that this process keeps to make batches of, at this moment."""
        return 0

    @property
    def num_other_batches(self) -> int:
        """Batches of other lengths that may need more memory than the longest one.

        It is 0 unless a loader forms its own batches; known after ``begin``.
        """
        return 0

    @property
    def follows_size(self) -> bool:
        """Whether a smaller size makes smaller batches."""
        return True

    @property
    def frees_at_epoch_end(self) -> bool:
        """Whether something between two epochs may free what the steps keep."""
        return False

    def items(self, batch_size: int) -> float:
        """What the throughput counts in one call of ``run``: samples, or items in a budget."""
        return batch_size

    def last_batch_size(self, batch_size: int) -> int:
        """Samples in the last batch of an epoch; ``batch_size`` if all batches are full.

        Where it is unknown, it is half of the size. One sample is an error to BatchNorm, and is
        never the size of the last batch.
        """
        return batch_size

    def batches_in_epoch(self, batch_size: int) -> float:
        """Batches of an epoch on this rank; ``inf`` where their number is unknown."""
        return math.inf

    def begin(self, batch_size: int) -> int:
        """Make the next step the first of an epoch; returns the calls of ``run`` to a full step."""
        return 1

    def begin_step(self, batch_size: int) -> None:
        """Begin another epoch before a full step, if the last one had all its batches."""

    def make_batch(self, batch_size: int, index: int, *, other_lengths: bool = False) -> None:
        """Make the batch of the next ``run``, the ``index``-th since ``begin``.

        Args:
            batch_size: its samples.
            index: its number; under gradient accumulation the number of a micro batch.
            other_lengths: whether it has samples of other sizes, if they differ, and is not larger.
        """
        raise NotImplementedError

    def run(self) -> None:
        """Run a step on the batch that was made last, and keep no reference to it."""
        raise NotImplementedError

    def complete(self) -> None:
        """Run what follows the last step."""

    def end(self) -> None:
        """Leave the steps that ``begin`` has entered."""


class Program:
    """One stage of a training program on this rank.

    Attributes:
        phases: measures the phases of each step.
        device: the device of the weights.
        module: the network whose gradients and weights are measured.
        training: the training steps; ``None`` in an evaluation.
        evaluation: the steps of the evaluation; of the validation in a training; or ``None``.
        evaluates_first: whether some steps of the evaluation come before the first training step.
        steps_are_collective: whether every step needs all ranks.
        is_ragged: whether batches of one size have other shapes again and again.
        accumulate_grad_batches: batches to an optimizer step, as the project sets them; 1 in an
            evaluation.
        project_batch_size: the size of the project; ``None`` where it is not known, or a
            placeholder.
        step_samples: samples of an optimizer step of the project on a rank, which accumulation may
            keep; ``None`` if the search may not choose how many batches a step has.
        rehearsed_after: the program in a later state of the training, which each rehearsal of this
            one runs too; ``None`` for none. Its restarts keep the caches of the device.
    """

    phases: PhasePeaks
    device: torch.device
    module: torch.nn.Module
    training: Steps | None = None
    evaluation: Steps | None = None
    evaluates_first = False
    steps_are_collective = False
    is_ragged = False
    accumulate_grad_batches = 1
    project_batch_size: int | None = None
    step_samples: int | None = None
    rehearsed_after: Program | None = None

    @property
    def primary(self) -> Steps:
        """The steps whose times and numbers count: training steps, unless it is an evaluation."""
        primary = self.training or self.evaluation
        if primary is None:
            raise ValueError("program must have steps of training or of an evaluation, got neither")
        return primary

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the next step."""
        return ()

    @property
    def notes(self) -> Sequence[Note]:
        """Notes about the samples, which the plan repeats."""
        return ()

    @property
    def largest_batch_bytes(self) -> int:
        """Bytes of the largest training batch since ``restart``; 0 where it is not known."""
        return 0

    def bounds(self) -> list[Bound]:
        """The largest sizes that data and settings allow."""
        return []

    def avoided_sizes(self) -> set[int]:
        """Sizes at which the last batch of an epoch has one sample."""
        return set()

    def batches_in_epoch(self, batch_size: int) -> float:
        """Training batches of an epoch on this rank; ``inf`` where that is unknown."""
        return math.inf

    def batches_in_training(self, batch_size: int) -> float:
        """Batches that are left of the training; ``inf`` where their number is unknown."""
        return math.inf

    def shared_bytes(self, batch_size: int) -> int:
        """Memory that processes share in batches that loader workers make ahead."""
        return 0

    def worker_bytes(self, batch_size: int) -> int:
        """Host memory in the same batches, with the copies in pinned memory."""
        return 0

    def sample_sizes(self) -> Any:
        """The sizes of the longest samples on this rank, for :meth:`use_sample_sizes`."""

    def use_sample_sizes(self, of_ranks: Sequence[Any]) -> None:
        """Use the longest samples of all ranks."""

    def check_batch_size(self, batch_size: int) -> None:
        """Raise a ValueError unless the project follows this size as predicted."""

    def restart(self, batch_size: int) -> None:
        """Go to the state in which the stage starts, and set the size of the next steps."""
        raise NotImplementedError

    def accumulate(self, samples_per_step: int) -> None:
        """Accumulate the gradients of several batches after each further restart.

        Args:
            samples_per_step: samples that an optimizer step of the training has over all ranks.
        """

    def loss_of_copies(self, batch_size: int) -> float | None:
        """The loss of the first step on copies of one sample; ``None`` where it is not known.

        Nor is it known where a second step on the same batch has another loss, which is random.

        The step runs on this rank alone.
        """
        return None

    def without_synchronization(self) -> AbstractContextManager[None]:
        """Run steps on this rank alone, without collectives of the training program."""
        return nullcontext()

    def checkpoint_states(self) -> list[object]:
        """The states that a checkpoint copies, as far as they are known; empty if there is none."""
        return []
