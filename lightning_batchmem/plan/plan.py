"""The plan: the batch size that was chosen, what limits it, and everything it was computed from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_batchmem.plan.figures import plot_search
from lightning_batchmem.plan.fit import fit_memory, ran_through
from lightning_batchmem.plan.json_fields import from_json
from lightning_batchmem.plan.notes import Note, in_order
from lightning_batchmem.plan.options import Unit
from lightning_batchmem.plan.recipe import Recipe, training_text
from lightning_batchmem.plan.records import Chosen, LimitedBy, MemoryModel, Speed, Trial
from lightning_batchmem.plan.text import full_text, headline, short_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Plan:
    """The batch size that was chosen, what limits it, and everything it was computed from.

    Args:
        chosen: the chosen size, and why.
        trials: every size that was run, in the order in which it was run.
        limit_bytes: what this process may take in the training.
        device: where it was measured, such as ``"NVIDIA H100 80GB HBM3"``, or ``"host"``
            for a CPU.
        recipe: the optimizer steps of the training; the default for an evaluation.
        project_recipe: the project's before the search; ``None`` where there was none, as in
            an evaluation.
        notes: remarks on the training and on the search, each with its kind; see
            :data:`~lightning_batchmem.plan.notes.NoteKind`.
        parameters: the number of parameters, which has to be the same before
            ``BatchFinder(plan=...)`` uses the plan again; empty for a plan of an evaluation. It
            counts them before a strategy shards them, if they exist in ``setup``.
        budget_name: the attribute that ``batch_size`` is a value of, where it is a budget within
            which loaders form their own batches, such as ``"max_tokens"``. All sizes are budgets
            then, and throughput is in items. ``None``: sizes are in samples.
        place: where the size is set, if it was found by trying: the path of an attribute, such as
            ``"task.batch_size"``, or ``"train_dataloader()"`` for the loaders that this hook
            returns. Empty: the attribute that ``batch_arg_name`` names, or loaders passed to
            ``fit``.
        simulated: whether the device was a simulated one. Such a plan is never ``verified``, and
            :class:`~lightning_batchmem.BatchFinder` only rehearses its size first.
        strategy: the strategy of the Trainer, with how it shards and offloads, and its precision;
            empty without a Trainer.
    """

    chosen: Chosen
    trials: tuple[Trial, ...]
    limit_bytes: int
    device: str = ""
    recipe: Recipe = Recipe()  # noqa: RUF009
    project_recipe: Recipe | None = None
    notes: tuple[Note, ...] = ()
    parameters: str = ""
    budget_name: str | None = None
    place: str = ""
    simulated: bool = False
    strategy: str = ""

    def __repr__(self) -> str:
        return f"<Plan: {headline(self)}>"

    def __str__(self) -> str:
        return full_text(self)

    def _repr_markdown_(self) -> str:
        """The text of the plan in a notebook, with its columns aligned."""
        # With the name of a language, the HTML of nbconvert has no font of equal widths.
        return f"```\n{self}\n```"

    @property
    def unit(self) -> Unit:
        """What the sizes count: samples, or values of the budget."""
        return Unit(self.budget_name)

    @property
    def batch_size(self) -> int:
        """The chosen size, in samples for each rank."""
        return self.chosen.batch_size

    @property
    def limited_by(self) -> LimitedBy:
        """What kept the size from being larger."""
        return self.chosen.limited_by

    @property
    def verified(self) -> bool:
        """Whether a rehearsal passed at exactly this size.

        That is, real steps from the state in which training starts.
        """
        return self.chosen.is_verified

    @property
    def reason(self) -> str:
        """One sentence: why this size. Others may follow."""
        size = self.unit.size(self.batch_size)
        project_size = self.project_batch_size or 0
        if self.batch_size < project_size:
            size += f" instead of the project's {project_size:,}"
        return f"{size}: {self.chosen.why}"

    @property
    def fastest_batch_size(self) -> int | None:
        """The smallest size with at least 95 % of the best throughput that was measured.

        ``None`` for ``objective="memory"``.
        """
        return self.chosen.fastest_batch_size

    @property
    def largest_batch_size(self) -> int | None:
        """The largest size that fits, as far as it is known.

        It passed a rehearsal, or for ``objective="throughput"`` it is predicted to fit; ``None``
        where it is not known.
        """
        return self.chosen.largest_batch_size

    @property
    def speeds(self) -> tuple[Speed, ...]:
        """The throughput at the size of the project and at the one that was found.

        They were timed one after the other; empty where they were not compared.
        """
        return self.chosen.speeds

    @property
    def memory(self) -> MemoryModel | None:
        """The fitted memory lines; ``None`` when a single size was run."""
        return fit_memory(self.trials)

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Bytes that tensors take at ``batch_size``, as lines through *smaller* sizes predict.

        ``None`` when fewer than two of them were run.
        """
        smaller = fit_memory([t for t in self.trials if t.batch_size < self.batch_size])
        return None if smaller is None else round(smaller.predict_bytes(self.batch_size))

    @property
    def measured_peak_bytes(self) -> int | None:
        """Bytes of tensors at the peak of the rehearsal; ``None`` when no step had to be run."""
        rehearsal = self._rehearsal()
        return None if rehearsal is None else rehearsal.memory.peak_bytes

    @property
    def held_peak_bytes(self) -> int | None:
        """Bytes that this process took in the rehearsal; ``None`` when they are not known.

        On a GPU PyTorch calls them reserved bytes; on a CPU they are the resident set.
        """
        rehearsal = self._rehearsal()
        return None if rehearsal is None else rehearsal.memory.held_peak_bytes

    @property
    def project_batch_size(self) -> int | None:
        """The size that the project had before the search; ``None`` where it is not known."""
        return None if self.project_recipe is None else self.project_recipe.batch_size

    @property
    def training(self) -> str:
        """What changes in the training: samples and number of its steps, and the learning rate.

        Empty for an evaluation, and where the size of the project is not known.
        """
        if self.project_batch_size is None or self.project_recipe is None:
            return ""
        return training_text(self.project_recipe, self.recipe, self.unit)

    @property
    def ranks(self) -> int:
        """How many processes searched together.

        Peaks are of the rank with the highest, and times of the slowest.
        """
        return self.recipe.ranks

    @property
    def training_seconds(self) -> float | None:
        """About how long the steps of the training take; ``None`` where it is not known."""
        rehearsal = self._rehearsal()
        steps = self.recipe.num_steps
        if rehearsal is None or rehearsal.step_seconds is None or steps is None:
            return None
        return steps * self.accumulate_grad_batches * rehearsal.step_seconds

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches to an optimizer step."""
        return self.recipe.accumulate_grad_batches

    @property
    def effective_batch_size(self) -> int | None:
        """Samples to an optimizer step over all ranks; ``None`` for a plan of an evaluation."""
        return self.recipe.effective_batch_size

    @property
    def learning_rate(self) -> float | None:
        """The module's new learning rate; ``None`` when it was left alone."""
        return self.recipe.learning_rate

    def short_text(self) -> str:
        """The plan in a few rows, without notes on the search itself.

        Lines have at most 80 columns.
        """
        return short_text(self)

    def plot(self) -> Figure:
        """Draw memory and throughput over the batch size, as the command ``draw`` does.

        Returns:
            A figure of matplotlib, which a notebook shows. ``plan.plot().savefig("search.png")``
            writes it to a file.

        Raises:
            ImportError: if matplotlib is not installed (extra ``plot``).
            ValueError: if no size was measured.
        """
        return plot_search(self)

    def with_notes(self, *notes: Note) -> Plan:
        """The plan with more notes, in the order of their kinds."""
        return replace(self, notes=in_order((*self.notes, *notes)))

    def to_json(self) -> str:
        """The plan as JSON; :meth:`from_json` makes an equal plan of it, with printable texts."""
        memory = self.memory
        # Other readers get what follows from the parts too.
        data = {
            "batch_size": self.batch_size,
            "reason": self.reason,
            "training": self.training,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "held_peak_bytes": self.held_peak_bytes,
            "memory": None if memory is None else asdict(memory),
            **asdict(self),
        }
        return json.dumps(data, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Fields that this version does not know are left out, and control characters become escapes.

        Raises:
            ValueError: when ``text`` is not the JSON of a plan.
        """
        # Until version 0.5 the fields of `chosen` had no part of their own.
        if '"chosen"' not in text and '"limited_by"' in text:
            raise ValueError("plans of version 0.5 and older cannot be read by this version")
        plan = from_json(cls, text)
        smallest = min([plan.batch_size, *(trial.batch_size for trial in plan.trials)])
        if smallest < 1:
            raise ValueError(f"batch_size of a plan must be at least 1, got {smallest}")
        return plan

    def _rehearsal(self) -> Trial | None:
        passed = ran_through(trial for trial in self.trials if trial.outcome == "ok")
        return next((trial for trial in passed if trial.batch_size == self.batch_size), None)


def check_plan(plan: object) -> None:
    """Raise a ValueError unless ``plan`` can be an earlier plan."""
    # An empty path would be the working directory.
    if not isinstance(plan, Plan | str | Path | None) or plan == "":
        raise ValueError(f"plan must be a Plan, a path or None, got {plan!r:.80}")
