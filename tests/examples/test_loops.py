"""The plain loop, in a process of its own, because its limit includes the interpreter."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_plain_loop_trains_with_the_size_of_its_plan(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "plain_loop.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (size,) = re.findall(r"^BatchFinder: batch size (\d+), ", done.stdout, re.MULTILINE)
    accuracy, steps, used = re.fullmatch(
        r"accuracy ([\d.]+) after (\d+) steps of (\d+) images", done.stdout.splitlines()[-1]
    ).groups()
    assert used == size
    assert int(steps) == 3 * -(-1797 // int(size))
    assert float(accuracy) > 0.8
    assert list(tmp_path.iterdir()) == []
