"""``python -m lightning_batchmem`` on what a real run wrote, and on what is left when it was killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_batchmem.batch_finder
import lightning_batchmem.memory_profiler
from lightning_batchmem import BatchFinder, MemoryProfiler
from lightning_batchmem.__main__ import main
from lightning_batchmem.report.step_csv import read_rows
from tests.lawful import MIB, Lawful, law

SEARCH_FIGURES = ["memory_vs_batch_size.png", "throughput_vs_batch_size.png"]
RUN_FIGURES = ["memory_composition.png", "memory_over_steps.png"]
ALL_FIGURES = sorted(RUN_FIGURES + SEARCH_FIGURES)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a run that searched (400 samples), trained 13 steps and saved; and its plan as JSON."""
    from tests.conftest import FakeDevice

    directory = tmp_path_factory.mktemp("finished")
    device_memory, finder = FakeDevice(budget_bytes=500 * MIB), BatchFinder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_batchmem.batch_finder, "device_memory_for", lambda device: device_memory)
        patch.setattr(lightning_batchmem.memory_profiler, "device_memory_for", lambda device, quick: device_memory)
        trainer = Trainer(
            accelerator="cpu",
            default_root_dir=directory,
            callbacks=[
                finder,
                MemoryProfiler(),
                ModelCheckpoint(directory / "checkpoints", save_on_train_epoch_end=True),
            ],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=1,
        )
        trainer.fit(Lawful(device_memory, law))
    assert finder.plan is not None
    return directory, finder.plan.to_json()


@pytest.fixture
def log_dir(finished: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return shutil.copytree(finished[0], tmp_path / "logs")


def drawn(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.png"))


def test_a_finished_run(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(log_dir)]) == 0
    said = capsys.readouterr()
    assert drawn(log_dir) == ALL_FIGURES
    for name in drawn(log_dir):
        assert str(log_dir / name) in said.out.splitlines()
        assert (log_dir / name).stat().st_size > 10_000
    assert said.err == ""
    assert json.loads((log_dir / "memory_summary.json").read_text())["steps"] == 13
    (row,) = (line.split("│")[1:-1] for line in said.out.splitlines() if "memory_per_batch.csv" in line)
    rows = read_rows(log_dir / "memory_per_batch.csv")
    peak = max(row.peak_bytes or 0 for row in rows)
    samples_per_second = 5000 / sum(row.step_seconds or 0.0 for row in rows)
    name, steps, highest, step, speed = map(str.strip, row)
    assert (name, steps, highest) == ("memory_per_batch.csv", "13", f"{peak / MIB:,.1f} MiB")
    assert rows[int(step)].peak_bytes == peak
    assert float(speed.replace(",", "")) == pytest.approx(samples_per_second, rel=1e-2)


def test_in_a_process_with_a_directory_and_a_format_of_its_own(log_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_batchmem", str(log_dir), "--out", "figures", "--format", "svg"]
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "COLUMNS": "80", "MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    before = sorted(log_dir.rglob("*"))
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figures" / "memory_over_steps.svg").read_text().startswith("<?xml")
    assert "figures/memory_vs_batch_size.svg" in done.stdout.splitlines()
    assert sorted(log_dir.rglob("*")) == before


def test_a_plan_in_a_file_of_its_own_is_preferred(
    finished: tuple[Path, str], log_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = json.loads(finished[1])
    plan["evaluation"] = json.loads(finished[1])
    (log_dir / "run").mkdir()
    (log_dir / "run" / "batch_plan.json").write_text(json.dumps(plan))
    assert main([str(log_dir)]) == 0
    assert drawn(log_dir) == sorted(
        [
            *ALL_FIGURES,
            *(f"run/evaluation_{name}" for name in SEARCH_FIGURES),
            *(f"run/{name}" for name in SEARCH_FIGURES),
        ]
    )
    assert capsys.readouterr().err == ""


def test_what_is_numbered_is_drawn_under_its_number(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(log_dir / "checkpoints")
    for name in ("memory_per_batch.csv", "memory_summary.json", "batch_plan.json"):
        path = log_dir / name
        shutil.copy(path, path.with_stem(f"{path.stem}_1"))
    shutil.copy(log_dir / "memory_summary.json", log_dir / "memory_summary_test.json")
    assert main([str(log_dir)]) == 0
    numbered = [name.replace(".png", "_1.png") for name in ALL_FIGURES]
    assert drawn(log_dir) == sorted([*ALL_FIGURES, *numbered, "memory_composition_test.png"])
    assert capsys.readouterr().err == ""


def test_a_csv_and_a_checkpoint_are_enough(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in log_dir.glob("*.json"):
        path.unlink()
    assert main([str(log_dir)]) == 0
    assert drawn(log_dir) == [*(f"checkpoints/{name}" for name in SEARCH_FIGURES), "memory_over_steps.png"]
    assert capsys.readouterr().err.splitlines() == [
        f"No summary was found in {log_dir}; MemoryProfiler writes memory_summary.json at the end of a run."
    ]


def test_a_summary_of_a_run_too_short_for_its_parts(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log_dir / "memory_summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "breakdown": None}))
    assert main([str(log_dir)]) == 0
    assert drawn(log_dir) == [name for name in ALL_FIGURES if name != "memory_composition.png"]
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"No memory_composition from {path}: parts must be known")


def save_checkpoint(path: Path, callbacks: dict[str, Any], *, time: int) -> None:
    torch.save({"callbacks": callbacks}, path)
    os.utime(path, (time, time))


def test_the_newest_checkpoint_that_has_a_plan(
    finished: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = json.loads(finished[1])
    save_checkpoint(tmp_path / "old.ckpt", {"BatchFinder": {"plan": "not looked at"}}, time=1)
    (tmp_path / "middle").mkdir()
    save_checkpoint(tmp_path / "middle" / "one.ckpt", {"BatchFinder": {"plan": plan}}, time=2)
    save_checkpoint(tmp_path / "new.ckpt", {"BatchFinder": {}}, time=3)
    save_checkpoint(tmp_path / "newer.ckpt", {}, time=4)
    (tmp_path / "sharded.ckpt").mkdir()
    assert main([str(tmp_path)]) == 0
    assert drawn(tmp_path) == [f"middle/{name}" for name in SEARCH_FIGURES]
    assert capsys.readouterr().err.splitlines() == [
        f"No memory_per_batch.csv was found in {tmp_path}; MemoryProfiler writes it."
    ]


def test_files_that_cannot_be_read_are_named(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint,) = log_dir.rglob("*.ckpt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    torch.save({"callbacks": {}, "mine": Lawful}, log_dir / "pickled.ckpt")  # a class: never loaded
    (log_dir / "batch_plan.json").write_text("{}")
    (log_dir / "memory_summary.json").write_text("[]")
    (log_dir / "memory_per_batch_1.csv").write_text("a,b\n1,2\n")
    (log_dir / "memory_per_batch_2.csv").write_text((log_dir / "memory_per_batch.csv").read_text().splitlines()[0])
    assert main([str(log_dir)]) == 0
    assert drawn(log_dir) == ["memory_over_steps.png"]
    said = capsys.readouterr().err.splitlines()
    for path, line in zip(
        ["memory_per_batch_1.csv", "memory_per_batch_2.csv", "batch_plan.json", "pickled.ckpt"], said, strict=False
    ):
        assert line.startswith(str(log_dir / path))
    assert said[4].startswith(f"{checkpoint} was not read: ")
    assert said[5].startswith("No plan of BatchFinder was found in")
    assert said[6].startswith(f"{log_dir / 'memory_summary.json'} was not read: text must be the JSON of a Summary")
    assert said[7].startswith("No summary was found in")
    assert len(said) == 8


def test_a_run_that_was_killed(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log_dir / "memory_per_batch.csv"
    whole, lines = read_rows(path), path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]) + lines[5][:30])  # four steps, and a piece of the fifth
    assert read_rows(path) == whole[:4]
    path.write_text("".join(lines[:5]) + lines[5].rstrip()[:-2])  # all columns, the last number cut short
    assert read_rows(path) == whole[:4]
    path.write_text("".join(lines[:5]) + lines[5][:30] + "\r\n" + "".join(lines[6:]))  # went on behind it
    assert read_rows(path) == whole[:4] + whole[5:]
    assert main([str(log_dir)]) == 0
    assert "12 │" in capsys.readouterr().out


def csv_line(header: str, **cells: object) -> str:
    """A row with these cells; the others are empty."""
    assert {*cells} <= {*header.split(",")}
    return ",".join(str(cells.get(name, "")) for name in header.split(",")) + "\n"


def test_what_the_csv_leaves_empty_is_none(log_dir: Path) -> None:
    path = log_dir / "memory_per_batch.csv"
    header = path.read_text().splitlines()[0]
    evaluation = {"peak_allocated_mib": 1.5, "step_ms": 250.0, "forward_peak_mib": 1.25}
    lines = [
        csv_line(header, step=7, stage="train"),
        csv_line(header, step=8, stage="validate", batch_size=4, **evaluation),
        csv_line(header, step=9, stage="train", batch_size="x"),
    ]
    path.write_text(f"{header}\n{''.join(lines)}")
    one, two = read_rows(path)
    assert one == (7, "train", None, None, None, None, None, None, {})
    assert two == (8, "validate", 4, 1.5 * MIB, None, None, None, 0.25, {"forward": 1.25 * MIB})


def test_only_steps_without_memory(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(log_dir / "checkpoints")
    for found in log_dir.glob("*.json"):
        found.unlink()
    path = log_dir / "memory_per_batch.csv"
    header = path.read_text().splitlines()[0]
    path.write_text(f"{header}\n{csv_line(header, step=7, stage='train')}")
    assert main([str(log_dir)]) == 1
    said = capsys.readouterr()
    assert "No memory_over_steps from" in said.err
    assert f"No figure was drawn from {log_dir}." in said.err.splitlines()
    assert "0.0 MiB" not in said.out


def test_nothing_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        f"No memory_per_batch.csv was found in {tmp_path}; MemoryProfiler writes it.",
        f"No plan of BatchFinder was found in {tmp_path}, neither in a batch_plan.json nor in a checkpoint.",
        f"No figure was drawn from {tmp_path}.",
    ]
    with pytest.raises(SystemExit) as error:
        main([str(tmp_path / "missing")])
    assert error.value.code == 2
    assert "LOG_DIR must be a directory, got" in capsys.readouterr().err


def test_no_place_to_write(log_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(log_dir), "--out", str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_without_matplotlib(log_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # type: ignore[arg-type]  # where it was not loaded
    assert main([str(log_dir)]) == 1
    said = capsys.readouterr()
    assert 'pip install "lightning-batchmem[plot]"' in said.err
    assert "memory_per_batch.csv" in said.out


def test_the_help_fits_into_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as error:
        main(["--help"])
    assert error.value.code == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    for word in (
        "memory_per_batch.csv",
        "memory_summary.json",
        "batch_plan.json",
        "*.ckpt",
        "--out DIR",
        "--format {png,svg}",
    ):
        assert word in said
