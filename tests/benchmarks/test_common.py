from __future__ import annotations

import json
from pathlib import Path

import pytest

import lightning_batchmem
from benchmarks import common


def test_answers_when_the_package_is_the_installed_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(common.PACKAGE_VARIABLE, str(Path(lightning_batchmem.__file__).parents[1]))
    common.answer({"size": 3})
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"size": 3}


def test_refuses_to_answer_for_another_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(common.PACKAGE_VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeError, match=f"was to come from {tmp_path}, and came from"):
        common.answer({})


def test_the_installed_package_comes_before_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.delenv(common.PACKAGE_VARIABLE, raising=False)
    assert common.environment()["PYTHONPATH"] == f"{common.ROOT}:/elsewhere"
    monkeypatch.setenv(common.PACKAGE_VARIABLE, "/package")
    assert common.environment()["PYTHONPATH"] == f"/package:{common.ROOT}:/elsewhere"


def test_an_error_is_one_line() -> None:
    assert common.described(RuntimeError("\nfull\nof lines")) == "RuntimeError: full"
    assert common.described(MemoryError()) == "MemoryError"


def test_the_folder_is_named_after_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert common.device_folder() == "nvidia-h100-80gb-hbm3"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3})
    assert common.device_folder() == "cpu-2-cores"
