import io
import re

import pytest
from rich.console import Console

from lightning_batchmem.plan.records import MIB, NextSize, Trial
from lightning_batchmem.search.progress import SearchProgress


def shown(console):
    """The texts of the line, each once."""
    texts = re.findall(r"BatchFinder: ([^\r\n]*) 0:00:0\d", console.file.getvalue())
    return list(dict.fromkeys(texts))


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_line_of_a_search_has_the_trial_and_ends_without_a_size(enabled, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    trials = [Trial(size, "ok", {"forward": (100 + size) * MIB}) for size in (2, 8)]
    with SearchProgress(enabled=enabled, console=console) as progress:
        progress.trying(NextSize(2, "probe"), [])
        progress.refresh()
        progress.trying(NextSize(400, "rehearsal"), trials)
        progress.begin_step()
        progress.begin_step()
        progress.refresh()
        progress.measured(Trial(400, "ok", {"forward": 501 * MIB}))
        progress.refresh()
    last = "trial 2, rehearsal of size 400, predicted 500.0 MiB"
    on_terminal = [
        "reading samples",
        "trial 1, probe of size 2",
        f"{last}, step 2",
        f"{last}, measured 501.0 MiB",
    ]
    expected = []
    if enabled:
        # Without a terminal, the size that was tried last must not stand above the plan.
        expected = [*on_terminal, "2 trials"] if terminal else ["2 trials"]
    assert shown(console) == expected


def test_after_an_error_the_line_keeps_the_trial():
    console = Console(file=io.StringIO(), force_terminal=False, width=120)
    progress = SearchProgress(enabled=True, console=console)

    def fail_in_a_step():
        with progress:
            progress.trying(NextSize(1, "probe"), [])
            progress.begin_step()
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_a_step()
    assert shown(console) == ["trial 1, probe of size 1, step 1"]
