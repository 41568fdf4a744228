"""The models of timm whose published training sizes ``published_sizes`` compares with.

They were chosen by this rule, and committed before any of them was run:

1. The candidates are the models of ``benchmarks/published/timm_sizes.csv`` that timm still has
   under the same name and that are not in :data:`SEEN`, with images of at most 384 pixels and a
   published size below 512. At 512 the published ladder starts, so that nothing bounds it above.
   A model with a fixed image size must have the published one.
2. A family is a file of timm (``timm.list_modules()``). Its candidates are sorted by name, and the
   one in the middle (position ``count // 2``) is taken. If it has another number of parameters than
   the published model (in millions, two decimals), the next ones are looked at, from the middle
   outwards and the later name first. A family without such a model is left out.

The list is written again by this command; it needs timm 1.0.31:

    python -m benchmarks.published_list
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import command_line

FOLDER = Path(__file__).with_name("published")
ALL_PATH = FOLDER / "timm_sizes.csv"
CHOSEN_PATH = FOLDER / "timm_chosen.csv"

FIRST_SIZE = 512
"""The size at which the published ladder starts."""

LARGEST_IMAGE = 384

SEEN = frozenset(
    (
        "beit_base_patch16_224",
        "convnext_base",
        "convnext_tiny",
        "densenet121",
        "efficientnet_b0",
        "efficientnet_b3",
        "efficientnet_b4",
        "hrnet_w18",
        "inception_v3",
        "mixer_b16_224",
        "mobilevit_s",
        "nfnet_f0",
        "poolformer_s12",
        "regnety_032",
        "resnet101",
        "resnet152",
        "resnet50",
        "resnext50_32x4d",
        "swin_base_patch4_window7_224",
        "swin_tiny_patch4_window7_224",
        "tf_efficientnet_b7",
        "vgg16_bn",
        "vit_base_patch16_224",
        "vit_base_patch16_384",
        "vit_large_patch16_224",
        "vit_small_patch16_224",
    )
)
"""The models that were run while the simulated GPU was developed."""


@dataclass(frozen=True)
class Published:
    """A row of the published table; ``image`` is the height and the width in pixels."""

    model: str
    batch_size: int
    image: int
    million_parameters: float


@dataclass(frozen=True)
class Chosen:
    """A model that is compared; ``image`` is the height and the width in pixels."""

    model: str
    family: str
    batch_size: int
    image: int


@dataclass(frozen=True)
class Known:
    """What timm says of a model today; ``fixed_image`` is ``None`` if any image size is taken."""

    family: str
    fixed_image: int | None


def read_published() -> list[Published]:
    with ALL_PATH.open(newline="", encoding="utf-8") as file:
        return [
            Published(
                row["model"],
                int(row["batch_size"]),
                int(row["image"]),
                float(row["million_parameters"]),
            )
            for row in csv.DictReader(file)
        ]


def read_chosen() -> list[Chosen]:
    with CHOSEN_PATH.open(newline="", encoding="utf-8") as file:
        return [
            Chosen(row["model"], row["family"], int(row["batch_size"]), int(row["image"]))
            for row in csv.DictReader(file)
        ]


def write_chosen(chosen: Iterable[Chosen]) -> None:
    with CHOSEN_PATH.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "family", "batch_size", "image"])
        for one in chosen:
            writer.writerow([one.model, one.family, one.batch_size, one.image])


def next_size(size: int) -> int:
    """The rung of the published ladder below ``size``; 0 below 1.

    The rungs are the powers of two, and the middle of two of them: 512, 384, 256, 192, ..., 4, 3,
    2, 1. Source: ``decay_batch_step`` in ``timm/utils/decay_batch.py`` of timm at commit aa4b5850.
    """
    if size <= 1:
        return 0
    power: int = 2 ** math.floor(math.log2(size))
    if size > power:
        return power
    return max(power * 3 // 4, 1)


def ladder() -> Iterator[int]:
    """All rungs from 512 down to 1."""
    size = FIRST_SIZE
    while size:
        yield size
        size = next_size(size)


def size_above(published: int) -> float:
    """The rung above the published size, which did not train; infinite for the first rung."""
    above = [size for size in ladder() if size > published]
    return min(above, default=math.inf)


def from_the_middle(count: int) -> list[int]:
    """All positions of a list, the middle first, then outwards with the later one first."""
    middle = count // 2
    return sorted(range(count), key=lambda position: (abs(position - middle), -position))


def candidates(
    published: Sequence[Published], known: dict[str, Known]
) -> dict[str, list[Published]]:
    """The candidates of each family in the order in which they are looked at."""
    by_family: dict[str, list[Published]] = {}
    for row in sorted(published, key=lambda row: row.model):
        if row.model not in known or row.model in SEEN:
            continue
        if row.image > LARGEST_IMAGE or row.batch_size >= FIRST_SIZE:
            continue
        if known[row.model].fixed_image not in (None, row.image):
            continue
        by_family.setdefault(known[row.model].family, []).append(row)
    return {
        family: [rows[position] for position in from_the_middle(len(rows))]
        for family, rows in sorted(by_family.items())
    }


def main() -> None:
    command_line(__doc__).parse_args()
    # timm is only in the environment of this benchmark.
    import timm
    import torch

    def million_parameters(model: str) -> float:
        with torch.device("meta"):
            made = timm.create_model(model)
        count: int = sum(weight.numel() for weight in made.parameters())
        return round(count / 1e6, 2)

    known = {}
    for family in timm.list_modules():
        for model in timm.list_models(module=family):
            configuration = timm.get_pretrained_cfg(model)
            is_fixed = configuration is not None and configuration.fixed_input_size
            fixed_image = configuration.input_size[-1] if is_fixed else None
            known[model] = Known(family, fixed_image)
    chosen = []
    for family, rows in candidates(read_published(), known).items():
        for row in rows:
            if million_parameters(row.model) == row.million_parameters:
                chosen.append(Chosen(row.model, family, row.batch_size, row.image))
                break
            print(f"{row.model}: another number of parameters than the published model")
        else:
            print(f"{family}: no model with the published number of parameters")
    write_chosen(chosen)
    print(f"timm {timm.__version__}: {len(chosen)} models of {len(chosen)} families")


if __name__ == "__main__":
    main()
