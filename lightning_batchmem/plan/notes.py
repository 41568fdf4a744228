"""Remarks on a plan: what each of them is about decides where it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

NoteKind = Literal[
    "training",
    "cost",
    "simulation",
    "earlier_plan",
    "limit",
    "risk",
    "settings",
    "search",
]
"""What a note is about, in the order in which notes are printed.

- ``"training"``: what the size changes in the training, or what cannot go with it.
- ``"cost"``: a search that takes longer than the training.
- ``"simulation"``: what a search on a simulated GPU assumes, and what it leaves out.
- ``"earlier_plan"``: why a given plan, or what earlier starts measured, was not used.
- ``"limit"``: what keeps the size small besides the memory of usual steps.
- ``"risk"``: why a later step may fail, or need more memory than the rehearsal.
- ``"settings"``: settings of the Trainer that count batches.
- ``"search"``: everything else about the search; the short text leaves these out.
"""


@dataclass(frozen=True, order=True)
class Note:
    """One remark on a plan.

    Args:
        kind: what it is about.
        text: one or two sentences; empty for no remark.
    """

    kind: NoteKind
    text: str

    def __str__(self) -> str:
        return self.text


def in_order(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Each note that has a text once; the kinds in their order, and each kind as it came."""
    ranks = {kind: rank for rank, kind in enumerate(get_args(NoteKind))}
    distinct = dict.fromkeys(note for note in notes if note.text)
    # A plan of a later version may have other kinds.
    return tuple(sorted(distinct, key=lambda note: ranks.get(note.kind, len(ranks))))
