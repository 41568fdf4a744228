"""The trials of a search in a file, so that a new start goes on behind one that ended the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_batchmem._version import __version__
from lightning_batchmem.plan.json_fields import from_json, read_small, to_json
from lightning_batchmem.plan.limits import SearchLimits
from lightning_batchmem.plan.notes import Note
from lightning_batchmem.plan.records import NextSize, Trial, TrialMemory
from lightning_batchmem.search.ranks import RankLostError, Ranks

ENDED = "the run ended in it"
"""The error of a trial that was running when the process ended."""


def trials_path(plan_path: Path) -> Path:
    """The file with the trials of a search whose plan will be in another file."""
    return plan_path.with_name(f"{plan_path.name}.trials")


@dataclass(frozen=True)
class _Content:
    """What the file has.

    Args:
        question: what the search is for; trials of another question do not count.
        trials: the trials that have ended.
        running: the size that is run now; ``None`` between two trials.
        why_kept: why accumulation keeps the samples of an optimizer step in these trials; empty if
            it does not.
    """

    question: str = ""
    trials: tuple[Trial, ...] = ()
    running: NextSize | None = None
    why_kept: str = ""


def ended_in_trial(plan_path: Path) -> bool:
    """Whether a trial was running when the process of a search ended.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not a file of trials.
    """
    path = trials_path(plan_path)
    return path.exists() and from_json(_Content, read_small(path)).running is not None


class KeptTrials:
    """The trials of one search, kept until its plan is written.

    The first rank reads and writes the file, because ranks may see different files.

    Args:
        ranks: the processes that search together.
        path: the file; ``None`` to keep none, where a step that ends the process ends the search.
        training: what trials of another strategy or precision have another text for.

    Attributes:
        notes: remarks about the trials of an earlier start.
    """

    def __init__(self, ranks: Ranks, path: Path | None = None, training: str = "") -> None:
        self.notes: list[Note] = []
        self._training = training
        self._ranks = ranks
        self._path = path
        self._content = _Content()

    @property
    def why_kept(self) -> str:
        """Why accumulation keeps the samples of an optimizer step; empty if it does not."""
        return self._content.why_kept

    def read(self, question: str) -> tuple[Trial, ...]:
        """Read the trials of an earlier start of this search, and write a file where there is none.

        Args:
            question: what the search is for.

        Returns:
            The trials; one that has not ended is out of memory.

        Raises:
            ValueError: if the file cannot be written, or is not a file of trials.
        """
        question = f"{__version__}; {self._training}; {question}"
        content, text = self._ranks.exchange(self._read(question))[0]
        trials = content.trials
        if content.running is not None:
            size = content.running.batch_size
            kind = content.running.kind
            trials = (*trials, Trial(size, "out_of_memory", TrialMemory(), kind, error=ENDED))
        if ended := " and ".join(f"{trial.batch_size:,}" for trial in _ended_in(trials)):
            text = (
                f"Earlier starts ended at size {ended}, which counts as out of memory. If something"
                f" else ended them, delete {self._path} and the plan, and search again."
            )
        self.notes = [Note("earlier_plan", text)] if text else []
        self._write(replace(content, trials=trials, running=None))
        return trials

    @contextmanager
    def running(self, step: NextSize, *, are_collective: bool) -> Iterator[None]:
        """Mark a trial in the file while it runs in the body.

        Args:
            step: the size.
            are_collective: whether an error on one rank ends all ranks.
        """
        before = self._content
        self._write(replace(before, running=step))
        try:
            yield
        except BaseException as error:
            # An error of the project comes at every size. Out of memory, and a connection to a rank
            # that is gone, are RuntimeErrors; a launcher interrupts a rank where another is gone.
            is_of_project = isinstance(error, Exception) and not isinstance(
                error, RuntimeError | MemoryError
            )
            may_be_memory = are_collective and not is_of_project
            if not (may_be_memory or isinstance(error, RankLostError)):
                self._write(before)
            raise

    def end(self, trials: tuple[Trial, ...]) -> None:
        """Keep the trials, all of which have ended."""
        self._write(replace(self._content, trials=trials, running=None))

    def begin_again(self, why_kept: str) -> tuple[Trial, ...]:
        """Forget the trials, because accumulation keeps the samples of an optimizer step now.

        Returns:
            Those that ended the run, because they would do so again.
        """
        trials = _ended_in(self._content.trials)
        self._write(replace(self._content, trials=trials, why_kept=why_kept))
        return trials

    def to_decide(self, limits: SearchLimits) -> SearchLimits:
        """The limits with which the next size is chosen."""
        if self._path is None:
            return limits
        # A new start goes on behind a step that ends all ranks.
        return replace(limits, steps_are_collective=False)

    def remove(self) -> None:
        """Remove the file."""
        if self._path is not None and self._ranks.rank == 0:
            self._path.unlink(missing_ok=True)

    def _read(self, question: str) -> tuple[_Content, str]:
        empty = _Content(question)
        path = self._path
        if path is None or self._ranks.rank > 0 or not path.exists():
            return empty, ""
        try:
            content = from_json(_Content, read_small(path))
        except ValueError as error:
            raise ValueError(
                f"{path} must have the trials of a search, but cannot be read ({error}). Delete it,"
                " or name another plan."
            ) from error
        if content.question != question:
            return empty, f"The trials in {path} were of another search, and were not used."
        return content, ""

    def _write(self, content: _Content) -> None:
        self._content = content
        path = self._path
        if path is None or self._ranks.rank > 0:
            return
        unfinished = path.with_name(f"{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(to_json(content), encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            raise ValueError(
                f"{path} cannot be written ({error}). Name another file for the plan."
            ) from error


def _ended_in(trials: tuple[Trial, ...]) -> tuple[Trial, ...]:
    return tuple(trial for trial in trials if trial.error == ENDED)
