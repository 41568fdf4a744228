"""The memory test of the examples, as in the documentation.

python -m lightning_batchmem check examples.NAME:make \
    --reference examples/memory/NAME.json --update
"""

import importlib
from pathlib import Path

import pytest
import torch

from lightning_batchmem import assert_memory
from lightning_batchmem.check import MeasuredStep
from lightning_batchmem.plan.json_fields import from_json

REFERENCES = sorted((Path(__file__).parents[2] / "examples" / "memory").glob("*.json"))


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda path: path.stem)
def test_an_example_needs_no_more_memory(reference):
    # Builds for a CPU and for CUDA have the same operators on the host.
    measured = from_json(MeasuredStep, reference.read_text())
    measured_with, _, _ = measured.versions["torch"].partition("+")
    if measured_with != torch.__version__.partition("+")[0]:
        pytest.skip(f"the reference is that of torch {measured_with}")
    make = importlib.import_module(f"examples.{reference.stem}").make
    assert_memory(make, reference, tolerance=0.01)


def test_there_are_references():
    assert [path.stem for path in REFERENCES] == ["compare", "quickstart"]
