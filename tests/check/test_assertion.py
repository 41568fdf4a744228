"""assert_memory in a test suite."""

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.utils.data import DataLoader

from lightning_batchmem import assert_memory
from lightning_batchmem.__main__ import main

WIDTH = 2


@pytest.fixture(autouse=True)
def reads_in_this_process(reads_here):
    """The start of a worker takes long."""


def make():
    model = BoringModel()
    model.layer = nn.Linear(32, WIDTH)
    return model, DataLoader(RandomDataset(32, 100), batch_size=3)


@pytest.fixture
def reference(tmp_path):
    """The reference of ``make``, as the command line writes it."""
    path = tmp_path / "memory.json"
    assert main(["check", f"{__name__}:make", "--reference", str(path), "--update"]) == 0
    return path


def test_the_same_model_passes_and_a_wider_one_does_not(reference, monkeypatch, capsys):
    capsys.readouterr()
    assert_memory(make, reference)
    assert capsys.readouterr().out == ""
    monkeypatch.setitem(make.__globals__, "WIDTH", 16)
    with pytest.raises(AssertionError) as failed:
        assert_memory(make, str(reference), tolerance=0.01)
    lines = str(failed.value).splitlines()
    assert [line.partition(":")[0] for line in lines][:2] == ["forward", "backward"]
    assert lines[-1].startswith("fixed part (")
    assert lines[-1].endswith(" %, largest growth in layer")
    assert_memory(make, reference, tolerance=100.0)


def test_a_smaller_model_passes_and_is_named(reference, monkeypatch, capsys):
    monkeypatch.setitem(make.__globals__, "WIDTH", 1)
    capsys.readouterr()
    assert_memory(make, reference)
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["backward", "fixed part (forward)"]
    assert last == "The reference can be lowered: --update writes it again."


def test_another_version_is_named_where_memory_grew(reference, monkeypatch):
    reference.write_text(reference.read_text().replace('"torch": "', '"torch": "0.'))
    assert_memory(make, reference)
    monkeypatch.setitem(make.__globals__, "WIDTH", 16)
    with pytest.raises(AssertionError, match=r"\nThe reference was measured with torch 0\."):
        assert_memory(make, reference)


def test_without_a_file_it_fails_with_the_command_that_writes_it(tmp_path):
    path = tmp_path / "memory.json"
    with pytest.raises(AssertionError) as failed:
        assert_memory(make, path, base={"precision": "bf16-mixed"})
    text, command = str(failed.value).split(" Write it with: python -m lightning_batchmem ")
    assert text == f"{path} does not exist."
    assert command.startswith(f"check {__name__}:make --reference ")
    assert main(command.split()) == 0
    assert_memory(make, path, base={"precision": "bf16-mixed"})


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_a_wrong_tolerance(tmp_path, tolerance):
    with pytest.raises(ValueError, match=r"tolerance must be a share such as 0\.01, got"):
        assert_memory(make, tmp_path / "memory.json", tolerance)
