"""The processes that search together: one answer, and nobody left waiting."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Event, Lock, Thread
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_batchmem._lightning.strategies import processes_on_node
from lightning_batchmem.devices.base import DeviceMemory
from lightning_batchmem.plan.records import PHASES, Trial

_FINE, _FAILED = 0.0, 1.0
_NUMBERS = 22
"""How many a rank sends each time: its state, which exchange it is, and what is exchanged; 176 bytes."""

_TELL_SECONDS = 20.0
"""How long a rank that failed waits for the others to hear of it, before it leaves them a broken connection."""

_LISTEN_SECONDS = 0.5
"""How often a rank looks for another's reason during a step that all take together."""


class RankFailedError(RuntimeError):
    """Another rank has ended what all of them do together; the message says which one, and why."""


class Ranks:
    """The processes that search together, through their strategy's own collectives.

    Every rank calls :meth:`exchange` as often as the others, in the same order. A rank that fails in between takes part
    in one more exchange, which tells the others. Where the others wait in the middle of a step that all take together,
    it leaves its reason in the process group's store and ends, which breaks their wait; then they look there.

    Args:
        trainer: of this rank.

    Attributes:
        size: how many there are.
        rank: which one this is.
        in_step: whether this rank is in a step that all take together, or has failed in one.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.size, self.rank = trainer.world_size, trainer.global_rank
        self.in_step = False
        self._strategy = trainer.strategy
        self._exchanges = 0
        self._heard: str | None = None
        self._lock = Lock()
        self._key = f"lightning_batchmem/search_{next(_SEARCHES)}"

    def exchange(self, *numbers: float) -> list[list[float]]:
        """What all ranks gave, in their order.

        Args:
            numbers: up to 20, as many on each rank; exact up to 2^53.

        Raises:
            RankFailedError: when another rank has failed, or is gone.
        """
        if self.size == 1:
            return [list(numbers)]
        rows = self._gather(_FINE, *numbers)
        failed = [rank for rank, row in enumerate(rows) if row[0] == _FAILED]
        if failed:
            raise RankFailedError(self._strategy.broadcast("", src=failed[0]))
        return [row[2 : 2 + len(numbers)] for row in rows]

    def hear_from(self, rank: int, text: str) -> str:
        """The text of one rank, on all of them; every rank calls it, after an exchange that told which."""
        heard: str = self._strategy.broadcast(text, src=rank)
        return heard

    @contextmanager
    def collective_step(self) -> Iterator[None]:
        """Steps that all ranks take together: one that fails cannot reach the others by an exchange."""
        self.in_step = True
        with self._listening():
            yield
        self.in_step = False  # not where the step has failed: that is what matters then

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Look for another rank's reason while this one may be waiting for it."""
        over = Event()

        def listen() -> None:
            while not over.wait(_LISTEN_SECONDS):
                if self._left_behind() is not None:
                    return

        if self.size > 1:
            Thread(target=listen, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def leave(self, error: BaseException) -> None:
        """Let ranks that are about to search know that this one will not come."""
        if self.size > 1:
            self.in_step = True  # by the store: nobody knows which collective the others are in
            self._tell(error)

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Whatever ends this on one rank ends it on all of them; nobody leaves before the others are through.

        Raises:
            RankFailedError: on every rank but the one that failed, whose own error stays as it is.
        """
        try:
            yield
            self.exchange()
        except RankFailedError:
            raise
        except BaseException as error:
            if self.size > 1:
                reason = self._left_behind()
                if reason is not None:  # then this error is only what the other rank's end does here
                    raise RankFailedError(reason) from error
                self._tell(error)
            raise

    def _gather(self, *numbers: float) -> list[list[float]]:
        self._exchanges += 1
        sent = [*numbers[:1], float(self._exchanges), *numbers[1:]]
        sent += [0.0] * (_NUMBERS - len(sent))
        row = torch.tensor(sent, dtype=torch.float64, device=self._strategy.root_device)
        try:
            with self._listening():
                rows: list[list[float]] = self._strategy.all_gather(row).tolist()
        except RuntimeError as error:  # gloo and NCCL have no type of their own for a peer that is gone
            reason = self._left_behind() or f"a rank ended without a word; rank {self.rank} waited for it: {error}"
            raise RankFailedError(reason) from error
        if {row[1] for row in rows} != {rows[0][1]}:
            raise RuntimeError("BatchFinder's ranks are not at the same point of the search; please report this")
        return rows

    def _tell(self, error: BaseException) -> None:
        """Let the others know; not for ever, since they may wait somewhere else."""
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        reason = f"rank {self.rank} ended the search: {text}"

        def tell() -> None:
            # the others are gone, or have failed too: this rank's own error is the one that its user has to see
            with suppress(RuntimeError):
                store = _store()
                if not store.check([self._key]):  # the first reason stays: others are often what it led to
                    store.set(self._key, f"{self.rank} {reason}")
                if self.in_step:  # the store may end with this process: not before the others have read it, or failed
                    store.set(self._known_key(self.rank), "")
                    while self._uninformed():
                        time.sleep(_LISTEN_SECONDS)
                else:
                    rows = self._gather(_FAILED)
                    first = next(rank for rank, row in enumerate(rows) if row[0] == _FAILED)
                    self._strategy.broadcast(reason if first == self.rank else "", src=first)

        thread = Thread(target=tell, daemon=True)
        thread.start()
        thread.join(_TELL_SECONDS)
        if self.in_step and thread.is_alive():
            with suppress(RuntimeError):  # as above
                ranks = ", ".join(str(rank) for rank in self._uninformed())
                error.add_note(f"BatchFinder: not heard from in {_TELL_SECONDS:.0f} s, and perhaps gone: rank {ranks}")

    def _known_key(self, rank: int) -> str:
        return f"{self._key}/known_by_{rank}"

    def _uninformed(self) -> list[int]:
        """The ranks that have neither failed nor heard yet that one has."""
        store, keys = _store(), [self._known_key(rank) for rank in range(self.size)]
        return [] if store.check(keys) else [rank for rank, key in enumerate(keys) if not store.check([key])]

    def _left_behind(self) -> str | None:
        """The reason that another rank has left in the store; ``None`` when there is none, or no store any more."""
        with self._lock, suppress(RuntimeError):  # the store is in the process of rank zero, and ends with it
            store = _store()
            if self._heard is None and store.check([self._key]):
                rank, _, reason = store.get(self._key).decode().partition(" ")
                if int(rank) != self.rank:
                    self._heard = reason
                    store.set(self._known_key(self.rank), "")
        return self._heard


def _store() -> Any:
    # torch 2.5.1 and 2.13; there is no public way to the store that the process group was made with
    return torch.distributed.distributed_c10d._get_default_store()


_SEARCHES = itertools.count()  # each search of a process has a key of its own, the same on every rank


def worst_of_all(trial: Trial, ranks: Ranks) -> Trial:
    """The trial of all ranks as one: the highest peaks, the slowest step, out of memory where one of them was.

    Args:
        trial: of this rank.
        ranks: all of them; each has to call this with a trial at the same size.
    """
    if ranks.size == 1:
        return trial
    ran_out = trial.outcome == "out_of_memory"
    rows = ranks.exchange(
        trial.batch_size,
        ran_out,
        trial.noise_bytes,
        _number(trial.loose_share),
        trial.fixed_bytes,
        trial.worker_bytes,
        trial.measured_steps,
        trial.full_steps,
        trial.samples_run,
        _number(trial.peak_reserved_bytes),
        _number(trial.step_seconds),
        *(_number(trial.phase_peak_bytes.get(phase)) for phase in PHASES),
    )
    sizes, outcomes, noises, loose, fixed, workers, measured, full, samples, reserved, seconds, *phases = zip(
        *rows, strict=True
    )
    if len(set(sizes)) > 1:
        raise RuntimeError(f"BatchFinder's ranks ran different sizes, {sorted(set(sizes))}; please report this")
    error = ""
    if any(outcomes):
        first = outcomes.index(1.0)
        error = f"on rank {first}: {ranks.hear_from(first, trial.error)}"
    peaks = {phase: int(max(found)) for phase, found in zip(PHASES, phases, strict=True) if max(found) >= 0}
    return replace(
        trial,
        outcome="out_of_memory" if any(outcomes) else "ok",
        phase_peak_bytes=peaks,
        noise_bytes=int(max(noises)),
        loose_share=max(loose) if max(loose) >= 0 else None,
        fixed_bytes=int(min(fixed)),
        worker_bytes=int(max(workers)),
        measured_steps=int(min(measured)),
        full_steps=int(min(full)),
        samples_run=int(max(samples)),
        peak_reserved_bytes=int(max(reserved)) if max(reserved) >= 0 else None,
        step_seconds=max(seconds) if max(seconds) >= 0 else None,
        error=error,
    )


def own_budget_bytes(device_memory: DeviceMemory, trainer: Trainer) -> int:
    """The most that this rank may hold: of what the host still has, its ranks get the same each.

    Args:
        device_memory: of this rank's device.
        trainer: of this rank.
    """
    budget_bytes = device_memory.budget_bytes()
    processes = processes_on_node(trainer) if device_memory.name == "host" else 1
    if processes == 1:
        return budget_bytes
    held_bytes = device_memory.current().allocated_bytes
    return held_bytes + (budget_bytes - held_bytes) // processes


def _number(value: float | None) -> float:
    return -1.0 if value is None else value
