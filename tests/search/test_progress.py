import io
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from lightning_batchmem.plan.options import Unit
from lightning_batchmem.plan.records import MIB, NextSize, Trial, TrialMemory
from lightning_batchmem.search.progress import START_TEXT, SearchProgress


def shown(console):
    """The texts of the line, each once."""
    texts = re.findall(r"BatchFinder: \d s, ([^\r\n\x1b]*)", console.file.getvalue())
    return list(dict.fromkeys(texts))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_that_was_closed_does_not_end_a_search(monkeypatch, is_terminal):
    written = []

    def write(text):
        written.append(text)
        raise OSError("Input/output error")

    stream = SimpleNamespace(write=write, isatty=lambda: is_terminal, encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    with SearchProgress(enabled=True) as progress:
        progress.begin_trial(NextSize(2, "probe"), [])
        progress.refresh()
    assert sys.stdout is stream
    # After an error nothing more is written.
    assert len(written) == 1


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_line_of_a_search_has_the_trial_and_ends_without_a_size(enabled, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    trials = [Trial(size, "ok", TrialMemory({"forward": (100 + size) * MIB})) for size in (2, 8)]
    with SearchProgress(enabled=enabled, console=console) as progress:
        progress.begin_trial(NextSize(2, "probe"), [])
        progress.refresh()
        progress.begin_trial(NextSize(400, "rehearsal"), trials)
        progress.begin_step()
        progress.begin_step()
        progress.refresh()
        progress.measured(
            Trial(400, "ok", TrialMemory({"forward": 501 * MIB}), "rehearsal"), Unit()
        )
        progress.refresh()
    last = "rehearsal of size 400, predicted 500.0 MiB"
    on_terminal = [
        "reading samples",
        "run 1 of about 4, size 2",
        f"run 2 of about 2, step 2, {last}",
        f"run 2 of about 2, measured 501.0 MiB, {last}",
    ]
    expected = []
    if enabled:
        # Without a terminal, the size that was tried last must not stand above the plan.
        expected = (
            [*on_terminal, "2 runs"]
            if terminal
            else ["run 2 of about 2, rehearsal: 400 samples take 501.0 MiB", "2 runs"]
        )
    assert shown(console) == expected
    # A log file has a sentence from the start, so that a long search does not look like a hang.
    assert console.file.getvalue().startswith(START_TEXT) == (enabled and not terminal)


def test_step_and_time_are_visible_at_80_columns():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    trials = [Trial(size, "ok", TrialMemory({"forward": 80_000 * MIB + size})) for size in (2, 8)]
    with SearchProgress(enabled=True, console=console) as progress:
        progress.begin_trial(NextSize(1_048_576, "rehearsal"), trials)
        for _ in range(1234):
            progress.begin_step()
        progress.refresh()
    assert any(
        text.startswith("run 1 of about 1, step 1234, rehearsal of size") for text in shown(console)
    )


def test_after_an_error_the_line_keeps_the_trial():
    console = Console(file=io.StringIO(), force_terminal=False, width=120)
    progress = SearchProgress(enabled=True, console=console)

    def fail_in_a_step():
        with progress:
            progress.begin_trial(NextSize(1, "probe"), [])
            progress.begin_step()
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_a_step()
    assert shown(console) == ["run 1 of about 4, step 1, size 1"]


@pytest.mark.parametrize(
    ("trial", "unit", "text"),
    [
        (Trial(32, "ok", TrialMemory({"forward": 5 * MIB})), Unit(), ": 32 samples take 5.0 MiB"),
        (
            Trial(4096, "ok", TrialMemory({"forward": 5 * MIB})),
            Unit("max_tokens"),
            ": max_tokens 4,096 takes 5.0 MiB",
        ),
        (
            Trial(
                8, "out_of_memory", TrialMemory(), "rehearsal", error="No [/red] room.\nFree 1 GiB"
            ),
            Unit(),
            ", rehearsal: 8 samples ran out of memory (No [/red] room. Free 1 GiB)",
        ),
    ],
)
def test_a_log_file_has_a_line_for_what_a_size_takes(trial, unit, text):
    console = Console(file=io.StringIO(), force_terminal=False, width=20)
    with SearchProgress(enabled=True, console=console) as progress:
        progress.begin_trial(NextSize(trial.batch_size, "probe"), [])
        progress.measured(trial, unit)
        assert shown(console) == [f"run 1 of about 4{text}"]


def test_a_notebook_gets_the_lines_of_a_log_file(monkeypatch):
    """They need no ipywidgets, and are text in a notebook that is saved."""
    written = []
    stream = SimpleNamespace(write=written.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stdout", stream)
    # The kernel of a notebook sets this.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with SearchProgress(enabled=True) as progress:
        progress.begin_trial(NextSize(2, "probe"), [])
        progress.measured(Trial(2, "ok", TrialMemory({"forward": 5 * MIB})), Unit())
    assert "".join(written).splitlines() == [
        START_TEXT,
        "BatchFinder: 0 s, run 1 of about 4: 2 samples take 5.0 MiB",
        "BatchFinder: 0 s, 1 run",
    ]
