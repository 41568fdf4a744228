"""The plan: the batch size that was chosen, what limits it, and everything it was computed from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from lightning_batchmem.plan.fit import fit_memory, ran_through
from lightning_batchmem.plan.json_fields import from_json
from lightning_batchmem.plan.recipe import Recipe, training_text
from lightning_batchmem.plan.records import Chosen, LimitedBy, MemoryModel, Speed, Trial
from lightning_batchmem.plan.text import full_text, headline, short_text
from lightning_batchmem.plan.unit import Unit


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
        project_recipe: those of the project before the search; ``None`` where there was none, as in
            an evaluation.
        warnings: what the chosen size changes in the training, or what cannot go with it, a
            sentence each.
        notes: remarks on the search, a sentence each; those of its parts too.
        parameters: the number of parameters, which has to be the same before
            ``BatchFinder(plan=...)`` uses the plan again; empty for a plan of an evaluation. Under
            FSDP1 it is that of the first rank's shard.
        budget_name: the attribute that ``batch_size`` is a value of, where it is a budget within
            which loaders form their own batches, such as ``"max_tokens"``. All sizes are budgets
            then, and throughput is in items. ``None``: sizes are in samples.
        place: where the size is set, if it was found by trying: the path of an attribute, such as
            ``"task.batch_size"``, or ``"train_dataloader()"`` for the loaders that this hook
            returns. Empty: the attribute that ``batch_arg_name`` names, or loaders passed to
            ``fit``.
        simulated: whether the device was a simulated one. Such a plan is never ``verified``, and
            :class:`~lightning_batchmem.BatchFinder` only rehearses its size first.
    """

    chosen: Chosen
    trials: tuple[Trial, ...]
    limit_bytes: int
    device: str = ""
    recipe: Recipe = Recipe()  # noqa: RUF009
    project_recipe: Recipe | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    parameters: str = ""
    budget_name: str | None = None
    place: str = ""
    simulated: bool = False

    def __repr__(self) -> str:
        return f"<Plan: {headline(self)}>"

    def __str__(self) -> str:
        return full_text(self)

    def _repr_markdown_(self) -> str:
        """The text of the plan in a notebook, with its columns aligned."""
        return f"```text\n{self}\n```"

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
        """One sentence: why this size."""
        return self.chosen.reason

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
        for a plan of an earlier version.
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
        return None if rehearsal is None else rehearsal.peak_bytes

    @property
    def held_peak_bytes(self) -> int | None:
        """Bytes that this process took in the rehearsal; ``None`` when they are not known.

        On a GPU PyTorch calls them reserved bytes; on a CPU they are the resident set.
        """
        rehearsal = self._rehearsal()
        return None if rehearsal is None else rehearsal.held_peak_bytes

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

        Peaks are the highest of them, and times those of the slowest.
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

    @property
    def learning_rate_before(self) -> float | None:
        """The learning rate before :attr:`learning_rate`; ``None`` likewise."""
        return None if self.project_recipe is None else self.project_recipe.learning_rate

    def short_text(self) -> str:
        """The plan with its warnings and the first note; lines have at most 80 columns."""
        return short_text(self)

    def to_json(self) -> str:
        """The plan as JSON; :meth:`from_json` makes an equal plan of it, with printable texts."""
        return json.dumps(_side_by_side(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote, also in an earlier version.

        Fields that are no longer known are left out, and control characters become escapes.

        Raises:
            ValueError: when ``text`` is not the JSON of a plan.
        """
        plan = from_json(cls, text, _in_parts)
        smallest = min([plan.batch_size, *(trial.batch_size for trial in plan.trials)])
        if smallest < 1:
            raise ValueError(f"batch_size of a plan must be at least 1, got {smallest}")
        return plan

    def _rehearsal(self) -> Trial | None:
        passed = ran_through(trial for trial in self.trials if trial.outcome == "ok")
        return next((trial for trial in passed if trial.batch_size == self.batch_size), None)


# In JSON the fields of the parts stand side by side. These are the names of fields in a part, by
# their names in JSON.
_CHOSEN = {
    "batch_size": "batch_size",
    "limited_by": "limited_by",
    "verified": "is_verified",
    "reason": "reason",
    "fastest_batch_size": "fastest_batch_size",
    "largest_batch_size": "largest_batch_size",
    "speeds": "speeds",
    "state": "state",
}
# Until version 0.5 these fields of the recipe stood beside them. Those of the project are not read:
# they are only printed.
_RECIPE = {
    "ranks": "ranks",
    "accumulate_grad_batches": "accumulate_grad_batches",
    "effective_batch_size": "effective_batch_size",
    "learning_rate": "learning_rate",
}


def _side_by_side(plan: Plan) -> dict[str, Any]:
    """Everything in a plan, and for other readers what follows from its trials."""
    data = asdict(plan)
    chosen = data.pop("chosen")
    return {
        **{name: chosen[field] for name, field in _CHOSEN.items()},
        "training": plan.training,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "held_peak_bytes": plan.held_peak_bytes,
        "memory": None if plan.memory is None else asdict(plan.memory),
        **data,
    }


def _in_parts(data: Any) -> Any:
    """The data of a plan, from JSON of this version or of an earlier one."""
    if not isinstance(data, dict):
        return data
    parts: dict[str, Any] = {
        "chosen": {"reason": "", **_named(data, _CHOSEN)},
    }
    if "recipe" not in data:
        parts["recipe"] = _named(data, _RECIPE)
    return {**data, **parts}


def _named(data: dict[str, Any], fields: dict[str, str]) -> dict[str, Any]:
    return {field: data[name] for name, field in fields.items() if name in data}
