"""SIGTERM during a search: Lightning's own handlers are not yet in place, and the default would restore nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightning.pytorch.utilities.exceptions import SIGTERMException


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise Lightning's ``SIGTERMException`` where the signal arrives; the handler that was there before is put back.

    A handler of the user's own runs first, as it does in Lightning's training. A signal that is ignored stays ignored,
    and outside the main thread, where Python lets nobody set a handler, nothing changes.
    """
    before = signal.getsignal(signal.SIGTERM)
    # None: set by somebody outside Python, who knows what it is for
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if callable(before):
            before(number, frame)
        raise SIGTERMException

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
