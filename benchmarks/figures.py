"""Draw the pictures in ``docs/figures``, and print the plan and the table that README.md shows.

They are one run of ``examples/quickstart.py``, and the figure of ``benchmarks.law_figure``.

    python -m benchmarks.figures
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from benchmarks.common import ROOT, command_line, machine
from benchmarks.law_figure import draw_law
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
    draw_law(out)
    print(machine())
    for path in sorted(out.glob("*.png")):
        # A palette makes the committed file four times smaller.
        with Image.open(path) as image:
            palette = image.convert("RGB").quantize(
                method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
            )
        palette.save(path, optimize=True)


def main() -> None:
    command_line(__doc__).parse_args()
    draw(ROOT / "docs" / "figures")


if __name__ == "__main__":
    main()
