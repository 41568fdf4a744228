"""Arguments of BatchFinder, checked and converted to plain Python types."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, get_args

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

Objective = Literal["auto", "recipe", "memory", "throughput"]
LearningRateScaling = Literal["linear", "sqrt"]
WorstCase = Literal["typical", "longest"]
BoundArgument = Literal["max_batch_size", "target_batch_size", "min_steps_per_epoch"]
"""The arguments that limit the size whatever the trials show."""

# This is the maximum where neither the data nor the user sets one.
UNBOUNDED_MAX_BATCH_SIZE = 2**20

# The same for a budget, which may count bytes or edges of graphs.
UNBOUNDED_MAX_BUDGET = 2**40

LEAST_STEPS_PER_EPOCH = 10
"""The optimizer steps that an epoch keeps under the default of ``min_steps_per_epoch``."""

# Decimal units have SI prefixes, and binary units have those of IEC 80000-13.
_UNIT_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNIT_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# As most tools write them.
_UNIT_BYTES |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_TEXT_LIMIT = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]+)\s*")
_PERCENTAGE = re.compile(r"\s*(\d{1,3}(?:\.\d{1,18})?)\s*%\s*")

# No process holds less than this.
_LEAST_LIMIT_BYTES = 2**20


# What to do instead for arguments of Lightning's BatchSizeFinder, and others that one may expect.
_INSTEAD = {
    "batch_size": "max_batch_size is the largest size to consider.",
    "dataloaders": "find_batch_size takes train_dataloaders=, a list of loaders.",
    "train_dataloader": "find_batch_size takes train_dataloaders=.",
    "val_dataloader": "find_batch_size takes val_dataloaders=.",
    "trainer": "compare takes arguments of the Trainer in base=, a dictionary.",
    "mode": "It fits lines to a few sizes instead of doubling or bisecting; leave it out.",
    "steps_per_trial": "It chooses the steps of each size itself; leave it out.",
    "init_val": "Pass min_batch_size for the smallest size to try.",
    "max_trials": "Few sizes are run; pass max_batch_size for the largest one to consider.",
    "max_val": "Pass max_batch_size for the largest size to consider.",
    "margin": "It leaves 5 % free by itself; pass memory_limit for more.",
}


def advice_on(name: str, names: Sequence[str]) -> str:
    """What to write instead of an unknown name: the nearest one, or any of them."""
    near = get_close_matches(name, names, n=1)
    return f"Did you mean {near[0]}?" if near else f"It has {', '.join(names)}."


def missing_attribute(owner: object, name: str, advice: str) -> object:
    """An attribute of a callback that it does not have, as ``__getattr__`` asks for it.

    Raises:
        AttributeError: with the advice, unless the name is private, or has raised this error in a
            property of a subclass.
    """
    if name.startswith("_") or hasattr(type(owner), name):
        return object.__getattribute__(owner, name)
    raise AttributeError(
        f"{type(owner).__name__} has no {name}. As one of Trainer(callbacks=[...]) it gets {advice}"
    )


def names_our_arguments(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Refuse an argument that needs a name, or has an unknown one, with a sentence that has ours.

    Args:
        function: a public function, or the ``__init__`` of a public class.
    """
    kind = function.__qualname__.partition(".")[0]
    parameters = inspect.signature(function).parameters.values()
    names = [one.name for one in parameters if one.name != "self"]
    by_name = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    instead = _INSTEAD if "max_batch_size" in names else {}
    places = len(parameters) - len(by_name)

    @functools.wraps(function)
    def checked(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        if len(arguments) > places:
            raise TypeError(
                f"{kind} takes its arguments by name, such as {by_name[0]}=..., got"
                f" {arguments[places]!r:.80}"
            )
        for name in keywords:
            if name not in names:
                advice = instead.get(name, advice_on(name, names))
                raise TypeError(f"{kind} has no argument {name}. {advice}")
        return function(*arguments, **keywords)

    return checked


def check_runs(search_on_resume: object, then: object, plan: object, *, apply: bool) -> None:
    """Raise a ValueError unless what a process runs is possible with this plan."""
    if not isinstance(search_on_resume, bool) and search_on_resume != "if_changed":
        raise ValueError(
            f'search_on_resume must be True, False or "if_changed", got {search_on_resume!r:.80}'
        )
    _check_choice("then", then, ("train", "exit"))
    if apply and (plan is None or then == "exit"):
        raise ValueError(
            "apply=True must come with a plan, and trains with it: pass plan=, and leave then out"
        )
    if then == "exit" and not (isinstance(plan, str | Path) and Path(plan).suffix == ".json"):
        raise ValueError(
            f'then="exit" must come with a file for the plan, as plan="plan.json", got {plan!r:.80}'
        )


@dataclass(frozen=True)
class Unit:
    """What sizes count: samples, or values of a budget within which loaders form batches.

    Args:
        budget_name: the attribute that holds the budget, such as ``"max_tokens"``; ``None``: sizes
            are in samples.

    Example:
        >>> Unit().size(32), Unit("max_tokens").size(4096)
        ('32 samples', 'max_tokens 4,096')
    """

    budget_name: str | None = None

    @property
    def name(self) -> str:
        """What a size is called."""
        return self.budget_name or "batch size"

    @property
    def items(self) -> str:
        """What the throughput counts: samples, or the items within a budget."""
        return "items" if self.budget_name else "samples"

    @property
    def one(self) -> str:
        """What a line grows with."""
        return f"for each of {self.budget_name}" if self.budget_name else "a sample"

    def size(self, size: int) -> str:
        """A size as a number of samples, or as a budget."""
        name = self.budget_name
        return f"{name} {size:,}" if name else f"{size:,} sample{'s' * (size != 1)}"


@dataclass(frozen=True)
class SearchOptions:
    """Arguments of BatchFinder.

    Numbers become ``int`` and ``float``, so that a checkpoint loads with ``weights_only=True``.
    """

    objective: Objective = "auto"
    memory_limit: int | float | str | None = None
    max_batch_size: int | None = None
    min_batch_size: int | None = None
    multiple_of: int | None = None
    min_steps_per_epoch: int | Literal["auto"] | None = "auto"
    batch_arg_name: str = "batch_size"
    worst_case: WorstCase | None = None
    target_batch_size: int | None = None
    lr_scaling: LearningRateScaling | None = None
    budget: bool = False

    def __post_init__(self) -> None:
        _check_choice("objective", self.objective, get_args(Objective))
        _check_choice("lr_scaling", self.lr_scaling, (None, *get_args(LearningRateScaling)))
        _check_choice("worst_case", self.worst_case, (None, *get_args(WorstCase)))
        sizes = ("max_batch_size", "min_batch_size", "multiple_of", "target_batch_size")
        for name in (*sizes, "min_steps_per_epoch"):
            value = getattr(self, name)
            is_left_alone = name == "min_steps_per_epoch" and value == "auto"
            if value is not None and not is_left_alone:
                if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                    raise ValueError(
                        f"{name} must be a whole number of at least 1, got {value!r:.80}"
                    )
                object.__setattr__(self, name, int(value))
        if self.max_batch_size is not None and self.max_batch_size < (self.min_batch_size or 1):
            low = self.min_batch_size
            raise ValueError(
                f"max_batch_size must be at least min_batch_size={low}, got {self.max_batch_size}"
            )
        if self.objective == "recipe" and self.target_batch_size is not None:
            raise ValueError(
                'target_batch_size must be None with objective="recipe", which takes the samples of'
                f" an optimizer step from the project, got {self.target_batch_size}"
            )
        check_switches(budget=self.budget)
        if self.budget and self.worst_case is not None:
            raise ValueError(
                "worst_case must be None with budget=True, which takes the batches of the loader,"
                f" got {self.worst_case!r:.80}"
            )
        _check_path("batch_arg_name", self.batch_arg_name)
        parse_memory_limit(self.memory_limit, available_bytes=1)
        _check_not_gib(self.memory_limit)
        if isinstance(self.memory_limit, Real):
            object.__setattr__(self, "memory_limit", _plain_number(self.memory_limit))

    def first_size(self, default: int) -> int:
        """The smallest size to try, which is the default if the arguments allow it."""
        size = self.min_batch_size or default
        unit = self.multiple_of or 1
        return -(-size // unit) * unit

    @property
    def bounds_the_raise(self) -> bool:
        """Whether the size may be raised only as far as the training stays about the same.

        An argument that asks for a larger size lifts this bound.
        """
        asked = (self.max_batch_size, self.target_batch_size, self.min_steps_per_epoch)
        return self.objective == "auto" and asked == (None, None, "auto")

    def keeps_step(self, accumulate_grad_batches: int) -> bool:
        """Whether the samples of an optimizer step of the project are kept from the first size on.

        Where the project accumulates, a larger batch has the same step in fewer batches.
        """
        return accumulate_grad_batches > 1 and (self.objective == "recipe" or self.bounds_the_raise)

    @property
    def least_steps_per_epoch(self) -> int | None:
        """The optimizer steps that an epoch keeps where nothing else bounds the size."""
        if self.max_batch_size is not None or self.target_batch_size is not None:
            return None
        if self.min_steps_per_epoch == "auto":
            return LEAST_STEPS_PER_EPOCH
        return self.min_steps_per_epoch

    @property
    def largest_size(self) -> int:
        """The largest size to consider where neither the data nor the user sets one."""
        if self.max_batch_size is not None:
            return self.max_batch_size
        return UNBOUNDED_MAX_BUDGET if self.budget else UNBOUNDED_MAX_BATCH_SIZE

    @property
    def bounds(self) -> list[tuple[int, BoundArgument]]:
        """The largest sizes that the arguments allow, whatever the data are."""
        bounds: list[tuple[int, BoundArgument]] = [(self.largest_size, "max_batch_size")]
        if self.target_batch_size is not None:
            bounds.append((self.target_batch_size, "target_batch_size"))
        return bounds

    @property
    def unit(self) -> Unit:
        """What the sizes count."""
        return Unit(self.batch_arg_name.rpartition(".")[2] if self.budget else None)


def parse_memory_limit(memory_limit: object, available_bytes: int) -> int:
    """The limit in bytes.

    A fraction in (0, 1], or a percentage, is a share of ``available_bytes``, and ``None`` is all of
    them.
    """
    if memory_limit is None:
        return available_bytes
    limit_bytes = 0.0
    if isinstance(memory_limit, str):
        percentage = _PERCENTAGE.fullmatch(memory_limit)
        if percentage is not None and 0 < float(percentage[1]) <= 100:
            return int(float(percentage[1]) / 100 * available_bytes)
        limit_bytes = bytes_in(memory_limit)
    elif isinstance(memory_limit, Real) and not isinstance(memory_limit, bool):
        limit_bytes = _plain_number(memory_limit)
        if 0 < limit_bytes <= 1:
            return int(limit_bytes * available_bytes)
        # A float such as 2e9 is a whole number. Any other float becomes 0, which is refused below.
        limit_bytes = limit_bytes if limit_bytes % 1 == 0 else 0
    if not 1 <= limit_bytes < 2**63:
        raise ValueError(
            'memory_limit must be a whole number of bytes, a text such as "20GiB" or "90%", or a'
            f" fraction in (0, 1], got {memory_limit!r:.80}"
        )
    return int(limit_bytes)


def _check_not_gib(memory_limit: object) -> None:
    """Raise a ValueError for a number of bytes that was meant as one of GiB or MiB."""
    if isinstance(memory_limit, Real) and 1 < float(memory_limit) <= _LEAST_LIMIT_BYTES:
        number = int(float(memory_limit))
        unit = "GiB" if number <= 1024 else "MiB"
        share = f' or "{number}%"' if number <= 100 else ""
        raise ValueError(
            "memory_limit must be a number of bytes that a process fits into, got"
            f' {number:,}; did you mean "{number}{unit}"{share}?'
        )


def bytes_in(text: str) -> float:
    """The bytes of a text such as ``"20GiB"``; 0 for another text."""
    found = _TEXT_LIMIT.fullmatch(text)
    return 0.0 if found is None else float(found[1]) * _UNIT_BYTES.get(found[2].upper(), 0)


def check_switches(**switches: object) -> None:
    """Raise a ValueError for an argument that is neither True nor False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r:.80}")


def object_named(target: str) -> Any:
    """The object with the name ``module:name``; a wrong name ends with a list of right ones."""
    module_name, _, name = target.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise ValueError(
            f"a name must be MODULE:NAME, such as my_package.train:make, got {target!r}"
        )
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that it imports may be missing.
        if not module_name.startswith(str(error.name)):
            raise
        modules = ", ".join(sorted(path.stem for path in Path.cwd().glob("*.py"))) or "none"
        raise ValueError(
            f"{target} must name a module, got {module_name!r}; modules in {Path.cwd()}: {modules}"
        ) from error
    if not hasattr(module, name):
        names = [key for key in vars(module) if not key.startswith("_")]
        raise ValueError(
            f"{target} must name an object of {module_name}, got {name!r}. {advice_on(name, names)}"
        )
    return getattr(module, name)


def count_from(returned: Any) -> float | None:
    """The count that a function of the user has returned; ``None`` if it is not a count."""
    is_truth = isinstance(returned, bool) or "bool" in str(getattr(returned, "dtype", ""))
    if is_truth or isinstance(returned, str | bytes | bytearray):
        return None
    # An array with several numbers raises an error of its library, and an object one of its own.
    with suppress(Exception):
        count = float(returned)
        # More would not leave a finite sum.
        return count if 0 <= count < 2**63 else None
    return None


def _plain_number(number: Real) -> int | float:
    return int(number) if isinstance(number, Integral) else float(number)


def _check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    # An array is not compared, because it would compare element by element.
    if not (value is None or isinstance(value, str)) or value not in choices:
        listed = ", ".join(f'"{choice}"' if choice else "None" for choice in choices)
        raise ValueError(f"{name} must be one of {listed}, got {value!r:.80}")


def _check_path(name: str, value: object) -> None:
    if not isinstance(value, str) or not all(part.isidentifier() for part in value.split(".")):
        raise ValueError(
            f'{name} must be the name of an attribute or a path such as "kwargs.size", got'
            f" {value!r:.80}"
        )
