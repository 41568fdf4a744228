import io
import re

import pytest
from rich.console import Console

from lightning_batchmem.plan.records import MIB, NextSize, Trial
from lightning_batchmem.search.progress import SearchProgress


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_line_of_a_search_has_the_size_with_its_prediction_and_its_peak(enabled, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    trials = [Trial(size, "ok", {"forward": (100 + size) * MIB}) for size in (2, 8)]
    with SearchProgress(enabled=enabled, console=console) as progress:
        progress.trying(NextSize(2, "probe"), [])
        progress.refresh()
        progress.trying(NextSize(400, "rehearsal"), trials)
        progress.measured(Trial(400, "ok", {"forward": 501 * MIB}))
    texts = re.findall(r"BatchFinder: ([^\r\n]*) 0:00:0\d", console.file.getvalue())
    last = "size 400, predicted 500.0 MiB, measured 501.0 MiB"
    expected = []
    if enabled:
        expected = ["reading samples", "size 2", last] if terminal else [last]
    assert list(dict.fromkeys(texts)) == expected
