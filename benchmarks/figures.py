"""Draw the pictures in ``docs/figures``, and print the plan and the table that README.md shows.

They are one run of ``examples/quickstart.py``, and the figure of ``benchmarks.law_figure``.

    python -m benchmarks.figures
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import ROOT, command_line, machine
from benchmarks.law_figure import draw_law, use_palette
from lightning_batchmem.__main__ import draw as draw_figures


def draw(out: Path) -> None:
    """Run the quickstart, and write every figure as PNG.

    Raises:
        CalledProcessError: if the quickstart ends with an error.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(ROOT / "examples" / "quickstart.py")]
        subprocess.run(command, cwd=directory, check=True)
        (log_dir,) = Path(directory).glob("logs/quickstart/version_*")
        exit_code = draw_figures(log_dir, out)
    assert exit_code == 0
    print(machine())
    for path in sorted(out.glob("*.png")):
        use_palette(path)
    draw_law(out)


def main() -> None:
    command_line(__doc__).parse_args()
    draw(ROOT / "docs" / "figures")


if __name__ == "__main__":
    main()
