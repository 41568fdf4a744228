"""Which parts have grown, and the text that names them."""

import pytest

from lightning_batchmem.check.growth import compared
from lightning_batchmem.check.reference import PhaseMemory, StepMemory

MIB = 2**20
VERSIONS = {"lightning_batchmem": "1", "torch": "2"}


def memory(versions=VERSIONS, **phases):
    return StepMemory(phases, versions)


def growth(before, now, tolerance=0.01):
    return compared(before, now, tolerance, "Classifier")


def sample(sample_bytes, **of_modules):
    names = {name.replace("_", "."): value for name, value in of_modules.items()}
    return PhaseMemory(sample_bytes=sample_bytes, sample_bytes_of_modules=names)


def fixed(fixed_bytes, **of_modules):
    return PhaseMemory(fixed_bytes=fixed_bytes, fixed_bytes_of_modules=of_modules)


def test_a_grown_phase_is_one_line_with_its_module():
    before = sample(3 * MIB, blocks_2_mlp_0=MIB, blocks_3_mlp_0=MIB, blocks_3_mlp_1=MIB)
    # Both layers have half of the growth each.
    now = sample(
        4 * MIB, blocks_2_mlp_0=MIB, blocks_3_mlp_0=MIB * 3 // 2, blocks_3_mlp_1=MIB * 3 // 2
    )
    result = growth(memory(backward=before), memory(backward=now))
    assert result.grown == [
        "backward: 3.000 -> 4.000 MiB a sample, +33.3 %, largest growth in blocks.3.mlp"
    ]
    assert result.smaller == result.notes == []


def test_growth_in_one_layer_names_the_layer_and_growth_in_none_the_model():
    before = sample(30, a_0=10, a_1=10)
    (line,) = growth(memory(forward=before), memory(forward=sample(40, a_0=10, a_1=20))).grown
    assert line == "forward: 30 -> 40 bytes a sample, +33.3 %, largest growth in a.1"
    (line,) = growth(memory(forward=before), memory(forward=sample(40, a_0=10, a_1=10))).grown
    assert line.endswith("largest growth in Classifier")
    # A module with another name has taken the place of one, and of the growth.
    (line,) = growth(memory(forward=before), memory(forward=sample(40, b_0=30, a_1=10))).grown
    assert line.endswith("largest growth in b.0")


def test_numbers_that_look_equal_are_bytes():
    (line,) = growth(
        memory(forward=sample(100 * MIB)), memory(forward=sample(100 * MIB + 1)), 0
    ).grown
    assert line.startswith("forward: 104,857,600 -> 104,857,601 bytes a sample, +0.0 %, ")


@pytest.mark.parametrize(
    ("before", "now", "tolerance", "has_grown"),
    [
        (100, 101, 0.01, False),
        (100, 102, 0.01, True),
        # 0.29 * 100 is less than 29.
        (100, 129, 0.29, False),
        (100, 100, 0, False),
        (0, 0, 0.5, False),
        (0, 1, 0.5, True),
    ],
)
def test_the_tolerance(before, now, tolerance, has_grown):
    for part in (sample, fixed):
        result = growth(memory(forward=part(before)), memory(forward=part(now)), tolerance)
        assert bool(result.grown) == has_grown
        assert result.smaller == []


def test_a_phase_that_was_not_there_has_grown_from_0():
    now = memory(optimizer_step=sample(8))
    (line,) = growth(memory(), now).grown
    assert line == "optimizer step: 0 -> 8 bytes a sample, largest growth in Classifier"
    assert growth(now, memory()).smaller == ["optimizer step: 8 -> 0 bytes a sample, -100.0 %"]


def test_the_fixed_part_is_one_line():
    before = memory(forward=fixed(MIB), backward=fixed(MIB), optimizer_step=fixed(2 * MIB))
    now = memory(
        forward=fixed(2 * MIB),
        backward=fixed(3 * MIB, head=2 * MIB),
        optimizer_step=fixed(MIB),
    )
    result = growth(before, now)
    assert result.grown == [
        "fixed part (backward): 1.000 -> 3.000 MiB, +200.0 %, largest growth in head"
    ]
    # What is smaller in another phase does not hide it.
    assert result.smaller == []
    assert growth(now, before).grown[0].startswith("fixed part (optimizer step): 1.000 -> 2.000")
    lower = memory(forward=fixed(MIB), backward=fixed(MIB // 2), optimizer_step=fixed(2 * MIB))
    assert growth(before, lower).smaller == ["fixed part (backward): 1.000 -> 0.500 MiB, -50.0 %"]


def test_versions_that_differ_are_named():
    other = {"torch": "3", "lightning_batchmem": "1"}
    assert growth(memory(), memory(versions=other)).notes == [
        "The reference was measured with torch 2, and this with torch 3."
    ]
