import os
from pathlib import Path

import pytest

from lightning_batchmem.profile.run_folder import RunFolder
from lightning_batchmem.profile.step import UNREAD, DeviceReading, Step
from lightning_batchmem.profile.step_csv import COLUMNS, StepCsv, read_rows
from tests.helpers.profiled import MIB, rows
from tests.helpers.steps import interval

HEADER = (
    "step,stage,batch_size,peak_allocated_mib,peak_reserved_mib,limit_mib,"
    "samples_per_s,items_per_s,step_ms,data_wait_pct,gpu_pct,cpu_pct,peak_before_mib"
)
STEP = Step(7, "train", 8, 0.5, 0.125, 3 * MIB, 4 * MIB)


def written(directory, *steps, reading=UNREAD, **options):
    directory.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(directory)
    file = StepCsv(folder.csv, **options)
    file.take(interval(*steps, reading=reading))
    file.close()
    return folder.path


def test_units_and_columns(tmp_path):
    step = STEP._replace(items=100, before_bytes=5 * MIB)
    reading = DeviceReading(16 * MIB, ("gpu_pct", 81.5))
    path = written(tmp_path, STEP, step, reading=reading, world_size=2)
    assert path.read_text().splitlines()[0] == HEADER == ",".join(COLUMNS)
    first, row = rows(path)
    # The device is read at the end of the last step.
    assert (first["limit_mib"], first["gpu_pct"]) == ("", "")
    present = {name: value for name, value in row.items() if value}
    values = [float(value) if name != "stage" else value for name, value in present.items()]
    assert values == [7, "train", 8, 3, 4, 16, 32, 400, 500, 25, 81.5, 5]
    assert row["cpu_pct"] == ""


def test_unknown_values_are_empty_and_never_0(tmp_path):
    row = rows(written(tmp_path, Step(0, "train", None, 0.5, None, 0)))[0]
    present = {name: value for name, value in row.items() if value}
    assert present == {
        "step": "0",
        "stage": "train",
        "peak_allocated_mib": "0.000",
        "step_ms": "500.000",
    }
    without_peaks = Step(0, "train", 1, 0.0, 0.0, None)
    row = rows(written(tmp_path / "2", without_peaks))[0]
    assert row["peak_allocated_mib"] == ""


def test_rows_are_read_back(tmp_path):
    (row,) = read_rows(written(tmp_path, STEP, reading=DeviceReading(16 * MIB)))
    memory = {"peak_allocated_mib": 3, "peak_reserved_mib": 4, "limit_mib": 16}
    memory["peak_before_mib"] = None
    assert row == {"step": 7, "stage": "train", **memory}
    (tmp_path / "other.csv").write_text("step,other\n1,2\n")
    message = r"must be that of a memory_per_batch\.csv, got .*'step,other'"
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / "other.csv")


def test_rows_are_in_the_file_before_its_end(tmp_path):
    folder = RunFolder(tmp_path)
    file = StepCsv(folder.csv)
    file.take(interval(STEP, STEP))
    file.take(interval(STEP))
    assert len(rows(folder.path)) == 3
    file.close()
    file.close()


def test_a_full_disk_is_one_warning_and_ends_the_file(tmp_path):
    folder = RunFolder(tmp_path)
    file = StepCsv(folder.csv)
    file.take(interval(STEP))
    with open("/dev/full", "w") as full:
        for descriptor in Path("/proc/self/fd").iterdir():
            if descriptor.exists() and descriptor.samefile(folder.path):
                os.dup2(full.fileno(), int(descriptor.name))
    with pytest.warns(UserWarning, match=r"memory_per_batch\.csv gets no more rows.*No space left"):
        file.take(interval(STEP))
    # Without another warning, which would be an error.
    file.take(interval(STEP))
    file.close()
    assert len(rows(folder.path)) == 1


def test_on_a_device_each_row_has_the_mean_time(tmp_path):
    steps = (STEP._replace(seconds=0.1), STEP._replace(seconds=0.3))
    found = rows(written(tmp_path, *steps, has_exact_times=False))
    assert [row["step_ms"] for row in found] == ["200.000", "200.000"]
