"""Run the training of README.md on a simulated GPU, print what it prints, and draw its figures.

They are the pictures of a search and of a run in ``docs/figures``, that of the search which
``simulate`` makes, in light and in dark, and the figure of ``benchmarks.law_figure``. It needs a
CUDA build of torch and g++.

    python -m benchmarks.figures
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageOps

from benchmarks.common import ROOT, command_line, machine
from benchmarks.law_figure import draw_law, use_palette
from lightning_batchmem.__main__ import draw as draw_figures
from lightning_batchmem.profile.run_folder import PLAN_NAME
from tests.helpers.readme_training import GPU, SCRIPT, what_it_prints


def draw(out: Path) -> None:
    """Run the training and the simulation, and write every figure as PNG.

    Raises:
        RuntimeError: if the training ends with an error.
        CalledProcessError: if the simulation does.
    """
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        print(what_it_prints(folder))
        (log_dir,) = folder.glob("lightning_logs/version_*")
        simulated = folder / "simulated"
        simulated.mkdir()
        simulate = ["simulate", GPU, "--out", str(simulated / PLAN_NAME), str(SCRIPT)]
        subprocess.run([sys.executable, "-m", "lightning_batchmem", *simulate], check=True)
        drawn = draw_figures(log_dir, folder) + draw_figures(simulated, simulated)
        assert drawn == 0
        light = out / "simulated-light.png"
        light.write_bytes((simulated / "search.png").read_bytes())
        over_steps = "memory_over_steps.png"
        (out / over_steps).write_bytes((folder / over_steps).read_bytes())
    print(machine())
    darken(light, out / "simulated-dark.png")
    for path in sorted(out.glob("*.png")):
        use_palette(path)
    draw_law(out)


def darken(light: Path, dark: Path) -> None:
    """Write a picture with the lightness of each pixel inverted, and its hue as it is."""
    with Image.open(light) as image:
        hue, saturation, value = ImageOps.invert(image.convert("RGB")).convert("HSV").split()
    # The complement of a colour has the opposite hue.
    own_hue = hue.point(lambda degree: (degree + 128) % 256)
    Image.merge("HSV", (own_hue, saturation, value)).convert("RGB").save(dark)


def main() -> None:
    command_line(__doc__).parse_args()
    draw(ROOT / "docs" / "figures")


if __name__ == "__main__":
    main()
