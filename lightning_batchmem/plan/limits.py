"""Everything that limits a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_batchmem.plan.options import SearchOptions, Unit
from lightning_batchmem.plan.records import SizeLimit

# What limits the largest size; an argument or a setting of the Trainer that is not here allows no
# more.
_TEXTS: Mapping[str, str] = {
    "dataset": "the data set has no more than {size} for a full batch",
    "CPU memory": "more than {size} in the DataLoader's workers would fill the CPU's memory",
    "shared memory": (
        "more than {size} in the DataLoader's workers would fill the shared memory, /dev/shm"
        " (docker run --shm-size raises it)"
    ),
    "target_batch_size": "target_batch_size needs no more than {size} on a rank",
    "max_batch_size": "max_batch_size is {number:,}",
    "min_steps_per_epoch": (
        "a larger size would leave an epoch too few optimizer steps (min_steps_per_epoch is"
        " {steps:,})"
    ),
    "recipe": 'more may train worse than your {project:,}; objective="memory" lifts this',
    "validation data": "the validation data set has no full batch of more than {size}",
}
_TEXT_OF_KEPT_STEP = (
    "the recipe of the project allows no more than {samples:,} in an optimizer step"
)
_TEXTS_OF_BUDGET: Mapping[str, str] = {
    **_TEXTS,
    "dataset": "an epoch has no second batch above {size}",
}


@dataclass(frozen=True)
class ProjectStep:
    """The optimizer step of a project, and what a search keeps of it.

    Args:
        batch_size: the size of the project; ``None`` where it is not known, or a placeholder.
        accumulate_grad_batches: batches to an optimizer step where ``kept_samples`` is None.
        kept_samples: samples that an optimizer step keeps over all ranks, by accumulation: those of
            ``target_batch_size`` or of the project; ``None``: they follow the size.
        ranks: processes that train together.
        may_keep: whether the search ends where the size of the project does not fit, because
            accumulation can keep the samples of its optimizer steps then.
    """

    batch_size: int | None = None
    accumulate_grad_batches: int = 1
    kept_samples: int | None = None
    ranks: int = 1
    may_keep: bool = False


@dataclass(frozen=True)
class SearchLimits:
    """Everything that limits a search, the same on all ranks; sizes in samples.

    Args:
        limit_bytes: the most that this process may hold in a trial.
        min_batch_size: the smallest size that is allowed.
        max_batch_size: the largest size that is allowed.
        max_reason: the argument, setting or data that limits the largest size.
        options: the arguments of the user, without those that do not apply to the stage.
        step: the optimizer step of the project, and what it keeps.
        missing_bytes: by how much the process and the gradients exceed the limit of the host before
            the first batch; 0 on a device.
        fragmented_bytes: bytes below the limit that stay free where batches of ever new shapes
            fragment the cache of the allocator until it is released; 0 where they do not.
        is_host: whether exceeding the limit ends the process without an error.
        steps_are_collective: whether ranks take every step together.
        has_expandable_segments: whether the segments of every rank's allocator can grow: under the
            limit of a trial it may release its cache although there is room.
        avoided_sizes: sizes that are used only where no other is allowed: the last batch of their
            epochs has one sample, which is an error to BatchNorm.
    """

    limit_bytes: int
    min_batch_size: int
    max_batch_size: int
    max_reason: SizeLimit
    options: SearchOptions = SearchOptions()  # noqa: RUF009
    step: ProjectStep = ProjectStep()
    missing_bytes: int = 0
    fragmented_bytes: int = 0
    is_host: bool = False
    steps_are_collective: bool = False
    has_expandable_segments: bool = False
    avoided_sizes: frozenset[int] = frozenset()

    @property
    def unit(self) -> Unit:
        """What the sizes count."""
        return self.options.unit

    @property
    def largest_text(self) -> str:
        """A clause about what limits the largest size that is allowed."""
        texts = _TEXTS_OF_BUDGET if self.options.budget else _TEXTS
        text = texts.get(self.max_reason, f"{self.max_reason} allows no more than {{size}}")
        if self.max_reason == "recipe" and self.step.kept_samples is not None:
            text = _TEXT_OF_KEPT_STEP
        return text.format(
            size=self.unit.size(self.max_batch_size),
            number=self.max_batch_size,
            steps=self.options.least_steps_per_epoch,
            project=self.step.batch_size,
            samples=self.step.kept_samples,
        )

    @property
    def filled_bytes(self) -> int:
        """Bytes that the tensors of the largest size may fill."""
        # Where a trial catches errors, its steps show whether the cache is released.
        return self.limit_bytes - (0 if self.catches_errors else self.fragmented_bytes)

    @property
    def catches_errors(self) -> bool:
        """Whether a step that does not fit is an error on this rank alone, which can be caught."""
        return not (self.is_host or self.steps_are_collective)
